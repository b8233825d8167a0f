"""Lowering: from (model, plan, workload, stack) to the step program of a batch of plans (`step`), read for any one rank by `rank`."""
