"""`train --dry-run`: find what would stop a run, without running it.

    configuration   the plan is legal and `train` can run it
    data            the token files are there and fit the model
    memory, disk    of this machine, for its ranks, the run folder and the checkpoints
    rendezvous      all ranks of a launcher meet
    step            one step of the first rank of each pipeline stage, on a fake process group of the full number of ranks

The step runs the strategies, hooks and optimizer of the real one. Its tensors are fake: they have shapes and dtypes, no memory and no
values; its collectives send nothing. Where the step asks for a value (is the norm finite?), it gets one that lets it go on, and the routing of
tokens to experts is balanced (`balanced_routing`). A plan with another operation that depends on values is checked without its step.

Private names of torch: `FakeTensorMode`, `unset_fake_temporarily`; the group is `fake_group`.

Routing to experts in a step with fake tensors: which expert a token chooses depends on values, which fake tensors do not have.

Every expert gets an equal share of the copies. The numbers of copies are then plain integers (`Counts`), and the buffers that are sent to
experts and back have the sizes of a balanced step.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.describe.config import Config
from meshwright.describe.run_folder import CHECKPOINTS
from meshwright.host import replaced
from meshwright.parallel import apply as strategies
from meshwright.parallel.expert.dispatch import ExpertDispatch
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.numerics.precision import DTYPES, at_least_single
from meshwright.training.checkpoint.folder import check_room
from meshwright.training.fake_group import balanced_routing, fake_group
from meshwright.training.folder import check_unused
from meshwright.training.job import TrainingJob
from meshwright.training.launch.join import Meeting
from meshwright.training.launch.rank import placement
from meshwright.training.measure.one_rank import make_trainer, ranks_of_stages
from meshwright.training.run import check_world, make_job
from meshwright.units import format_bytes


class Counts(np.ndarray):
    """Numbers of copies, with the methods of a tensor that a dispatch calls."""

    @classmethod
    def balanced(cls, rows: int, experts: int) -> Counts:
        """`rows` copies over `experts`: equal numbers, the first ones get one more where they do not divide."""
        return (rows // experts + (np.arange(experts) < rows % experts)).view(cls)

    def view(self, *shape: Any) -> Any:  # type: ignore[override]
        return super().view(*shape) if isinstance(shape[0], type) else self.reshape(shape)


def rows_by_expert(dispatch: ExpertDispatch, device: torch.device) -> Tensor:
    return torch.arange(int(dispatch.incoming.sum()), device=device)


def rows_by_rank(dispatch: ExpertDispatch, outgoing: Any) -> list[list[int]]:
    return [numbers.sum(1).tolist() for numbers in (outgoing, *dispatch.incoming)]


BALANCED = (
    lambda routing, experts: Counts.balanced(len(routing.token_R), experts),
    lambda row, shape: np.broadcast_to(row, shape).view(Counts),
    (ExpertDispatch, "_by_expert", rows_by_expert),
    (ExpertDispatch, "_rows_by_rank", rows_by_rank),
)


def dry_run(
    config: Config, steps: int, seed: int, device: str, backend: str, folder: Path
) -> list[tuple[str, str]] | None:
    """Check a run; what was checked, with what was found. None on the ranks of a launcher that do not report."""
    place = placement(os.environ)

    def checked(ranks_here: int) -> TrainingJob:
        check_unused(folder)
        if place is not None:
            check_world(config, place.world)
        job = make_job(config, steps, seed, device, backend, folder, ranks_here, None)
        if config.checkpoint.keep:
            check_room(folder / CHECKPOINTS, checkpoint_bytes(config), config.checkpoint.keep)
        return job

    if place is None:
        job, met = checked(config.plan.world), f"{config.plan.world} ranks will be started on this machine"
    else:
        meeting = Meeting(place)
        hosts = meeting.exchange(meeting.host)
        job = meeting.succeed(lambda: checked(hosts.count(meeting.host)))
        met = f"{place.world} ranks on {len(set(hosts))} hosts have met"
        if place.rank:
            return None
    prediction = job.watch.prediction
    return [
        ("configuration", f"{config.plan.title()} can be trained"),
        *([("not run", "; ".join(config.model.not_run))] if config.model.not_run else []),
        ("data", ", ".join(config.data.path) or "the source code of Python's standard library"),
        ("memory", f"{prediction.memory_gib or 0.0:.3g} GiB predicted on the fullest rank"),
        ("disk", f"{format_bytes(checkpoint_bytes(config))} for each checkpoint"),
        ("rendezvous", met),
        ("step", fake_step(job.config)),
    ]


def checkpoint_bytes(config: Config) -> int:
    """Bytes of a checkpoint: weights and optimizer states of all parameters in fp32."""
    return int(4 * (1 + config.workload.state_copies) * config.model.total)


def fake_step(config: Config) -> str:
    """Run one step of a rank of each pipeline stage with fake tensors; what was run, in one line."""
    began, ranks = time.monotonic(), ranks_of_stages(config)
    for rank in ranks:
        try:
            run_fake_rank(config, rank)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            return f"not run: an operation of the step depends on values ({error.func})"
    of = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks, one of each pipeline stage,"
    return f"one step of {of} of {config.plan.world} in {time.monotonic() - began:.1f} s"


def run_fake_rank(config: Config, rank: int) -> None:
    plan = config.plan
    workload = config.workload.but(batch=plan.dp * plan.microbatch * plan.pp)  # more micro-batches repeat the same work
    with (
        fake_group(rank, plan.world),
        warnings.catch_warnings(),
        FakeTensorMode(allow_non_fake_inputs=True),
        built_outside(config),
    ):
        warnings.simplefilter("ignore")  # a fake tensor has no address
        trainer = make_trainer(replace(config, workload=workload), rank, NoWeights())
        with (
            Values(config.model.top_k / config.model.experts if config.model.experts else 1.0),
            balanced_routing(*BALANCED),
        ):
            trainer.train_step()


class NoWeights:
    """Initial weights without values."""

    def read(self, name: str, full: Sequence[int], start: Sequence[int], shape: Sequence[int]) -> Tensor:
        return torch.empty(tuple(shape))


class Values(TorchDispatchMode):
    """Answers what a step asks of values: a number is 1, a condition holds, a mask of one tensor selects every element, and a mask of
    tokens and experts the share `chosen`."""

    def __init__(self, chosen: float) -> None:
        super().__init__()
        self.chosen = chosen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is torch.ops.aten.index.Tensor and len(args[1]) == 1 and args[1][0].dtype == torch.bool:
            return args[0].reshape(-1)
        if func is torch.ops.aten.nonzero.default:
            return args[0].new_empty((round(args[0].numel() * self.chosen), args[0].ndim), dtype=torch.int64)
        return func(*args, **(kwargs or {}))


class RealMesh(Mesh):
    """A mesh whose ranks are real numbers: torch reads them when it makes its groups."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with unset_fake_temporarily():
            super().__init__(*args, **kwargs)

    @cached_property
    def expert_sharding(self) -> Any:
        with unset_fake_temporarily():
            return vars(Mesh)["expert_sharding"].func(self)

    def sharding(self) -> Any:
        with unset_fake_temporarily():
            return super().sharding()

    def new_groups(self, groups: list[list[int]]) -> Any:
        with unset_fake_temporarily():
            return super().new_groups(groups)


@contextmanager
def built_outside(config: Config) -> Iterator[None]:
    """While a plan is applied, make the mesh and the modules (on the meta device) and shard them outside of the fake mode, which cannot
    replace the parameters of a module, and takes a millisecond for each shard of a parameter on another rank."""
    plain_build, plain_shard, dtype = strategies.build, strategies.zero.shard, DTYPES[config.plan.param_dtype]

    def build(model: Any, layers: Any) -> Any:
        with unset_fake_temporarily():
            module = plain_build(model, layers)
            sharded = config.plan.zero > 0 and config.plan.shard * config.plan.cp > 1 and config.plan.master
            module.to(at_least_single(dtype) if sharded else dtype)
        object.__setattr__(module, "to", lambda *_, **__: module)  # it has its dtype
        return module

    def shard(*args: Any) -> None:
        with unset_fake_temporarily():
            plain_shard(*args)

    changes = (strategies, "build", build), (strategies, "Mesh", RealMesh), (strategies.zero, "shard", shard)
    with replaced(*changes):
        yield
