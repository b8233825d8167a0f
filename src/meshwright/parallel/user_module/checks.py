"""Trial runs of a user's module before the first step: does the plan compute what one device computes?

    stages      the forward of the pipeline stages, one after the other on this rank, against the plain forward
    sharded     the forward of the split and sharded module against the plain forward, in evaluation mode
    cuts        a mask for all samples that is cut with the batch, because it is as long
    replicas    after the first backward: gradients of parameters that every tensor-parallel rank holds are equal

`samples` has the check of a batch against its halves.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn

from meshwright.errors import MeshwrightError
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.pieces import Piece
from meshwright.parallel.user_module.batches import (
    call,
    differ,
    sample_dim,
    samples_in,
    tensors_in,
    undisturbed,
    without_zeros,
)
from meshwright.parallel.user_module.dataflow import Routes
from meshwright.parallel.user_module.stages import Recorded, StageModule, copy_structure

FORWARD_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)


@torch.no_grad()
def check_stages(module: nn.Module, seen: Recorded, spans: list[range], routes: Routes, example: Any) -> None:
    """Run the stages on the example, each as its rank will, and raise if the output is not the plain forward's. Random numbers are those of the
    plain forward: a stage begins with its first state, and continues after the layers of other stages with the state after them."""
    sent: Any = ()
    with undisturbed(module), without_zeros(module):
        for number, span in enumerate(spans):
            stage = StageModule(copy_structure(module), seen, spans, number, routes)
            stage.inputs = example
            seen.random[0].restore()
            if number:
                after = seen.random[span[0]]
                previous = stage.root.get_submodule(seen.names[span[0] - 1])
                previous.register_forward_hook(lambda *_, state=after: state.restore())
            try:
                sent = stage(*sent)
            except FORWARD_ERRORS as error:
                raise MeshwrightError(
                    "MW-OWN-007",
                    f"the layers {span[0]} to {span[-1]} of '{seen.path}' do not run as a stage: {type(error).__name__}: {error}",
                    why="A stage runs the module's forward with NaN in place of what other stages compute and it does not read",
                    fix="plan.pp=1",
                ) from error
    pairs = zip(tensors_in(sent), tensors_in(seen.output), strict=False)
    if any(differ(staged, plain) for staged, plain in pairs):
        raise MeshwrightError(
            "MW-OWN-007",
            "the pipeline's forward of the example is not the module's",
            why="Stages would train another model than one device",
            fix="plan.pp=1, or check=False if forward is random in a way that a seed does not repeat",
        )


def check_cut(inputs: Any, example: Any, rows: int, dim: int) -> None:
    """Raise for a tensor that is cut into micro-batches because it is as long as the batch, and that the example has once for all samples."""
    samples = samples_in(example, dim)
    for tensor, like in zip(tensors_in(inputs), tensors_in(example), strict=False):
        if sample_dim(tensor, rows, dim) is not None and sample_dim(like, samples, dim) is None:
            raise cut_by_mistake(tensor, rows)


@contextmanager
def cuts_explained(inputs: Any, rows: int) -> Iterator[None]:
    """An error of forward on a micro-batch names an input that may be a mask for all samples: two of its dimensions are as long as the batch."""
    try:
        yield
    except FORWARD_ERRORS as error:
        square = next((t for t in list(tensors_in(inputs))[1:] if list(t.shape).count(rows) > 1), None)
        if square is None or isinstance(error, MeshwrightError):
            raise
        raise cut_by_mistake(square, rows, f": {error}") from error


def cut_by_mistake(tensor: Tensor, rows: int, error: str = "") -> MeshwrightError:
    return MeshwrightError(
        "MW-OWN-003",
        f"an input of {tuple(tensor.shape)} was cut into micro-batches with the batch of {rows} samples{error}",
        why="Every tensor as long as the batch is cut, also a mask for all samples",
        fix="a mask with a dimension for the samples",
    )


def any_rank(here: bool, device: str) -> bool:
    """Whether something is true on any rank, so that all of them stop together."""
    flag = torch.tensor(float(here), device=device)
    if distributed.get_world_size() > 1:
        distributed.all_reduce(flag)
    return bool(flag)


@torch.no_grad()
def evaluated(module: nn.Module, example: Any) -> list[Tensor]:
    """The output of a module in evaluation mode."""
    with undisturbed(module):
        module.eval()
        return list(tensors_in(call(module, example)))


def check_sharded(plain: list[Tensor], module: nn.Module, example: Any, device: str) -> None:
    """Raise if the forward of a split and sharded module is not that of the module as it was."""
    what = "the forward of the divided module is not that of the whole one"
    try:
        same = not any(map(differ, plain, evaluated(module, example)))
    except FORWARD_ERRORS as error:
        if isinstance(error, MeshwrightError):
            raise
        same, what = False, f"the divided module does not run: {type(error).__name__}: {error}"
    if any_rank(not same, device):
        raise MeshwrightError(
            "MW-OWN-009",
            what,
            why="The sharding table leaves modules that compute something else with a part of the columns, rows or heads",
            fix='"row" after every "column", "counts" for attributes that count heads; or check=False to find out in the first step',
        )


@torch.no_grad()
def check_replicas(pieces: list[Piece], mesh: Mesh) -> MeshwrightError | None:
    """An error if ranks of a tensor-parallel group have different gradients for a parameter that each of them holds whole: it is a partial sum,
    and the copies of the parameter would diverge."""
    for piece in pieces:
        if not {"tp", "expert_tp"} & set(piece.box.copies) or not piece.parameter.requires_grad:
            continue
        largest, smallest = piece.gradient.clone(), piece.gradient.clone()
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=mesh.group("tp"))
        distributed.all_reduce(smallest, distributed.ReduceOp.MIN, group=mesh.group("tp"))
        if differ(largest, smallest):
            return MeshwrightError(
                "MW-TP-011",
                f"the gradient of '{piece.name}' differs between tensor-parallel ranks",
                why="Each rank adds what its columns contribute: where activations enter split products, their gradients must be summed",
                fix='a row "region" for the module that contains the "column" products, or "inside" for a parameter within a region',
            )
    return None
