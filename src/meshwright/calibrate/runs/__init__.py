"""Measured runs that predictions are held to: read from tables, predicted, compared, and used to fit the constants of stacks."""
