"""Everything that a run needs to go on, as boxes of named tensors and a few numbers per rank.

    weights       the masters where the plan keeps them (parameters are their rounding), else the parameters; router biases are among them
    optimizer     each state of each parameter: moments have the parameter's box, step counts are one number for the whole tensor
    ema           the moving average of the weights, where the optimizer section asks for one
    step          one number. The learning rate, the order of the data and all dropout masks are functions of the seed and the step
    loss scale    its value and the steps since it last changed (fp16)
    local SGD     every replica's tensors, its tokens and steps since the last average
    compression   what each rank has not sent yet, and PowerSGD's bases: they belong to one rank's messages, so that they are restored on the
                  same plan and start empty on another
    random        the states of torch, Python and numpy on each rank, for code that draws from them

Copies of one box exist on several ranks; one of them writes it. Piece i is written by copy i mod (number of copies), so that the
replicas of a data-parallel run share the work.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from meshwright.describe.sharding import KV_COPIES, Box
from meshwright.describe.variants import OPTIMIZERS
from meshwright.errors import MeshwrightError
from meshwright.parallel.data.reduction import compressors_in
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.numerics.precision import LossScale
from meshwright.parallel.pieces import Piece, local_tensor
from meshwright.parallel.sharded import Sharded
from meshwright.training.checkpoint.store import BoxEntry
from meshwright.training.optimizer.average import WeightAverage
from meshwright.training.optimizer.make import role_of
from meshwright.units import Json

WEIGHT, AVERAGE, OPTIMIZER, NUMBER = "weight", "ema", "optimizer.", "optimizer-number."


class SavableTrainer(Protocol):
    """A training whose state is saved: `training.loop.Trainer`, or a user's module (`training.user_module`)."""

    @property
    def parallel(self) -> Sharded: ...

    optimizer: Any
    average: WeightAverage | None
    scale: LossScale
    step: int
    skip_steps: set[int]


@dataclass(frozen=True)
class TrainerState:
    """One rank's part of a checkpoint."""

    step: int
    entries: list[BoxEntry]
    numbers: Json

    @property
    def bytes(self) -> int:
        """Bytes that this rank writes."""
        return sum(entry.tensor.nbytes for entry in self.entries if entry.written)


def state_of(trainer: SavableTrainer) -> TrainerState:
    """The state of a trainer between two steps; its tensors are the trainer's own, not copies."""
    entries = [*shared_entries(trainer, optimizer_states(trainer)), *rank_entries(trainer)]
    return TrainerState(trainer.step, entries, rank_numbers(trainer))


def replicas_of(trainer: SavableTrainer) -> int:
    """The number of replicas whose tensors differ (local SGD); 0: none do."""
    return trainer.parallel.mesh.size("replicate") if trainer.parallel.local is not None else 0


def replica_prefix(trainer: SavableTrainer) -> str:
    """The beginning of the keys of this rank's replica."""
    return f"replica-{trainer.parallel.mesh.index('replicate')}/" if replicas_of(trainer) else ""


def optimizer_states(trainer: SavableTrainer) -> dict[int, dict[str, Tensor]]:
    """The optimizer's tensors of each updated piece, by its place in the list."""
    state: Mapping[Any, Mapping[str, Any]] = trainer.optimizer.state
    return {
        i: {name: value for name, value in state.get(piece.parameter, {}).items() if isinstance(value, Tensor)}
        for i, piece in enumerate(trainer.parallel.updated)
    }


def expected_states(piece: Piece, optimizer: str) -> frozenset[str]:
    """The states that an optimizer keeps for a trained piece, after its first update."""
    kind = OPTIMIZERS[optimizer]
    if kind.matrix_states is not None and role_of(piece) == "matrix":
        return frozenset(f"{OPTIMIZER}{name}" for name in kind.matrix_states)
    each = OPTIMIZER if piece.full_shape else NUMBER  # all states of a parameter that is one number are numbers
    return frozenset([*(f"{each}{name}" for name in kind.states), *(f"{NUMBER}{name}" for name in kind.numbers)])


def shared_entries(
    trainer: SavableTrainer, states: Mapping[int, Mapping[str, Tensor]], average: bool = True
) -> Iterator[BoxEntry]:
    """The boxes that a plan shares out: weights, their moving average, and the given states of the optimizer."""
    averages = iter(trainer.average.values if average and trainer.average is not None else [])
    parallel, prefix = trainer.parallel, replica_prefix(trainer)
    for i, piece in enumerate(parallel.updated):
        if piece.frozen:
            continue
        writes = [is_writer(box, i, parallel.mesh, parallel.degrees.kv_copies) for box in piece.boxes]
        yield from box_entries(f"{prefix}{WEIGHT}/{piece.name}", piece, piece.local, writes)
        if (averaged := next(averages, None)) is not None:
            yield from box_entries(f"{prefix}{AVERAGE}/{piece.name}", piece, averaged, writes)
        for name, value in states.get(i, {}).items():
            value = local_tensor(value)
            if value.ndim and value.shape == piece.local.shape:
                yield from box_entries(f"{prefix}{OPTIMIZER}{name}/{piece.name}", piece, value, writes)
            elif not value.ndim:  # one number for the whole parameter: the rank with its first element writes it
                first = writes[0] and not any(piece.start) and piece.local.numel() > 0
                yield BoxEntry(f"{prefix}{NUMBER}{name}/{piece.name}", (1,), (0,), value.reshape(1), first)
            else:
                raise MeshwrightError(
                    "MW-CKPT-005",
                    f"'{name}' of {piece.name} is of shape {tuple(value.shape)}, not that of the parameter",
                    why="A checkpoint divides a state of the optimizer as its parameter is divided",
                    fix="an optimizer with one number per element: adamw, adam, muon, momentum, sgd",
                )
    for name, buffer, first in parallel.buffers():
        yield BoxEntry(f"{prefix}{WEIGHT}/{name}", tuple(buffer.shape), (0,) * buffer.ndim, buffer, first)


