"""Measure a machine or a cluster: its links by collectives and pairs of ranks, its devices by the operations of a training step.

    timing       seconds of one call: warm-up, synchronisation, median and quartiles; load of the machine
    backends     the ranks that torchrun, Slurm or `--ranks` started, and one adapter for each library: gloo, NCCL, our programs
    collectives  the sweep over operations, sizes and pairs, within a time budget
    operations   the operations of a training step, as calls to time
    device       matrix products, attention, copies, optimizer and launches of a rank's device
    contention   how much slower a device computes while other ranks compute
    run          `meshwright bench` on one rank: its options, its hardware, and compute during a collective

The records are `calibrate.points`: `calibrate` reads them without torch.
"""
