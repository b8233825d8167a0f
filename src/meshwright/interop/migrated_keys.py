"""What became of every key of migrated settings: carried, lost or changed, or not about the plan.

A key is *carried* if the fields that its facts set come back with the same values when the settings of the target are read again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import isfinite
from typing import Any

from meshwright.describe.config import Config
from meshwright.errors import MeshwrightError, shown
from meshwright.interop.keys import INVALID, Facts, Framework, Key, plain
from meshwright.interop.reading import SettingsReading, understand
from meshwright.interop.write import OWN, SHAPE, WrittenSettings, difference

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
    "plan.offload_layers": "offload_layers",
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


def names_model(framework: Framework) -> bool:
    """Whether settings of the framework name one of its models in place of a shape."""
    return framework.model_settings is not Framework.model_settings and "model.hidden" not in framework.table.facts()


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
