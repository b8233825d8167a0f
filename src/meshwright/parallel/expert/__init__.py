"""Expert parallelism: routed experts on many ranks, the all-to-alls that bring tokens to them, and the balance of their load."""
