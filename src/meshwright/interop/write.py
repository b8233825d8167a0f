"""A plan as settings of a framework, in the form of its files; and what of the plan they cannot say.

What unknown fit is found by reading the settings back: a field of the plan that comes back with another value.
"""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.describe import legality
from meshwright.describe.config import Config
from meshwright.describe.files import write_text
from meshwright.describe.model import Model
from meshwright.describe.own_stack import OURS
from meshwright.describe.plan import Plan, in_framework
from meshwright.describe.variants import ATTENTIONS
from meshwright.describe.workload import FP8, Workload
from meshwright.errors import MeshwrightError
from meshwright.interop.adapters import adapter_differences, adapter_facts
from meshwright.interop.assemble import STAGES, switch_differences, switch_facts
from meshwright.interop.files import SCRIPTS, YAML
from meshwright.interop.keys import Facts, Form, Framework, Settings, nested, write_settings
from meshwright.interop.reading import SettingsReading, raise_first, understand

# --- All facts of a plan: the inverse of `assemble`. A framework's table writes those that it has keys for.

SHAPE = (
    "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "vocab_multiple", "tied", "max_positions", "experts", "top_k", "expert_ffn",
    "shared_experts", "shared_ffn", "dense_layers", "attention", "q_rank", "kv_rank", "rope_dim", "nope_dim", "value_dim", "activation", "norm",
    "positions", "qk_norm", "qkv_bias",
)  # fmt: skip


def express(config: Config) -> Facts:
    """Every fact that a configuration states."""
    plan, workload, model = config.plan, config.workload, config.model
    return {
        **_degrees(plan, model),
        **_pipeline(plan, model),
        **_batch(plan, workload),
        **_memory(plan, workload),
        **_shape(model),
        **adapter_facts(model),
        **switch_facts(config),
    }


def _degrees(plan: Plan, model: Model) -> Facts:
    return {
        "tp": plan.tp,
        "sp": plan.sp,
        "cp": plan.cp,
        "cp_kind": plan.cp_kind if plan.cp > 1 else None,
        "pp": plan.pp,
        "ep": plan.ep if model.experts else None,
        "expert_tp": plan.etp if model.experts else None,
        "replicate": plan.replicate,
        "shard": plan.shard,
        "dp": plan.dp,
        "gpus": plan.world,
        "sharding": STAGES[plan.zero],
        "zero": plan.zero,
        "defers_reduction": not plan.reduces_each if plan.zero == 3 and plan.pp == 1 else None,
        "reshard": plan.reshard and plan.pp == 1 if plan.zero == 3 else None,  # a pipeline gathers once a step
    }


def _pipeline(plan: Plan, model: Model) -> Facts:
    if plan.pp == 1:
        return {}
    each = plan.stage_layers(model.layers)
    return {
        "virtual": plan.virtual,
        "schedule": plan.schedule,
        "layers_per_chunk": max(each) if len(set(each)) == 1 else None,
        "stage_layers": list(each) if len(set(each)) > 1 else None,
    }


def _batch(plan: Plan, workload: Workload) -> Facts:
    local = plan.microbatch if plan.pp == 1 else workload.batch // plan.dp
    return {
        "batch": workload.batch,
        "microbatch": plan.microbatch,
        "local_batch": local,
        "pipeline_microbatch": plan.microbatch if plan.pp > 1 else None,
        "accumulation": plan.microbatches(workload),
        "seq": workload.seq,
    }


def _memory(plan: Plan, workload: Workload) -> Facts:
    narrow = workload.precision if workload.precision in (*FP8, "fp4") else None
    return {
        "recompute": plan.recompute,
        "recompute_every": plan.recompute_every,
        "recompute_layers": plan.recompute_layers or None,
        "half": plan.param_dtype,
        "eight": narrow,
        "grad_dtype": plan.grad_dtype,
        "state_dtype": plan.state_dtype,
        "optimizer": workload.optimizer,
        "offload_states": plan.offload in ("states", "both"),
        "offload_activations": plan.offloads_activations,
        "offload_layers": plan.offload_layers or None,
        "bucket": int(plan.bucket),
        "bucket_mb": round(plan.bucket / 1e6),
        "bucket_elements": int(plan.bucket) // 2,
    }


