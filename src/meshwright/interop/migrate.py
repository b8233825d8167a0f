"""Settings of one framework as settings of another: what is carried, what is lost or changed, and what the target cannot run.

The source is read into a plan, a workload and a model; these are written for the target, and what was written is read back. A key of the source is
*carried* if the fields that it sets come back with the same values. Degrees, ZeRO, batch, precision and recompute are never changed without being
asked: a plan that the target cannot run is refused, with the nearest change that it can run. How the ranks communicate and save (`MANNER`) takes
the target's way, and is listed as changed.
"""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any

from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.legality import Case, legal
from meshwright.describe.legality.case import completed
from meshwright.describe.legality.case import written as as_options
from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError, shown
from meshwright.interop.adapters import with_adapter
from meshwright.interop.assemble import switch_plan, switch_stack
from meshwright.interop.files import parse, recognise
from meshwright.interop.keys import INVALID, Facts, Framework, Key, plain
from meshwright.interop.reading import SettingsReading, merged_settings, raise_first, understand
from meshwright.interop.shapes import catalog_cluster, same_shape
from meshwright.interop.write import OWN, SHAPE, WrittenSettings, check_runnable, difference, form_of, settings_of

# The facts that set a field, by field. Facts of the model are its fields.
FIELDS: dict[str, str] = {
    "plan.tp": "tp",
    "plan.sp": "sp stated_sp",
    "plan.cp": "cp sequence_ranks",
    "plan.cp_kind": "cp_kind sequence_ranks ring_attention",
    "plan.pp": "pp pipeline_engine",
    "plan.ep": "ep expert_plugin",
    "plan.expert_tp": "expert_tp",
    "plan.replicate": "replicate dp gpus nodes gpus_per_node",
    "plan.shard": "shard shard_with_cp dp gpus nodes gpus_per_node",
    "plan.zero": "zero zero_of_optimizer sharding fsdp by_deepspeed outer_optimizer wrap_policy fsdp_format",
    "plan.reshard": "reshard moe_reshard",
    "plan.schedule": "schedule",
    "plan.virtual": "virtual layers_per_chunk round_stages layout",
    "plan.layers_per_stage": "first_less last_less first_layers last_layers stage_layers layout counts_embedding counts_loss",
    "plan.microbatch": "microbatch local_batch pipeline_microbatch pipeline_microbatches microbatch_tokens",
    "workload.batch": "batch batch_tokens accumulation",
    "workload.seq": "seq packed_seq decoder_seq microbatch_tokens batch_tokens",
    "plan.recompute": "recompute shard_recompute recompute_method",
    "plan.recompute_every": "recompute_every",
    "plan.recompute_layers": "recompute_layers",
    "workload.precision": "half half_alternative eight converters",
    "plan.param_dtype": "half",
    "plan.master": "master",
    "plan.grad_dtype": "grad_dtype",
    "plan.state_dtype": "state_dtype",
    "workload.optimizer": "optimizer",
    "plan.offload": "offload_states offload_parameters offload_activations precision_aware",
    "plan.bucket": "bucket bucket_elements bucket_mb",
    "plan.overlap": "overlap_dp overlap_tp overlap_ep",
    "plan.prefetch": "prefetch overlap_gather",
    "stack.blocking_p2p": "overlap_p2p",
    "stack.saves": "saves",
    "model.activation": "gated",
    "model.tied": "untied",
    "model.kv_heads": "grouped",
    "model.qkv_bias": "without_bias",
    "model.dense_layers": "moe_layout",
    "model.ffn": "ffn_multiple ffn_factor",
    "model.name": "model flavor hub_model scripted",
}
CLUSTER = "dgx-b200"  # where the settings name no hardware: it has every precision, and decides nothing else but which axes fit in a node
SWITCHES = ("overlap_dp", "overlap_tp", "overlap_ep", "overlap_gather", "overlap_p2p", "prefetch", "saves")
# Fields that take the target's value where it has no other.
MANNER = ("plan.sp", "plan.cp_kind", "plan.reshard", "plan.layers_per_stage", "plan.overlap", "plan.prefetch", "stack.saves",
          "stack.blocking_p2p")  # fmt: skip
# Facts that no plan has, and that several frameworks have a key for.
COPIED = ("learning_rate", "hub_model", "compiled")
INSTEAD = {
    "adapters": "all weights are trained",
    "adapter_kind": "all weights are trained",
    "quantised": "weights are not quantised",
    "eight_bit_states": "optimizer states are not in 8 bits",
}


