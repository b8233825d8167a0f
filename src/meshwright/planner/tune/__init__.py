"""A few measured runs choose the plan: which candidate to run next, what its run says, and when to stop."""
