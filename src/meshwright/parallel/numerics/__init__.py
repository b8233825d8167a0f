"""Numbers narrower than float32: 16-bit training with master weights, fp8 products, compressed gradients."""
