"""What a run measures: seconds, communication, memory, traces of its steps, and the calibration that its prediction starts from."""
