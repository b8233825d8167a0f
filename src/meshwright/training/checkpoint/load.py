"""Fill a trainer from a checkpoint, under any plan.

A tensor of a checkpoint is a set of boxes, and a piece of the running plan is a box: what a rank needs of a saved tensor is the
intersection, whatever plan wrote it. What cannot be carried over to another plan, each with a message:

    compression residuals    belong to the messages of one rank: they start empty, and what was not sent yet is lost
    local SGD                replicas are averaged, weighted by the tokens that each has seen since the last average
    random states            belong to one rank: kept where the number of ranks is the same

**Resume** finds the last good checkpoint, checks that it is of this model, and fills a trainer with it. On the plan that wrote the
checkpoint, training continues bit for bit as if it had not stopped. On another plan the same numbers are in other places, and sums are
rounded in another order. Nothing of a trainer is changed before everything has been checked: the hash of every file, which the ranks share
out, and that the tensors are those of the model (`check_fits`).

A checkpoint that is damaged or has no manifest is set aside once an intact older one was found. If none is intact, the resume stops and nothing
is renamed: the first weights are never used in their place. An error of the disk stops it too, since the checkpoint may be intact.

A checkpoint fits a run of the same model and optimizer (`check_fits`). What differs without preventing a resume becomes a message.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError, listed
from meshwright.parallel.data import zero
from meshwright.parallel.data.reduction import compressors_in
from meshwright.parallel.pieces import Piece
from meshwright.training.checkpoint import folder
from meshwright.training.checkpoint.folder import checkpoints_of, is_first, on_first, together
from meshwright.training.checkpoint.manifest import Manifest, check_files, has_manifest, read_manifest
from meshwright.training.checkpoint.state import (
    AVERAGE,
    NUMBER,
    OPTIMIZER,
    WEIGHT,
    SavableTrainer,
    expected_states,
    replica_prefix,
    restore_compression,
    restore_random,
    shared_entries,
)
from meshwright.training.checkpoint.store import BoxEntry, read
from meshwright.units import Json


def check_fits(trainer: SavableTrainer, manifest: Manifest) -> None:
    """Raise if a checkpoint is not one of this model and optimizer: nothing has been changed yet."""
    parallel, workload = trainer.parallel, trainer.parallel.workload
    saved = {
        key.rpartition(f"{WEIGHT}/")[2]: tensor.shape
        for key, tensor in manifest.tensors.items()
        if key.startswith((f"{WEIGHT}/", f"replica-0/{WEIGHT}/"))
    }
    check_model(parallel.description, manifest, parallel.whole_tensors, saved)
    check_base(parallel.base, manifest.base)
    optimizer, kinds = Workload(**manifest.workload).optimizer, states_by_parameter(manifest)
    classes = [str(model.get("optimizer")) for model in (manifest.model, parallel.description)]
    if kinds and classes[0] != classes[1]:  # of a user's module
        raise MeshwrightError(
            "MW-CKPT-008", f"the checkpoint contains the states of {classes[0]}; this optimizer is {classes[1]}"
        )
    if kinds and optimizer != workload.optimizer:
        raise MeshwrightError(
            "MW-CKPT-008",
            f"the checkpoint contains the states of the optimizer {optimizer}; this run uses {workload.optimizer}",
            why="States of one optimizer mean something else in another",
            fix=f"--set workload.optimizer={optimizer}",
        )
    for piece in parallel.updated if kinds else ():
        missing = expected_states(piece, optimizer) - kinds.get(piece.name, set())
        if missing and piece.parameter.requires_grad:
            raise MeshwrightError(
                "MW-CKPT-005",
                f"the checkpoint has no {min(missing)}/{piece.name}",
                why="It has states of the optimizer, but not all of them",
            )


def check_base(base: Json, saved: Json) -> None:
    """Raise if adapters were trained on other weights than those that the run has read."""
    marks = ("fingerprint", "seed")
    if base and saved and any(base.get(mark) != saved.get(mark) for mark in marks):
        texts = [str(b.get("folder") or f"weights drawn from seed {b.get('seed')}") for b in (saved, base)]
        raise MeshwrightError(
            "MW-ADPT-014",
            "the adapters of the checkpoint were trained on another base",
            why=f"Then: {texts[0]}; now: {texts[1]}" + (", whose files have changed" if texts[0] == texts[1] else ""),
            fix="resume with the base of the checkpoint, or start a new run in another folder",
        )


def check_model(model: Json, manifest: Manifest, expected: Json, saved: Json) -> None:
    """Raise if the weights of a checkpoint are not those of the model."""
    if saved == expected:
        return
    if changes := model_changes(manifest.model, json.loads(json.dumps(model))):
        raise MeshwrightError(
            "MW-CKPT-004",
            "the checkpoint is of another model",
            why=f"Saved and now: {listed(changes, 6)}",
            fix="resume with the model of the checkpoint, or start a new run in another folder",
        )
    differences = {
        "missing:": expected.keys() - saved.keys(),
        "not in the model:": saved.keys() - expected.keys(),
        "of another shape:": {n for n in expected.keys() & saved.keys() if expected[n] != saved[n]},
    }
    text = "; ".join(f"{what} {listed(sorted(names), 4)}" for what, names in differences.items() if names)
    raise MeshwrightError("MW-CKPT-005", "the tensors of the checkpoint are not those of the model", why=text)


def model_changes(saved: Json, given: Json) -> list[str]:
    """The fields that differ between two models."""
    names = [name for name in sorted(saved.keys() | given.keys()) if saved.get(name) != given.get(name)]
    return [f"{name} {saved.get(name, 'default')} and {given.get(name, 'default')}" for name in names]


def states_by_parameter(manifest: Manifest) -> dict[str, set[str]]:
    """The names of the optimizer's states (with their prefix) of each parameter."""
    out: dict[str, set[str]] = {}
    for key in manifest.tensors:
        kind, _, name = key.removeprefix("replica-0/").partition("/")
        if kind.startswith((OPTIMIZER, NUMBER)):
            out.setdefault(name, set()).add(kind)
    return out


