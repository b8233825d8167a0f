"""Advice about a plan: why it won, what the alternatives cost, what it is sensitive to, and what is wrong with it."""
