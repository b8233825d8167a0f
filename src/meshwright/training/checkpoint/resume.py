"""Resume: find the last good checkpoint, check that it is of this model, and fill a trainer with it, under any plan.

A tensor of a checkpoint is a set of boxes, and a piece of the running plan is a box: what a rank needs of a saved tensor is the
intersection, whatever plan wrote it. On the plan that wrote the checkpoint, training goes on bit for bit as if it had not stopped. On
another plan the same numbers are in other places, and sums are rounded in another order.

What cannot be carried over to another plan, each with a message:

    compression residuals    belong to the messages of one rank: they start empty, and what was not sent yet is lost
    local SGD                replicas are averaged, weighted by the tokens that each has seen since the last average
    random states            belong to one rank: kept where the number of ranks is the same

Nothing of a trainer is changed before everything has been checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from meshwright.describe.model import Model
from meshwright.describe.sharding import parameters
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError, listed
from meshwright.parallel.data import zero
from meshwright.parallel.data.reduction import compressors_in
from meshwright.parallel.pieces import Piece
from meshwright.training.checkpoint import folder
from meshwright.training.checkpoint.manifest import MANIFEST, Manifest, check_files, read_manifest
from meshwright.training.checkpoint.state import (
    NUMBER,
    OPTIMIZER,
    WEIGHT,
    replica_prefix,
    restore_compression,
    restore_random,
    shared_entries,
    updated_pieces,
)
from meshwright.training.checkpoint.store import Entry, read
from meshwright.training.checkpoint.together import is_first, on_first, together
from meshwright.training.loop import Trainer

Notify = Callable[[str], None]


@dataclass
class Resumed:
    """What was loaded, and what could not be carried over."""

    path: Path
    manifest: Manifest
    messages: list[str] = field(default_factory=list)


def resume(
    trainer: Trainer, source: Path, group: ProcessGroup | None = None, notify: Notify = lambda text: None
) -> Resumed | None:
    """Fill a trainer from `source`: one checkpoint, or a run folder, of which the last good checkpoint is used. None if a run folder
    has no checkpoint. A collective of a group of all ranks on the CPU; `notify` gets messages on the first rank."""
    found = open_checkpoint(source, group, notify)
    if found is None:
        return None
    together(lambda: check_fits(trainer, found.manifest), group)
    found.messages += load(trainer, found.path, found.manifest)
    for text in found.messages if is_first(group) else ():
        notify(text)
    return found


def open_checkpoint(
    source: Path, group: ProcessGroup | None = None, notify: Notify = lambda text: None
) -> Resumed | None:
    """The checkpoint to load, with its files verified; the ranks share the work. A checkpoint that was named must be good; of a run
    folder damaged ones are set aside and the last good one is used."""
    if (source / folder.CHECKPOINTS).is_dir():
        source = source / folder.CHECKPOINTS
    if on_first(lambda: (source / MANIFEST).exists(), group):
        verify_together(source, group)
        return Resumed(source, read_manifest(source))
    while True:
        name = on_first(lambda: next((path.name for _, path in reversed(folder.complete(source))), ""), group)
        if not name:
            return None
        path = source / name
        try:
            verify_together(path, group)
            return Resumed(path, read_manifest(path))
        except MeshwrightError as error:
            if error.code != "MW-CKPT-002":
                raise
            aside = on_first(partial(set_aside, path), group)
            if is_first(group):
                notify(f"{name} is damaged ({error.why}); it is now {aside}, and the checkpoint before it is used")


def set_aside(path: Path) -> str:
    return folder.set_aside(path).name


def verify_together(path: Path, group: ProcessGroup | None) -> None:
    """Read and hash the files of a checkpoint, each on one rank of the group; all ranks raise if one is damaged."""
    rank, ranks = (group.rank(), group.size()) if group is not None else (0, 1)

    def check() -> None:
        manifest = read_manifest(path)
        check_files(path, manifest, sorted(manifest.files)[rank::ranks])

    together(check, group)


def check_fits(trainer: Trainer, manifest: Manifest) -> None:
    """Raise if a checkpoint is not one of this model and optimizer: nothing has been changed yet."""
    model, workload = trainer.parallel.model, trainer.parallel.workload
    saved = {
        key.rpartition(f"{WEIGHT}/")[2]: tensor.shape
        for key, tensor in manifest.tensors.items()
        if key.startswith((f"{WEIGHT}/", f"replica-0/{WEIGHT}/"))
    }
    expected = {p.name: p.shape for p in parameters(model, range(model.layers))}
    check_model(model, manifest, expected, saved)
    optimizer = Workload(**manifest.workload).optimizer
    kinds = states_by_parameter(manifest)
    if kinds and optimizer != workload.optimizer:
        raise MeshwrightError(
            "MW-CKPT-008",
            f"the checkpoint contains the states of the optimizer {optimizer}; this run uses {workload.optimizer}",
            why="States of one optimizer mean something else in another",
            fix=f"--set workload.optimizer={optimizer}",
        )
    trained = {piece.name for piece in updated_pieces(trainer) if piece.parameter.requires_grad}
    complete = {name for states in kinds.values() for name in states}
    for name in sorted(trained) if complete else ():
        if missing := sorted(complete - kinds.get(name, set())):
            raise MeshwrightError(
                "MW-CKPT-005", f"the checkpoint has no {missing[0]}/{name}", why="It is needed to continue the training"
            )


def check_model(model: Model, manifest: Manifest, expected: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raise if the weights of a checkpoint are not those of the model."""
    if saved == expected:
        return
    changes = list(model_changes(manifest.model, json.loads(json.dumps(model.as_dict()))))
    if changes:
        raise MeshwrightError(
            "MW-CKPT-004",
            "the checkpoint is of another model",
            why=f"Saved and now: {listed(changes, 6)}",
            fix="resume with the model of the checkpoint, or start a new run in another folder",
        )
    missing, extra = sorted(expected.keys() - saved.keys()), sorted(saved.keys() - expected.keys())
    wrong = [name for name in sorted(expected.keys() & saved.keys()) if expected[name] != saved[name]]
    text = [
        f"{what} {listed(names, 4)}"
        for what, names in (("missing:", missing), ("not in the model:", extra), ("of another shape:", wrong))
        if names
    ]
    raise MeshwrightError(
        "MW-CKPT-005", "the tensors of the checkpoint are not those of the model", why="; ".join(text)
    )