def same_layout(trainer: SavableTrainer, manifest: Manifest) -> bool:
    """Whether every rank has the place and the messages that it had when the checkpoint was written."""
    parallel = trainer.parallel
    now = (parallel.plan.as_dict(), parallel.mesh.layout.axes, parallel.mesh.size("world"), parallel.workload.batch)
    saved = (manifest.plan, manifest.order, manifest.world, Workload(**manifest.workload).batch)
    return json.dumps(now) == json.dumps(saved)


def behaviour_changes(trainer: SavableTrainer, manifest: Manifest) -> Iterator[str]:
    """Differences that do not prevent a resume, but change what follows."""
    parallel = trainer.parallel
    for change in model_changes(manifest.model, json.loads(json.dumps(parallel.description))):
        yield f"model.{change}: the model has changed since the checkpoint"
    if manifest.ranks and (batch := Workload(**manifest.workload).batch) != parallel.workload.batch:
        yield (
            f"workload.batch was {batch} and is {parallel.workload.batch}: step {manifest.step} draws other samples than "
            "the run that was saved would have drawn"
        )
    if manifest.ranks and manifest.seed != parallel.seed:
        yield f"seed was {manifest.seed} and is {parallel.seed}: the order of the data and dropout change"


@torch.no_grad()
def load(trainer: SavableTrainer, path: Path, manifest: Manifest) -> list[str]:
    """Fill a trainer from a checkpoint that fits it. Returns messages about what could not be carried over."""
    messages, parallel = list(behaviour_changes(trainer, manifest)), trainer.parallel
    pieces, states = parallel.updated, make_states(trainer, manifest)
    if not states and manifest.step and any(expected_states(p, parallel.workload.optimizer) for p in pieces):
        messages.append("The checkpoint has no states of the optimizer: they start from zero")
    averaged = any(key.removeprefix("replica-0/").startswith(f"{AVERAGE}/") for key in manifest.tensors)
    if averaged != (trainer.average is not None):
        has = "a moving average of the weights, which is dropped" if averaged else "no moving average: it starts"
        messages.append(f"The checkpoint has {has} (optimizer.ema)")
    entries = [*shared_entries(trainer, states, averaged)]
    own, same = replica_prefix(trainer), same_layout(trainer, manifest)
    if not manifest.replicas:
        read(path, manifest, with_prefix(entries, own, ""))
    elif same:
        read(path, manifest, entries)
    else:
        messages.append(f"The {manifest.replicas} replicas of local SGD are averaged")
        read_average(path, manifest, entries, own)
    for i, state in states.items():
        trainer.optimizer.state[pieces[i].parameter] = state
    if parallel.masters is not None:
        parallel.masters.give_parameters()
    if trainer.average is not None and not averaged:
        trainer.average.restart()
    zero.reshard(parallel.stages.values())  # parameters that were gathered before are out of date
    trainer.step = manifest.step
    restore_numbers(trainer, manifest, same)
    return [*messages, *restore_rank(trainer, path, manifest, same)]


