"""Strategies put on a model that knows nothing of them: mesh, tensor, zero, pipeline, in the one order of `apply`."""
