"""Whether a checkpoint fits a run: the same model and optimizer. What differs without preventing a resume becomes a message."""

import json
from collections.abc import Iterator

from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError, listed
from meshwright.training.checkpoint.manifest import Manifest
from meshwright.training.checkpoint.state import NUMBER, OPTIMIZER, WEIGHT, SavableTrainer, expected_states
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
