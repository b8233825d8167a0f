"""Predict: one plan answered. Lower it, cost the step program, and say what was assumed and how far the answer may be off."""
