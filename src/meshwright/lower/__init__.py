"""Lowering: from (model, plan, workload, stack) to the operations of one training step, for a whole batch of plans at once."""
