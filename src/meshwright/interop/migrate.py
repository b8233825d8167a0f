"""Settings of one framework as settings of another: what is carried, what is lost or changed, and what the target cannot run.

The source is read into a plan, a workload and a model; these are written for the target, and what was written is read back. A key of the source is
*carried* if the fields that it sets come back with the same values. Degrees, ZeRO, batch, precision and recompute are never changed without being
asked: a plan that the target cannot run is refused, with the nearest change that it can run. How the ranks communicate and save (`MANNER`) takes
the target's way, and is listed as changed.
"""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.legality import Case, legal
from meshwright.describe.legality.case import completed
from meshwright.describe.legality.case import written as as_options
from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError
from meshwright.interop.adapters import with_adapter
from meshwright.interop.assemble import switch_plan, switch_stack
from meshwright.interop.files import parse, recognise
from meshwright.interop.keys import Framework
from meshwright.interop.migrated_keys import Migration, account, names_model, value_of
from meshwright.interop.reading import SettingsReading, merged_settings, raise_first, understand
from meshwright.interop.shapes import catalog_cluster, same_shape
from meshwright.interop.shell.scripts import Script
from meshwright.interop.write import check_runnable, form_of, settings_of

CLUSTER = "dgx-b200"  # where the settings name no hardware: it has every precision, and decides nothing else but which axes fit in a node
SWITCHES = ("overlap_dp", "overlap_tp", "overlap_ep", "overlap_gather", "overlap_p2p", "prefetch", "saves")
# Fields that take the target's value where it has no other.
MANNER = ("plan.sp", "plan.cp_kind", "plan.reshard", "plan.layers_per_stage", "plan.overlap", "plan.prefetch", "stack.saves",
          "stack.blocking_p2p")  # fmt: skip
# Facts that no plan has, and that several frameworks have a key for.
COPIED = ("learning_rate", "hub_model", "compiled")


def migrate_file(path: str | Path, source: Framework | None, target: Framework, **options: Any) -> Migration:
    """Migrate a settings file; `source` None: the framework that the file looks like. `options` are those of `migrate`."""
    parsed = parse(path)
    framework = recognise(parsed.settings, parsed.args, path, source)
    return migrate(framework, parsed.settings, parsed.args, target, script=parsed.script, **options)


def migrate(
    source: Framework,
    settings: Mapping[str, Any],
    args: list[str],
    target: Framework,
    *,
    gpus: int = 0,
    model: str = "",
    shape: Mapping[str, Any] | None = None,
    overrides: tuple[str, ...] = (),
    out: str = "",
    script: Script | None = None,
) -> Migration:
    """Write settings of `source` for `target`. `overrides` are words of --set, which change the plan before it is written."""
    form = form_of(target, out) if out else target.form
    reading = understand(source, settings, args, gpus=gpus, model=model, shape=shape, script=script)
    merged = merged_settings(source, settings, args)
    refuse_unknown_gpus(reading)
    stated, wanted = wanted_config(reading, target), wanted_config(reading, target, overrides)
    result = Migration(reading, target, wanted)
    try:
        raise_first([problem for problem in reading.errors if problem.code.startswith("MW-SET")])
        refuse_unknown_model(reading, target, stated.model)
        result.config = in_manner_of(wanted, target, has_model(reading))
        check_runnable(result.config, target, MANNER, has_model(reading))
    except MeshwrightError as error:
        if result.config is not wanted:
            fix = offered_change(reading, target, overrides, error)
        else:  # the source itself, or its model
            fix = error.fix if error.code.startswith("MW-SET") else ""
        result.refusal = MeshwrightError(error.code, error.what, why=error.why, valid=error.valid, fix=fix, exit_code=1)
        return result
    copied = {name: value for name, value in reading.understood.stated.items() if name in COPIED}
    copied |= {"model.vocab": None} if "vocab" in reading.shape.missing else {}
    result.written = settings_of(result.config, target, form, copied, has_model(reading))
    account(result, stated, merged)
    return result


def has_model(reading: SettingsReading) -> bool:
    """Whether settings state the shape of their model; the vocabulary may be that of a tokenizer."""
    return set(reading.shape.missing) <= {"vocab"}


def wanted_config(reading: SettingsReading, target: Framework, overrides: tuple[str, ...] = ()) -> Config:
    """The source's plan on the target's stack. Switches of overlap and of saving count where the source states them."""
    stack = catalog.load("stacks", target.stack)
    plan = {name: value for name, value in reading.assembled.plan.items() if name not in ("overlap", "prefetch")}
    stated = {name: reading.facts.get(name) for name in SWITCHES if name in reading.understood.sources}
    switch_plan(stated, plan, stack)
    stack = stack.but(**switch_stack(stated, plan, stack))
    cluster = {"extends": catalog_cluster(reading.hardware) or CLUSTER, "gpus": reading.plan.world}
    model = known_model(reading) if names_model(target) else reading.shape.model
    config = Config.from_parts(model, cluster, stack, reading.assembled.workload, plan, overrides=list(overrides))
    return config if config.adapter.on else config.but(model=with_adapter(config.model, reading.adapter))


def in_manner_of(config: Config, target: Framework, with_model: bool = True) -> Config:
    """The configuration with sequence parallelism and the kind of context parallelism that the target has."""
    can, plan = config.stack.can, config.plan
    kind = plan.cp_kind if plan.cp == 1 or not can.cp_kinds or plan.cp_kind in can.cp_kinds else can.cp_kinds[0]
    for sp in (plan.sp, True) if "sp" not in can.without and plan.tp > 1 else (False,):
        config = replace(config, plan=plan.but(cp_kind=kind, sp=sp))
        if runs(config, target, with_model):
            break
    return config


