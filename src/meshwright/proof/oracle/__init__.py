"""What a proof compares one device with: the networks, losses and schedules written a second time, in plain float64 formulas."""
