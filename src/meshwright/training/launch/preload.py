"""Imports that every rank needs, done once in the forkserver and shared by all ranks forked from it.

They take seconds. A Ctrl-C in that time ends the forkserver without output: the parent reports the interruption.
"""
# ruff: noqa: E402  the signal handler is set before the imports that it covers

import gc
import signal

gc.disable()  # collections while objects are only being made would take a sixth of the time
signal.signal(signal.SIGINT, signal.SIG_DFL)
for number in (
    signal.SIGTERM,
    signal.SIGUSR1,
):  # a scheduler signals the whole group: without the forkserver ranks cannot be waited for
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

import numpy.ma  # the first call of np.unique loads it
import torch
import torch._dynamo
import torch.distributed
import torch.distributed._functional_collectives
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor

import meshwright.training.launch.rank
from meshwright.describe.files import KINDS, tables

torch.set_num_threads(1)
for kind in KINDS:
    tables(kind)  # the plan file of a run names entries of the catalog
gc.freeze()
gc.enable()

__all__ = ["meshwright", "numpy", "torch"]
