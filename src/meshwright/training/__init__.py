"""Run a plan: the training step and its loop, data, optimizer, checkpoints, faults, what is measured, and how ranks start."""
