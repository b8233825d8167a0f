"""Cost: what a step program takes in time and memory. Each file teaches one formula; `step` puts them together."""
