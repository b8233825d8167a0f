"""Emulation of many ranks on one device: lossy sums, per-rank gradients, fp8 products and 16-bit updates, with separate code."""