def runs(config: Config, target: Framework, with_model: bool) -> bool:
    """Whether the target can run a plan, in its own manner."""
    try:
        check_runnable(config, target, MANNER, with_model)
    except MeshwrightError:
        return False
    return True


def known_model(reading: SettingsReading) -> Model:
    """The model of the catalog with the shape that settings state, where they do not name one; else their model as it is."""
    model, names = reading.shape.model, catalog.names("models")
    if model.name in names:
        return model
    entries: Iterator[Model] = (catalog.load("models", name) for name in names)
    return next((entry for entry in entries if same_shape(entry, model, reading.shape.stated)), model)


def refuse_unknown_gpus(reading: SettingsReading) -> None:
    """Raise if the settings shard over data-parallel ranks whose number they do not state: on the fewest GPUs there are none to shard over."""
    least, sharding = reading.assembled.gpus, reading.facts.get("sharding", "none")
    if least < 0 and sharding != "none" and not reading.plan.zero:
        raise MeshwrightError(
            "MW-SET-015",
            f"the settings do not state the number of GPUs; their degrees need a multiple of {-least}",
            why="How many ranks share the optimizer states or the parameters follows from it",
            fix=f"--gpus {-least * 8}",
        )


def refuse_unknown_model(reading: SettingsReading, target: Framework, model: Model) -> None:
    """Raise if settings of the target state the model, and those of the source do not; or if the target does not have the model."""
    missing = [name for name in reading.shape.missing if name != "vocab" or not target.vocab_of_tokenizer]
    if names_model(target) or "model.hidden" in target.table.facts():
        if missing:
            raise MeshwrightError(
                "MW-SET-013",
                f"the settings do not give the shape of their model: {', '.join(missing)}",
                why=f"Settings of {target.title} state it",
                fix="--model NAME, a model of the catalog",
            )
        target.model_settings(model)


# --- The nearest plan that the target can run.

MOST_CHANGES = 200


def nearest_change(config: Config, target: Framework, with_model: bool = True) -> dict[str, Any] | None:
    """The fewest changes, as words of --set, after which the target can run a plan; None if none was found.

    Tried: axes that the target does not have become data parallelism; other ZeRO stages, the next higher first; other recompute; a plain pipeline;
    products in 16 bits. The batch and the number of GPUs stay."""
    case = Case(config.plan, config.model, config.workload, config.cluster, config.stack, framework=True)
    trials = sorted(changes_to_try(config), key=len)[:MOST_CHANGES]
    for settings in trials:
        full = completed(case, settings)
        changed = {path: value for path, value in full.items() if case.setting(path) != value}
        if legal(case.with_settings(changed)) and runs(with_settings(config, changed), target, with_model):
            return changed
    return None


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    """The configuration with fields of plan and workload changed, named as --set names them."""
    parts = {section: {name.partition(".")[2]: value for name, value in settings.items() if name.startswith(section)}
             for section in ("plan", "workload")}  # fmt: skip
    return replace(config, plan=config.plan.but(**parts["plan"]), workload=config.workload.but(**parts["workload"]))


def offered_change(
    reading: SettingsReading, target: Framework, overrides: tuple[str, ...], error: MeshwrightError
) -> str:
    """The words of --set after which the target runs the plan: the nearest change, perhaps on top of the fix of the error; "" if there is none."""
    for fix in ("", error.fix if error.fix.startswith("--set") else ""):
        words = (*overrides, *shlex.split(fix)[1::2])
        config = in_manner_of(wanted_config(reading, target, words), target, has_model(reading))
        change = nearest_change(config, target, has_model(reading))
        if change is not None:
            return f"{fix} {as_options(change)}".strip()
    return ""


def changes_to_try(config: Config) -> Iterator[dict[str, Any]]:
    """Combinations of changes of a plan towards what its stack can run."""
    can, plan = config.stack.can, config.plan
    axes = ("tp", "cp", "pp", "ep", "expert_tp") if config.model.experts else ("tp", "cp", "pp")
    off = {f"plan.{axis}": 1 for axis in axes if axis in can.without}
    zeros: list[dict[str, Any]] = [{}]
    for stage in sorted(can.zero or range(4), key=lambda stage: (stage < plan.zero, abs(stage - plan.zero))):
        copies = plan.dp if not stage else plan.replicate if plan.zero and "hsdp" not in can.without else 1
        zeros.append({"plan.zero": stage, "plan.replicate": copies, "plan.shard": plan.dp // copies})
    whole = {"plan.recompute_every": 1, "plan.recompute_layers": 0}
    recomputes = [{}, *({"plan.recompute": kind, **whole} for kind in ("full", "selective", "none"))]
    pipelines = [{}, {"plan.virtual": 1, "plan.schedule": "1f1b", "plan.layers_per_stage": ()}]
    halves = [{}, *({"workload.precision": half, "plan.param_dtype": half} for half in (plan.param_dtype, "bf16"))]
    for parts in product(zeros, recomputes, pipelines, halves, [{}, {"plan.master": True}]):
        merged = off | {name: value for part in parts for name, value in part.items()}
        yield {name: value for name, value in merged.items() if value != value_of(config, name)}


# --- What became of every key.
