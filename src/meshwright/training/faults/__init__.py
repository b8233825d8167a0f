"""Faults of a run: find the rank that hangs or is slow, stop and save on a signal, go back after a loss spike, and inject faults on purpose."""
