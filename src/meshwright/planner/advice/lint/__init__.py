"""Lint rules: known mistakes in a plan, each with its cost in seconds and a legal fix."""
