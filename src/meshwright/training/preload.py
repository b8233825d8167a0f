"""What every rank needs, imported once in the forkserver and shared by all ranks forked from it.

Imports take seconds, in which a Ctrl-C of the terminal ends this process without a word: the parent says what is to say.
"""
# ruff: noqa: E402  the signal comes before the imports it is about

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

import torch
import torch._dynamo
import torch.distributed
import torch.distributed._functional_collectives
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor

import meshwright.training.rank

torch.set_num_threads(1)

__all__ = ["meshwright", "torch"]
