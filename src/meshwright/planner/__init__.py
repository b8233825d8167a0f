"""The planner: which plan is the fastest that fits, and why."""
