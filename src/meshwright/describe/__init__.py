"""What flows through Meshwright: Model, Cluster, Stack, Workload, Plan and Layout, and the catalog of known ones."""