def make_states(trainer: SavableTrainer, manifest: Manifest) -> dict[int, dict[str, Tensor]]:
    """Empty states of the optimizer for each piece, of the kinds that the checkpoint has, as the optimizer itself makes them: of the shape of
    the piece, or one number."""
    kinds, out = states_by_parameter(manifest), {}
    groups = {id(p): group for group in trainer.optimizer.param_groups for p in group["params"]}
    prefix = "replica-0/" if manifest.replicas else ""

    def empty(piece: Piece, kind: str) -> Tensor:
        if kind.startswith(OPTIMIZER):
            return torch.zeros_like(piece.local)
        group, saved = groups.get(id(piece.parameter), {}), manifest.tensors[f"{prefix}{kind}/{piece.name}"]
        on_device = group.get("fused") or group.get("capturable")
        return torch.zeros((), dtype=getattr(torch, saved.dtype), device=piece.local.device if on_device else "cpu")

    for i, piece in enumerate(trainer.parallel.updated):
        if piece.parameter.requires_grad and piece.name in kinds:
            out[i] = {kind.partition(".")[2]: empty(piece, kind) for kind in sorted(kinds[piece.name])}
    return out


def with_prefix(entries: list[BoxEntry], own: str, saved: str) -> list[BoxEntry]:
    return [replace(entry, key=saved + entry.key.removeprefix(own)) for entry in entries]


def read_average(path: Path, manifest: Manifest, entries: list[BoxEntry], own: str) -> None:
    """Fill the entries with the average of all replicas: weights by tokens since the last average, moments with equal weights."""
    tokens = [0.0] * manifest.replicas
    for numbers in manifest.ranks:
        tokens[numbers["replica"]] = float(numbers["local_sgd"][1])
    sums = [torch.zeros_like(entry.tensor, dtype=torch.float64) for entry in entries]
    for replica, count in enumerate(tokens):
        read(path, manifest, with_prefix(entries, own, f"replica-{replica}/"))
        for entry, total in zip(entries, sums, strict=True):
            kind = entry.key.removeprefix(own)
            if kind.startswith((NUMBER,) if any(tokens) else (NUMBER, WEIGHT, AVERAGE)):
                share = float(replica == 0)  # equal in all replicas, or a count
            elif kind.startswith((WEIGHT, AVERAGE)):
                share = count / sum(tokens)
            else:
                share = 1 / manifest.replicas
            total.add_(entry.tensor, alpha=share)
    for entry, total in zip(entries, sums, strict=True):
        entry.tensor.copy_(total)


def restore_numbers(trainer: SavableTrainer, manifest: Manifest, same: bool) -> None:
    if not manifest.ranks:
        return
    parallel = trainer.parallel
    numbers = manifest.ranks[parallel.mesh.rank if same else 0]
    trainer.skip_steps.update(numbers["skip_steps"])
    if trainer.scale.dynamic:
        trainer.scale.value, trainer.scale.good_steps, trainer.scale.skipped = numbers["loss_scale"]
    if parallel.local is not None:
        since, tokens = numbers["local_sgd"] if same else (0, 0.0)
        parallel.local.since = since
        parallel.local.tokens.fill_(tokens)


def restore_rank(trainer: SavableTrainer, path: Path, manifest: Manifest, same: bool) -> Iterator[str]:
    """Restore what belongs to this rank alone; yields messages about what starts empty."""
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
        parallel.applied_scale = numbers["scale"]
    elif any(key.startswith("rank-") and "/compression/" in key for key in manifest.tensors):
        yield "The plan has changed: what gradient compression had not sent yet is lost, and its residuals start empty"


