"""Explain what a training program did: read the traces of its ranks, say where each step went, and set that beside the prediction.

trace                  the types: events in columns, groups, collectives, steps
json_stream, reader    a profiler trace, streamed from its file; folder: those of all ranks
kernels                groups of kernels and operators by their names
recognise              steps, phases, layers and micro-batches of a trace
collectives, products  its collectives with bytes and groups, its products with shapes and rates
ranks                  the same collective on all ranks: clocks, and who arrived last
attribution            each nanosecond of a step is given to one part
causes                 what to change first
beside                 the prediction of a plan, given or recognised (recognised_plan), beside the trace
calibration            rates and links of later predictions from a trace
memory_snapshot        what filled a device at its peak
flight_record, flight  which rank hung a program
"""
