"""How a message reaches another rank: torch.distributed point-to-point, shared memory on one host, or both by peer."""
