"""The proof of a plan on a user's own module: one device with plain torch, ranks with `parallelize`, and the comparison of `compare`.

    1  send       the functions of the user to new processes, by the place where they are defined (`code`)
    2  reference  one process checks them and trains on the whole batch
    3  ranks      the plan, folded if it needs more ranks than allowed (`fold`), trains on shares of the same batches
    4  compare    losses, norms, every gradient, every parameter and buffer of every step
    5  blame      if they differ: each axis separately

The module itself is not shrunk: `make` should return a small configuration. Collectives and memory are not compared, because a module that we
did not write has no step program.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.describe.config import load_plan
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.proof.compare import Agreement, compare, tolerance_of
from meshwright.proof.fold import axis_sizes, folds
from meshwright.proof.prove import SILENCE_S, blame
from meshwright.proof.result import CopyProof, Proof
from meshwright.proof.small import ProvedCopy, widened
from meshwright.proof.user_module.code import Named, named, sendable
from meshwright.proof.user_module.job import FACTORY, ModuleJob, Reference
from meshwright.training.launch import local
from meshwright.units import Json

HERE = "meshwright.proof.user_module.step"


def prove_module(
    make: Any,
    plan: Plan | Json | str | Path | None,
    settings: Sequence[str] = (),
    *,
    example: Any = None,
    loss: Any = None,
    table: Any = None,
    ranks: int = 8,
    device: str = "cpu",
    backend: str = "auto",
    **options: Any,
) -> Proof:
    """Raise for what cannot be tried; a plan that trains another model than one device returns a failed proof. `options` are the last fields of
    `ModuleJob`.

    Of a factory in a file, `example`, `loss` and `table` are those that the file defines under these names, unless they are given.
    """
    started = time.perf_counter()
    whole = plan_of(plan, settings)
    if hasattr(make, "named_parameters") and not isinstance(make, type):
        what = f"{type(make).__name__} is a module, not a function that makes one"
        raise MeshwrightError("MW-VERIFY-004", what, why="Ranks are new processes: each makes its own", fix=FACTORY)
    factory = named(make) if isinstance(make, str) else sendable(make, "make")
    place = factory.source if isinstance(make, str) else ""
    words = {"example": example, "loss": loss, "table": table}
    values: Json = {word: value_of(value, word, place) for word, value in words.items()}
    title = str(factory) if isinstance(factory, Named) else type(make).__name__
    job = ModuleJob(title.partition(" ")[0], factory, **values, plan=whole, **options)
    one = run("record_one_device", replace(job, plan=Plan()), device, backend)[0]
    proof = Proof(f"{title}: {whole.title()}", [])
    for folded in folds(whole, ranks):
        proof.copies.append(prove_copy(replace(job, plan=in_double(folded, whole)), whole, one, device, backend))
        if not proof.passed:
            break
    proof.seconds = time.perf_counter() - started
    return proof


def plan_of(plan: Plan | Json | str | Path | None, settings: Sequence[str]) -> Plan:
    """The plan of a proof; raises if one device cannot repeat what its ranks compute."""
    if plan is None:
        raise MeshwrightError(
            "MW-VERIFY-002",
            "there is no plan for the module",
            why="A module is proved under one plan",
            fix='--plan plan.toml, or plan={"replicate": 2, "tp": 2}',
        )
    for word in settings:
        if not word.strip().startswith("plan."):
            raise MeshwrightError(
                "MW-VERIFY-002",
                f"'--set {word[:60]}' has no effect on a module of your own",
                why="Of a plan file its [plan] is used; the module, its example and its loss are yours",
                valid=["--set plan.tp=2"],
            )
    if isinstance(plan, Plan):
        plan = {name: getattr(plan, name) for name in plan.model_fields_set}
    whole = load_plan(plan, settings)
    sent = "compression" if whole.compression != "none" else "comm_dtype"
    for name, value, lossy in ((sent, whole.wire, whole.lossy), ("param_dtype", "fp8", whole.param_dtype == "fp8")):
        if lossy:
            raise MeshwrightError(
                "MW-VERIFY-002",
                f"plan.{name}={value} cannot be proved on a module of your own",
                why="It rounds or drops numbers, and one device repeats that for described models only",
                fix=f"--set plan.{name}={'none' if name == 'compression' else 'fp32'}",
            )
    return whole


def value_of(value: Any, word: str, place: str) -> Any:
    """A value that was given, or its name in the file of the factory; without a file None."""
    if value is None:
        return Named(place, word, optional=True) if place else None
    if isinstance(value, str) and place and value.replace("_", "").isalnum():
        return Named(place, value)
    return sendable(value, word)


def prove_copy(job: ModuleJob, whole: Plan, one: Reference, device: str, backend: str) -> CopyProof:
    def agreement(plan: Plan) -> Agreement:
        many = run("record_under_plan", replace(job, plan=plan), device, backend)
        if one.single is None:
            return compare(one.double, many)
        return compare(one.double, many, tolerance_of(one.double, one.single), "fp32")

    sizes = axis_sizes(job.plan)
    folded = {
        axis: (size, sizes.get(axis, 1)) for axis, size in axis_sizes(whole).items() if size != sizes.get(axis, 1)
    }
    changes = ["folded: " + ", ".join(f"{axis} {a} → {b}" for axis, (a, b) in folded.items())] if folded else []
    changes += [f"in float64 instead of {whole.param_dtype}"] if "param_dtype" in whole.model_fields_set else []
    if "microbatch" not in whole.model_fields_set and job.plan.pp == 1:
        changes.append("the share of a rank is one micro-batch: the plan sets none")
    copy = ProvedCopy(job.plan, (*changes, *one.notes), folded)
    oracles = {"ranks": "your module on one device in float64"}
    proof = CopyProof(copy, job.steps, [agreement(job.plan)], [], oracles=oracles)
    if not proof.parity:
        proof.blamed = blame(job.plan, lambda trial: bool(agreement(in_double(trial, whole)).breaks))
    return proof


def in_double(plan: Plan, whole: Plan) -> Plan:
    """The plan without dtypes, so that the module keeps its float64; a micro-batch that the user set stays set."""
    fields = widened(plan).as_dict()
    kept = {name: value for name, value in fields.items() if name not in ("param_dtype", "master")}
    return Plan(**kept | ({"microbatch": plan.microbatch} if "microbatch" in whole.model_fields_set else {}))


def run(function: str, job: ModuleJob, device: str, backend: str) -> list[Any]:
    return local.run(
        f"{HERE}:{function}",
        job.plan.world,
        job,
        silence=SILENCE_S,
        group_timeout=SILENCE_S / 2,
        device=device,
        backend=backend,
    )
