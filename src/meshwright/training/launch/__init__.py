"""Ranks start and meet: local processes of a forkserver, or the processes of torchrun, Slurm, Open MPI, Kubernetes, Ray."""
