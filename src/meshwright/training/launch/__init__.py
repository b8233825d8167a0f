"""Ranks start and meet: local processes of a forkserver or of torch elastic, or the processes of torchrun, Slurm, Open MPI, Kubernetes, Ray."""
