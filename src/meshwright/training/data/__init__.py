"""Training data: token files on disk, the order in which samples are drawn from them, and the batches of a rank."""