def _shape(model: Model) -> Facts:
    if model.kind != "transformer":
        return {"model": model.name}
    fields: dict[str, Any] = {f"model.{name}": getattr(model, name) or None for name in SHAPE}
    fields["model.shared_ffn"] = model.shared_width or None  # the width of all shared experts
    bias = model.qkv_bias or model.ffn_bias or model.out_bias
    return {**fields, "model": model.name, "without_bias": not bias, "gated": model.gated, "untied": not model.tied}


ENDINGS: dict[str, Form] = {
    ".toml": "toml",
    ".json": "json",
    ".py": "python",
    **dict.fromkeys(YAML, "yaml"),
    **dict.fromkeys(SCRIPTS, "args"),
}
# Fields that no framework has: they belong to our own trainer and to the cost model.
OWN = ("wrap", "reduce", "bucket", "comm_dtype", "state_dtype", "grad_dtype")


@dataclass(frozen=True)
class WrittenSettings:
    """Settings, their text, and the fields of plan and workload that they do not say, with the value that a reader gets."""

    framework: Framework
    settings: Settings
    text: str
    inexpressible: dict[str, tuple[Any, Any]]
    back: SettingsReading  # the settings as they are read


def settings_of(
    config: Config, framework: Framework, form: Form | None = None, more: Facts | None = None, has_model: bool = True
) -> WrittenSettings:
    """The settings of a framework that say a configuration's plan, and `more` facts. Without a model (its shape is not known) they leave it out."""
    facts = {name: value for name, value in express(config).items() if has_model or not name.startswith("model.")}
    settings, _ = write_settings(framework.table, {**facts, **(more or {})})
    if has_model:
        settings = {**settings, **framework.model_settings(config.model), **settings}  # the plan's win
    back = understand(framework, settings, gpus=config.plan.world, model=config.model.name)
    inexpressible = difference(config, back)
    text = text_of(settings, framework, form or framework.form, inexpressible)
    return WrittenSettings(framework, settings, text, inexpressible, back)


def difference(config: Config, back: SettingsReading) -> dict[str, tuple[Any, Any]]:
    """Fields that another value is read back for: ours and the one read; an attention kind that the framework does not have."""
    stages = in_framework(config.plan, config.model, config.stack).stage_layers(config.model.layers)
    plan, out = back.plan, dict[str, tuple[Any, Any]]()
    for section, ours, theirs in (("plan", config.plan, plan), ("workload", config.workload, back.workload)):
        for name in (n for n in type(ours).model_fields if n not in ("overlap", "prefetch")):
            a, b = getattr(ours, name), getattr(theirs, name)
            if name == "layers_per_stage" and plan.stages == len(stages):
                a, b = stages, plan.stage_layers(config.model.layers)
            if a != b and name not in OWN and not _same(name, config, b):
                out[f"{section}.{name}"] = (a, b)
    kind = ATTENTIONS[config.model.attention]
    if config.model.kind == "transformer" and not {"*", back.framework.name} & set(kind.frameworks):
        out["model.attention"] = (kind.name, "gqa")
    return out | adapter_differences(config.model, back.adapter) | switch_differences(config, plan, back.stack)


def _same(name: str, config: Config, other: Any) -> bool:
    """Whether a difference has no effect: a spelled-out default, or a field that the plan does not use."""
    plan = config.plan
    unused = {
        "expert_tp": not config.model.experts or (other or plan.tp) == plan.etp,
        "schedule": plan.pp == 1,
        "virtual": plan.pp == 1,
        "cp_kind": plan.cp == 1,
        "reshard": plan.zero != 3 or plan.pp > 1,
        "master": plan.param_dtype == "fp32",
        "order": tuple(plan.order) in ((), tuple(config.stack.order)),
        "tokens": True,
        "imbalance": True,
        "loads": True,
        "lengths": True,
        "clip": True,
        "optimizer": {config.workload.optimizer, other} <= {"adam", "adamw"},
    }
    return unused.get(name, False)


def check_runnable(config: Config, framework: Framework, tolerated: Sequence[str] = (), has_model: bool = True) -> None:
    """Raise if a framework cannot run a configuration, or its settings cannot say it: the one predicate of `plan --for`, `--write` and `launch`.

    Four parts: the rules of the stack's `can`, the models that the framework has, the rules about its settings, and the fields that come back with
    another value when they are read. Fields that a framework leaves to the training script, and `tolerated` ones, are not among them."""
    legality.check(config.plan, config.model, config.workload, config.cluster, config.stack, framework=True)
    written = settings_of(config, framework, has_model=has_model)
    raise_first(written.back.errors)
    inexpressible = written.inexpressible
    lost = {
        field: pair for field, pair in inexpressible.items() if field not in (*framework.left_to_script, *tolerated)
    }
    if lost:
        shown = ", ".join(f"{field} = {ours} (it would be {theirs})" for field, (ours, theirs) in lost.items())
        raise MeshwrightError(
            "MW-LAUNCH-005",
            f"settings of {framework.title} cannot express {shown}",
            why="It would train another plan than the one that was predicted",
            fix=f"--for {OURS}"
            if any(field.startswith("adapter.") for field in lost)
            else _other_question(config, framework),
        )


