"""Parallel strategies applied to a model that knows nothing of them; `apply` puts them on in one fixed order."""
