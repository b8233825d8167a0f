"""The search: the space of legal plans, lower bounds that discard most of it, and the leaders that are walked exactly."""
