"""Meshwright: plan, prove, run and check distributed training."""

__version__ = "0.1.0"
