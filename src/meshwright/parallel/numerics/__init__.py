"""Numerics below float32: 16-bit training with master weights, fp8 matrix products, and compressed gradients."""
