"""Data parallelism: bucketed all-reduce, ZeRO 1 to 3, hybrid sharding, local SGD and offload of optimizer states."""
