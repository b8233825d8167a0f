"""Measure a machine or a cluster: its links by collectives and pairs of ranks, its devices by the operations of a training step.

    session      join the ranks that torchrun, Slurm or `--ranks` started
    timing       seconds of one call: warm-up, synchronisation, median and quartiles
    backends     one adapter for each library: gloo, NCCL, and the programs of Meshwright
    collectives  the sweep over operations, sizes and pairs, within a time budget
    device       matrix products, attention, copies, optimizer and launches of a rank's device
    slowdown     how much slower a device computes while other ranks compute, and during a collective
    topology     hosts, devices, links and interfaces as the system reports them

The records are `calibrate.points`: `calibrate` reads them without torch.
"""
