"""The proof that a plan trains the model one device would: equal losses, gradients and parameters, and the collectives that were lowered."""