def model_changes(saved: dict[str, Any], given: dict[str, Any]) -> Iterator[str]:
    """The fields that differ between two models."""
    for name in sorted(saved.keys() | given.keys()):
        if saved.get(name) != given.get(name):
            yield f"{name} {saved.get(name, 'default')} and {given.get(name, 'default')}"


def states_by_parameter(manifest: Manifest) -> dict[str, set[str]]:
    """The names of the optimizer's states (with their prefix) of each parameter."""
    out: dict[str, set[str]] = {}
    for key in manifest.tensors:
        kind, _, name = key.removeprefix("replica-0/").partition("/")
        if kind.startswith((OPTIMIZER, NUMBER)):
            out.setdefault(name, set()).add(kind)
    return out


@torch.no_grad()
def load(trainer: Trainer, path: Path, manifest: Manifest) -> list[str]:
    """Fill a trainer from a checkpoint that fits it. Returns messages about what could not be carried over."""
    messages = list(behaviour_changes(trainer, manifest))
    states = make_states(trainer, manifest)
    if not states and manifest.step:
        messages.append("The checkpoint has no states of the optimizer: they start from zero")
    entries = [*shared_entries(trainer, states)]
    own = replica_prefix(trainer)
    same = same_layout(trainer, manifest)
    if not manifest.replicas:
        read(path, manifest, with_prefix(entries, own, ""))
    elif same:
        read(path, manifest, entries)
    else:
        messages.append(f"The {manifest.replicas} replicas of local SGD are averaged")
        read_average(path, manifest, entries, own)
    for i, piece in enumerate(updated_pieces(trainer)):
        if i in states:
            trainer.optimizer.state[piece.parameter] = states[i]
    if trainer.masters is not None:
        trainer.masters.give_parameters()
    zero.reshard(trainer.parallel.stages.values())  # parameters that were gathered before are out of date
    trainer.step = manifest.step
    restore_numbers(trainer, manifest, same)
    messages += restore_rank(trainer, path, manifest, same)
    return messages


def same_layout(trainer: Trainer, manifest: Manifest) -> bool:
    """Whether every rank has the place and the messages that it had when the checkpoint was written."""
    parallel = trainer.parallel
    now = (parallel.plan.as_dict(), parallel.mesh.layout.axes, parallel.mesh.size("world"), parallel.workload.batch)
    saved = (manifest.plan, manifest.order, manifest.world, Workload(**manifest.workload).batch)
    return json.dumps(now) == json.dumps(saved)


def behaviour_changes(trainer: Trainer, manifest: Manifest) -> Iterator[str]:
    """Differences that do not prevent a resume, but change what follows."""
    parallel = trainer.parallel
    for change in model_changes(manifest.model, json.loads(json.dumps(parallel.model.as_dict()))):
        yield f"model.{change}: the model has changed since the checkpoint"
    if manifest.ranks and (batch := Workload(**manifest.workload).batch) != parallel.workload.batch:
        yield (
            f"workload.batch was {batch} and is {parallel.workload.batch}: step {manifest.step} draws other samples than "
            "the run that was saved would have drawn"
        )
    if manifest.ranks and manifest.seed != parallel.seed:
        yield f"seed was {manifest.seed} and is {parallel.seed}: the order of the data and dropout change"