def _other_question(config: Config, framework: Framework) -> str:
    """What to type where settings cannot say a plan: the weights in the dtype of the products, which frameworks have one key for; or another plan."""
    precision = config.workload.precision
    if precision in ("bf16", "fp16", "fp32") and precision != config.plan.param_dtype:
        return f"--set plan.param_dtype={precision}"
    return f"meshwright plan {config.model.name} --for {framework.name}, or --for {OURS}"


def is_runnable(config: Config, framework: Framework, plan: Plan) -> bool:
    """Whether a framework runs a plan for a configuration and its settings can state it."""
    try:
        check_runnable(config.but(plan=plan), framework)
    except MeshwrightError:
        return False
    return True


def form_of(framework: Framework, path: str | Path) -> Form:
    """The form of a settings file: its ending may choose another one than the framework's usual one."""
    form = ENDINGS.get(Path(path).suffix, framework.form)
    programs = {"args", "python"} & {form, framework.form}
    if form != framework.form and programs and not framework.takes_flags:
        usual = {"args": ".sh", "python": ".py"}.get(framework.form, f".{framework.form}")
        raise MeshwrightError(
            "MW-SET-014", f"{framework.title} takes no settings in a file of this kind", valid=[usual]
        )
    return form


def write_file(config: Config, framework: Framework, path: str | Path) -> WrittenSettings:
    """Write the settings to a file."""
    written = settings_of(config, framework, form_of(framework, path))
    write_text(path, written.text)
    return written


def text_of(settings: Settings, framework: Framework, form: Form, inexpressible: dict[str, tuple[Any, Any]]) -> str:
    """The text of a file: comments, then the settings."""
    lost = [
        f"{framework.title} cannot say {name} = {_shown(ours)}: "
        + ("set it in the training script" if name in framework.left_to_script else f"it is {_shown(theirs)} here")
        for name, (ours, theirs) in inexpressible.items()
    ]
    comments = "".join(f"# {line}\n" for line in (framework.comment, versions_line(framework), *lost) if line)
    if form == "json":  # has no comments
        return json.dumps(nested(settings), indent=2) + "\n"
    if form == "toml":
        import tomli_w

        return comments + tomli_w.dumps(nested(settings))
    if form == "yaml":
        return comments + yaml_text(nested(settings))
    if form == "python":
        assert framework.python is not None
        return comments + framework.python(settings)
    flags = [shlex.join(flag_words(framework, name, value)) for name, value in settings.items()]
    return comments + " \\\n".join(flag for flag in flags if flag) + "\n"


def versions_line(framework: Framework) -> str:
    """The versions of the framework that were tried, for the head of a file."""
    if not framework.tried:
        return ""
    part = f" ({framework.tried_part})" if framework.tried_part else ""
    return f"Tried with the parser of {framework.versions}{part}; another version may refuse or rename some of these"


def yaml_text(tables: dict[str, Any], indent: str = "") -> str:
    """Nested tables of plain values as YAML; a value is written as in JSON, which YAML reads. `1e-08` would be a text there: 1.0e-08."""
    out = ""
    for name, value in tables.items():
        if isinstance(value, dict) and value:
            out += f"{indent}{name}:\n{yaml_text(value, indent + '  ')}"
        else:
            text = json.dumps(value)
            out += f"{indent}{name}: {re.sub('e', '.0e', text) if re.fullmatch(r'-?[0-9]+e.*', text) else text}\n"
    return out


def flag_words(framework: Framework, name: str, value: Any) -> list[str]:
    """One setting as words of a command line; none for a switch that is off."""
    word = name if name.startswith("--") else f"{framework.flag_prefix or '--'}{name}"
    if isinstance(value, bool) and (framework.flag_prefix == "" or framework.takes_flags):
        return [word] if value else []
    if isinstance(value, list):
        return [word, *map(str, value)]
    return [word, str(value).lower() if isinstance(value, bool) else str(value)]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "-".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
