"""Tensor and sequence parallelism: column, row and vocabulary splits of linear layers, from a table of name patterns."""