def rank_tensors(path: Path, manifest: Manifest, rank: int, kind: str, device: str) -> dict[str, Tensor]:
    """The tensors of one rank whose names start with `kind`."""
    prefix, entries = f"rank-{rank}/", []
    for key, saved in manifest.tensors.items():
        if key.startswith(prefix + kind):
            tensor = torch.empty(saved.shape, dtype=getattr(torch, saved.dtype), device=device)
            entries.append(BoxEntry(key, saved.shape, (0,) * len(saved.shape), tensor))
    read(path, manifest, entries)
    return {entry.key.removeprefix(prefix): entry.tensor for entry in entries}


Notify = Callable[[str], None]


@dataclass
class Resumed:
    """The loaded state, and what could not be carried over."""

    path: Path
    manifest: Manifest
    messages: list[str] = field(default_factory=list)


def resume(
    trainer: SavableTrainer, source: Path, group: ProcessGroup | None = None, notify: Notify = lambda text: None
) -> Resumed | None:
    """Fill a trainer from `source`: one checkpoint, or a run folder, of which the last good checkpoint is used. None if a run folder
    has no checkpoint; raises MW-CKPT-019 if it has some and none is intact. A collective of a group of all ranks on the CPU; `notify` gets
    messages on the first rank.

    A run folder must be that of this run: what a killed process of it left unfinished is cleaned up."""
    on_first(lambda: folder.restore_replaced(checkpoints_of(source)), group)
    found = open_checkpoint(source, group, notify)
    if found is None:
        return None
    on_first(lambda: folder.recover(checkpoints_of(source)), group)
    together(lambda: check_fits(trainer, found.manifest), group)
    found.messages += load(trainer, found.path, found.manifest)
    for text in found.messages if is_first(group) else ():
        notify(text)
    return found


def open_checkpoint(
    source: Path, group: ProcessGroup | None = None, notify: Notify = lambda text: None
) -> Resumed | None:
    """The checkpoint to load, with its files verified; the ranks share the work. A checkpoint that was named must be good; of a run
    folder the last good one is used, and those after it are set aside."""
    source = checkpoints_of(source)
    if on_first(lambda: has_manifest(source), group):
        verify_together(source, group)
        return Resumed(source, read_manifest(source))
    unusable: dict[str, str] = {}
    for name in on_first(lambda: [path.name for _, path in reversed(folder.step_folders(source))], group):
        try:
            verify_together(source / name, group)
        except MeshwrightError as error:
            if error.code not in UNUSABLE:
                raise
            unusable[name] = f"{UNUSABLE[error.code]} ({error.why})"
            continue
        for other, reason in unusable.items():
            aside = on_first(partial(folder.set_aside, source / other), group)
            if is_first(group):
                notify(f"{other} is {reason}; it is now {aside}, and the checkpoint before it is used")
        return Resumed(source / name, read_manifest(source / name))
    unusable |= on_first(lambda: {path.name: reason for path, reason in never_used(source)}, group)
    if any(not name.startswith(folder.WRITING) for name in unusable):
        raise none_intact(source, unusable)
    return None


UNUSABLE = {"MW-CKPT-001": "incomplete", "MW-CKPT-002": "damaged"}


def never_used(root: Path) -> Iterator[tuple[Path, str]]:
    """List folders that cannot be resumed, with reasons: saves that were not completed, checkpoints set aside."""
    for prefix, reason in (
        (folder.WRITING, "incomplete (its save was not completed)"),
        (folder.DAMAGED, "set aside by an earlier resume"),
    ):
        yield from ((path, reason) for _, path in folder.step_folders(root, prefix))


def none_intact(source: Path, unusable: Mapping[str, str]) -> MeshwrightError:
    """The error of a resume that found no intact checkpoint, although there are or were some; `unusable`: the reason by name."""
    reasons = "; ".join(f"{name} is {reason}" for name, reason in unusable.items())
    return MeshwrightError(
        "MW-CKPT-019",
        f"no checkpoint in '{source}' can be resumed",
        why=f"{reasons[:2000]}. Nothing was changed",
        fix="restore a checkpoint from a copy, or begin again at step 0 with --from-scratch, which keeps these files under other names",
    )


def verify_together(path: Path, group: ProcessGroup | None) -> None:
    """Read and hash the files of a checkpoint, each on one rank of the group; all ranks raise if one is damaged."""
    rank, ranks = (group.rank(), group.size()) if group is not None else (0, 1)

    def check() -> None:
        manifest = read_manifest(path)
        check_files(path, manifest, sorted(manifest.files)[rank::ranks])

    together(check, group)
