"""Run a plan: the training step and its loop, data, optimizer, measurement, and the start of local processes."""
