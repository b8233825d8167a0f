"""Parallel strategies for models that contain no parallelism; `apply` applies them in one fixed order."""
