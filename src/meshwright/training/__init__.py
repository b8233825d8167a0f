"""Running a plan: the step and its loop, the data, the optimizer, the measurement, and starting the processes."""
