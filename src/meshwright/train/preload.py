"""What every rank needs, imported once in the forkserver and shared by all ranks forked from it."""

import torch
import torch._dynamo
import torch.distributed
import torch.distributed._functional_collectives
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor

import meshwright.train.rank

torch.set_num_threads(1)

__all__ = ["meshwright", "torch"]
