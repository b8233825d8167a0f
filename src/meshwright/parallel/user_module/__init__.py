"""A plan on a user's own `nn.Module`: `parallelize` applies it, `ParallelModule` trains with it."""
