"""Parallel strategies applied to a model that knows nothing of them; `apply` applies them in one fixed order."""
