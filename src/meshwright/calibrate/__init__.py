"""Predictions compared with measurements: read published runs, predict them, and score the errors."""
