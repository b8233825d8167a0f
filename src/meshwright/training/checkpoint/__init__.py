"""Checkpoints: boxes of named full tensors in safetensors files, with a manifest of hashes, so that any plan opens any other plan's checkpoint."""
