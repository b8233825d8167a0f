"""Expert parallelism: routed experts spread over ranks, and the tokens that travel to them."""