@dataclass(frozen=True)
class MigratedKey:
    """A key of the source with its value, and the target's keys for it, or what happens instead."""

    key: str
    value: Any
    target: str

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON, which has no dates, NaN or infinity."""
        has_json = isinstance(self.value, str | int | None) or (isinstance(self.value, float) and isfinite(self.value))
        return {**vars(self), "value": self.value if has_json else shown(self.value)}


@dataclass
class Migration:
    """Settings of the target, and what became of every key of the source. `refusal`: the target cannot run the plan, and `written` is None."""

    source: SettingsReading
    target: Framework
    config: Config
    written: WrittenSettings | None = None
    refusal: MeshwrightError | None = None
    carried: list[MigratedKey] = field(default_factory=list)
    lost: list[MigratedKey] = field(default_factory=list)
    other: list[str] = field(default_factory=list)  # keys that are not about the plan

    def as_dict(self) -> dict[str, Any]:
        return {
            "from": self.source.framework.name,
            "to": self.target.name,
            "settings": self.written.settings if self.written else None,
            "text": self.written.text if self.written else None,
            "carried": [key.as_dict() for key in self.carried],
            "lost": [key.as_dict() for key in self.lost],
            "not_about_the_plan": self.other,
            "not_runnable": self.refusal.as_dict() if self.refusal else None,
            "assumed": self.source.assembled.assumed,
        }


def migrate_file(path: str | Path, source: Framework | None, target: Framework, **options: Any) -> Migration:
    """Migrate a settings file; `source` None: the framework that the file looks like. `options` are those of `migrate`."""
    settings, args = parse(path)
    return migrate(recognise(settings, args, path, source), settings, args, target, **options)


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
) -> Migration:
    """Write settings of `source` for `target`. `overrides` are words of --set, which change the plan before it is written."""
    form = form_of(target, out) if out else target.form
    reading = understand(source, settings, args, gpus=gpus, model=model, shape=shape)
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


def names_model(framework: Framework) -> bool:
    """Whether settings of the framework name one of its models in place of a shape."""
    return framework.model_settings is not Framework.model_settings and "model.hidden" not in framework.table.facts()


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


def account(result: Migration, wanted: Config, merged: Mapping[str, Any]) -> None:
    """Sort the keys of the source into carried, lost, and not about the plan."""
    table, understood = result.source.framework.table, result.source.understood
    changed, back = changed_fields(result, wanted)
    listed = set[str]()
    for key, value in merged.items():
        facts = [row.fact for row in table.keys if key in (row.name, *row.was) and states_fact(row, plain(value))]
        kind = understood.kind_of(key)
        if kind in ("unknown", "not modelled"):
            result.lost.append(MigratedKey(key, value, "not translated"))
        elif kind or not facts:
            result.other.append(key)
        else:
            fields = [name for fact in facts for name in fields_of(fact) if name in changed]
            listed.update(fields)
            words = [instead(result.target, name, changed[name]) for name in fields]
            for fact in facts:  # that no plan has
                if fact == "adapter_kind" and back.get("adapters"):
                    continue  # LoRA and QLoRA differ in the base, which other keys state
                if not fields_of(fact) and understood.stated.get(fact) not in (None, back.get(fact, False)):
                    words.append(INSTEAD.get(fact, f"{result.target.title} has no such key"))
            line = MigratedKey(key, value, "; ".join(dict.fromkeys(words)) or target_keys(result, facts))
            (result.lost if words else result.carried).append(line)
    listed |= {*result.target.left_to_script, *(f"plan.{name}" for name in OWN)}
    for name in changed:  # what the source has by default
        if name not in listed and changed[name][1] is not None:
            result.lost.append(MigratedKey(name, changed[name][0], instead(result.target, name, changed[name])))


def states_fact(row: Key, value: Any) -> bool:
    """Whether a value of a key states the fact of this row: a plug-in of the loss says nothing of experts."""
    return value not in row.unset and row.decode(value) not in (None, INVALID)


def changed_fields(result: Migration, wanted: Config) -> tuple[dict[str, tuple[Any, Any]], Facts]:
    """Fields with another value in the target: the source's and the target's (None: not in its settings); and the facts that are read back."""
    assert result.written is not None
    target, named = result.target, result.written.back
    out = difference(wanted, named)
    for name in (f"plan.{name}" for name in OWN):
        pair = getattr(wanted.plan, name.partition(".")[2]), getattr(named.plan, name.partition(".")[2])
        if name in FIELDS and pair[0] != pair[1]:
            out[name] = pair
    for name in target.left_to_script:
        out.setdefault(name, (value_of(wanted, name), None))
    facts = {**named.facts, **named.understood.stated}
    if names_model(target):
        return out, facts
    back = understand(target, result.written.settings, gpus=wanted.plan.world)
    for name in (name for name in SHAPE if name in result.source.shape.stated):
        fact, pair = f"model.{name}", (getattr(wanted.model, name), getattr(back.shape.model, name))
        if fact not in {*target.table.facts(), *back.facts}:
            out[fact] = (pair[0], None)
        elif pair[0] != pair[1] and name != "qkv_bias":  # without a flag of its own where all products have a bias
            out[fact] = pair
    if "model.hidden" not in target.table.facts() and "hub_model" not in back.facts:
        out["model.name"] = (wanted.model.name, None)
    return out, facts


def value_of(config: Config, name: str) -> Any:
    """The value of a field by its dotted name."""
    section, _, last = name.partition(".")
    return getattr(getattr(config, section), last)


@cache
def fields_of(fact: str) -> tuple[str, ...]:
    """The fields of a configuration that a fact sets."""
    own = (fact,) if fact.startswith("model.") else ()
    return own or tuple(name for name, facts in FIELDS.items() if fact in facts.split())


def target_keys(result: Migration, facts: list[str]) -> str:
    """The target's keys for facts of the source, with their values."""
    settings, fields = result.written.settings if result.written else {}, {f for fact in facts for f in fields_of(fact)}
    rows = [row for row in result.target.table.keys if row.name in settings]
    same = [row.name for row in rows if row.fact in facts]
    names = dict.fromkeys(same or [row.name for row in rows if fields & set(fields_of(row.fact)) - {"plan.overlap"}])
    if not names and names_model(result.target) and any(name.startswith("model") for name in (*facts, *fields)):
        return "by the name of the model"
    if not names and "model.name" in fields and "model.hidden" in result.target.table.facts():
        return "by the shape of the model"
    return ", ".join(f"{name} = {shown(settings[name])}" for name in names) or f"the default of {result.target.title}"


def instead(target: Framework, name: str, pair: tuple[Any, Any]) -> str:
    """What happens in the target to a field that its settings do not say, or say otherwise."""
    if name in target.left_to_script:
        return "the training script sets it"
    if name.startswith("model.") and pair[1] is None:
        return f"not in settings of {target.title}: the model sets it"
    if name in {f"plan.{own}" for own in OWN}:
        return f"{target.title} has no such key"
    return f"{name} is {shown(pair[1])} in {target.title}"
