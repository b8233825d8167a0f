"""Predictions held to measurements: published runs read as cases, their errors told, constants fitted."""
