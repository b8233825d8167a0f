"""Explain what a training program did: read the traces of its ranks, say where each step went, and set that beside the prediction.

trace        the types: events in columns, groups, collectives, steps
reader       a profiler trace, streamed from its file
kernels      groups of kernels and operators by their names
recognise    steps, phases, layers, micro-batches and collectives of a trace
attribute    each nanosecond of a step is given to one part
"""
