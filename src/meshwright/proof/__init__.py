"""Prove that a plan trains the same model as one device: equal losses, gradients and parameters, and the lowered collectives."""
