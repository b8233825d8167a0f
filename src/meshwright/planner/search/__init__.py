"""The search: the space of legal plans, lower bounds that discard most of it, and the simulation of the leaders."""
