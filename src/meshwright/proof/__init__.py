"""The proof that a plan trains the model one device would: same losses, gradients, parameters, and the communication
lowered."""