def box_entries(key: str, piece: Piece, local: Tensor, writes: list[bool]) -> Iterator[BoxEntry]:
    """A tensor with the boxes of a piece."""
    for (box, view), written in zip(piece.views(local), writes, strict=True):
        yield BoxEntry(key, piece.full_shape, box.local_start, view, written and view.numel() > 0)


def is_writer(box: Box, number: int, mesh: Mesh, kv_copies: int) -> bool:
    """Whether this rank writes its copy of a box."""
    index, count = 0, 1
    for axis in box.copies:
        if axis == KV_COPIES:  # a part of tp's ranks: no axis of the layout
            size, at = kv_copies, mesh.index("tp") % kv_copies
        else:
            size, at = mesh.size(axis), mesh.index(axis)
        index, count = index * size + at, count * size
    return not box.later_stage and index == number % count


def rank_entries(trainer: SavableTrainer) -> Iterator[BoxEntry]:
    """Tensors that belong to this rank alone."""
    prefix = f"rank-{trainer.parallel.mesh.rank}/"
    for name, tensor in (*random_states(trainer.parallel.mesh.device).items(), *compression_tensors(trainer).items()):
        if tensor.numel():
            yield BoxEntry(f"{prefix}{name}", tuple(tensor.shape), (0,) * tensor.ndim, tensor)


def rank_numbers(trainer: SavableTrainer) -> Json:
    """Numbers that belong to this rank, ready for JSON."""
    parallel, scale = trainer.parallel, trainer.scale
    out: Json = {
        "loss_scale": [scale.value, scale.good_steps, scale.skipped],
        "scale": parallel.applied_scale,
        "normal_numbers": unused_normal_numbers(),
        "skip_steps": sorted(trainer.skip_steps),
    }
    if parallel.local is not None:
        out["replica"] = parallel.mesh.index("replicate")
        out["local_sgd"] = [parallel.local.since, float(parallel.local.tokens)]
    steps = [
        {str(index): count for index, count in getattr(compressor, "steps", {}).items()}
        for compressor in compressors_in(parallel.reductions)
    ]
    return {**out, "compression_steps": steps} if steps else out


def compression_tensors(trainer: SavableTrainer) -> dict[str, Tensor]:
    """Errors of each compressor by message, and PowerSGD's bases by message and offset."""
    out: dict[str, Tensor] = {}
    for i, compressor in enumerate(compressors_in(trainer.parallel.reductions)):
        bases = getattr(compressor, "bases", {})
        out |= {f"compression/{i}/error/{index}": error for index, error in compressor.feedback.errors.items()}
        out |= {f"compression/{i}/basis/{index}/{offset}": basis for (index, offset), basis in bases.items()}
    return out


def restore_compression(trainer: SavableTrainer, tensors: Mapping[str, Tensor], steps: list[dict[str, int]]) -> None:
    """Put back what `compression_tensors` and `rank_numbers` gave."""
    compressors = compressors_in(trainer.parallel.reductions)
    for name, tensor in tensors.items():
        _, i, kind, *place = name.split("/")
        compressor: Any = compressors[int(i)]
        if kind == "error":
            compressor.feedback.errors[int(place[0])] = tensor
        else:
            compressor.bases[int(place[0]), int(place[1])] = tensor
    for each, compressor in zip(steps, compressors, strict=True):
        if each:
            compressor.steps.update({int(index): count for index, count in each.items()})


def random_states(device: str) -> dict[str, Tensor]:
    """The states of the random generators of this process, as tensors."""
    _, keys, position, _, _ = numpy_state()
    out = {
        "random/torch": torch.get_rng_state(),
        "random/python": torch.tensor(random.getstate()[1], dtype=torch.int64),
        "random/numpy": torch.tensor([*map(int, keys), position], dtype=torch.int64),
    }
    if device.startswith("cuda"):
        out["random/cuda"] = torch.cuda.get_rng_state(device)
    return out


def unused_normal_numbers() -> list[Any]:
    """Python and numpy draw normal numbers in pairs: the second one of a pair, if it was not used yet."""
    *_, has_second, second = numpy_state()
    return [random.getstate()[2], has_second, second]


def numpy_state() -> Any:
    return np.random.get_state(legacy=True)


def restore_random(states: Mapping[str, Tensor], normal_numbers: list[Any], device: str) -> None:
    """Set the random generators of this process."""
    python_second, has_second, second = normal_numbers
    torch.set_rng_state(states["random/torch"])
    random.setstate((3, tuple(states["random/python"].tolist()), python_second))
    *keys, position = states["random/numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_second, second))
    if device.startswith("cuda") and "random/cuda" in states:
        torch.cuda.set_rng_state(states["random/cuda"], device)
