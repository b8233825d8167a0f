"""Context parallelism: the sequence is split over ranks, and attention runs as a ring, an all-gather or Ulysses."""
