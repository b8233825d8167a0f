"""Cost: the time and memory of a step program. Each file explains one formula; `step` combines them."""
