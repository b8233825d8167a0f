"""One device in the place of many ranks: reproduces lossy sums and per-rank gradients, so that a proof can compare them."""