def make_states(trainer: Trainer, manifest: Manifest) -> dict[int, dict[str, torch.Tensor]]:
    """Empty states of the optimizer for each piece, of the kinds that the checkpoint has, as the optimizer itself makes them."""
    kinds, out = states_by_parameter(manifest), {}
    groups = {id(p): group for group in trainer.optimizer.param_groups for p in group["params"]}
    prefix = "replica-0/" if manifest.replicas else ""
    for i, piece in enumerate(updated_pieces(trainer)):
        if piece.parameter.requires_grad and piece.name in kinds:
            group = groups.get(id(piece.parameter), {})
            on_device = group.get("fused") or group.get("capturable")
            out[i] = {
                kind.partition(".")[2]: empty_state(
                    kind, piece, manifest.tensors[f"{prefix}{kind}/{piece.name}"].dtype, bool(on_device)
                )
                for kind in sorted(kinds[piece.name])
            }
    return out


def empty_state(kind: str, piece: Piece, dtype: str, on_device: bool) -> torch.Tensor:
    if kind.startswith(OPTIMIZER):
        return torch.zeros_like(piece.parameter.detach())
    return torch.zeros((), dtype=getattr(torch, dtype), device=piece.local.device if on_device else "cpu")


def with_prefix(entries: list[Entry], own: str, saved: str) -> list[Entry]:
    return [replace(entry, key=saved + entry.key.removeprefix(own)) for entry in entries]


def read_average(path: Path, manifest: Manifest, entries: list[Entry], own: str) -> None:
    """Fill the entries with the average of all replicas: weights by tokens since the last average, moments with equal weights."""
    tokens = [0.0] * manifest.replicas
    for numbers in manifest.ranks:
        tokens[numbers["replica"]] = float(numbers["local_sgd"][1])
    sums = [torch.zeros_like(entry.tensor, dtype=torch.float64) for entry in entries]
    for replica, count in enumerate(tokens):
        read(path, manifest, with_prefix(entries, own, f"replica-{replica}/"))
        for entry, total in zip(entries, sums, strict=True):
            kind = entry.key.removeprefix(own)
            if kind.startswith((NUMBER,) if any(tokens) else (NUMBER, WEIGHT)):
                share = float(replica == 0)  # equal in all replicas, or a count
            elif kind.startswith(WEIGHT):
                share = count / sum(tokens)
            else:
                share = 1 / manifest.replicas
            total.add_(entry.tensor, alpha=share)
    for entry, total in zip(entries, sums, strict=True):
        entry.tensor.copy_(total)


def restore_numbers(trainer: Trainer, manifest: Manifest, same: bool) -> None:
    if not manifest.ranks:
        return
    parallel = trainer.parallel
    numbers = manifest.ranks[parallel.mesh.rank if same else 0]
    if trainer.scale.dynamic:
        trainer.scale.value, trainer.scale.good_steps, trainer.scale.skipped = numbers["loss_scale"]
    if parallel.local is not None:
        since, tokens = numbers["local_sgd"] if same else (0, 0.0)
        parallel.local.since = since
        parallel.local.tokens.fill_(tokens)


def restore_rank(trainer: Trainer, path: Path, manifest: Manifest, same: bool) -> Iterator[str]:
    """Restore what belongs to this rank alone; yields messages about what starts anew."""
    parallel = trainer.parallel
    rank, device = parallel.mesh.rank, parallel.mesh.device
    for compressor in compressors_in(parallel.reductions):
        compressor.feedback.errors.clear()
        for kept in ("bases", "steps"):
            getattr(compressor, kept, {}).clear()
    if manifest.world == parallel.mesh.size("world"):
        numbers = manifest.ranks[rank]
        states = rank_tensors(path, manifest, rank, "random/", "cpu")
        if states:
            restore_random(states, numbers["normal_numbers"], device)
    if same:
        numbers = manifest.ranks[rank]
        tensors = rank_tensors(path, manifest, rank, "compression/", device)
        restore_compression(trainer, tensors, numbers.get("compression_steps", []))
        parallel.scale = numbers["scale"]
    elif any(key.startswith("rank-") and "/compression/" in key for key in manifest.tensors):
        yield "The plan has changed: what gradient compression had not sent yet is lost, and its residuals start empty"


def rank_tensors(path: Path, manifest: Manifest, rank: int, kind: str, device: str) -> dict[str, torch.Tensor]:
    """The tensors of one rank whose names start with `kind`."""
    prefix = f"rank-{rank}/"
    entries = [
        Entry(
            key,
            saved.shape,
            (0,) * len(saved.shape),
            torch.empty(saved.shape, dtype=getattr(torch, saved.dtype), device=device),
        )
        for key, saved in manifest.tensors.items()
        if key.startswith(prefix + kind)
    ]
    read(path, manifest, entries)
    return {entry.key.removeprefix(prefix): entry.tensor for entry in entries}
