"""Describe a training: Model, Cluster, Stack, Workload, Plan and Layout, their legality and sharding, and a catalog of presets."""
