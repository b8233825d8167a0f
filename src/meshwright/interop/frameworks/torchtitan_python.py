"""torchtitan 0.3: its settings are a Python function that returns a config; there is no settings file.

The function takes the config of one of torchtitan's own models, gives it the model of the plan and sets the fields of the plan. Against version
0.2 there is no degree of tensor parallelism inside experts (it is 1 where experts are parallel), no ring attention and no recompute of every n-th
layer. CUDA graphs are on by default and exclude pipelines and expert parallelism. Its default way of describing shards, `spmd_types`, needs a `fully_shard`
that PyTorch 2.13 does not have ("all parameters must be DTensors"): settings ask for DTensors, which both have.
"""

import ast
from typing import Any

from meshwright.describe.model import Model
from meshwright.interop.frameworks.torchtitan import MODELS, TORCHTITAN, named_model
from meshwright.interop.keys import Facts, Settings
from meshwright.interop.tables import framework

# The models of version 0.2, and smaller ones; the function of torchtitan's registry that the plan starts from, by name.
MODELS_03 = {**MODELS, "llama3.2-1b": ("llama3", "1B"), "llama3.2-3b": ("llama3", "3B")}
STARTS = {"llama3": "llama3_8b", "deepseek_v3": "deepseek_v3_16b", "qwen3": "qwen3_0_6b", "gpt_oss": "gpt_oss_20b"}


def _derive(facts: Facts) -> None:
    facts["cp_kind"] = "all-gather"
    TORCHTITAN.table.derive(facts)
    if facts.get("ep", 1) > 1:
        facts["expert_tp"] = 1


def _restate(facts: Facts) -> None:
    eight, every = facts.get("eight"), facts.get("recompute_every", 1)
    TORCHTITAN.table.restate(facts)
    facts["eight"] = eight
    facts["recompute"] = "full" if every > 1 else facts.get("recompute")
    facts["eager_steps"] = facts.get("pp", 1) > 1 or (facts.get("ep") or 1) > 1


def _model_settings(model: Model) -> Settings:
    name, flavor = named_model(model, MODELS_03, "torchtitan 0.3")
    return {"model_spec.name": name, "model_spec.flavor": flavor, "parallelism.spmd_backend": "partial_dtensor"}


def program_text(settings: Settings) -> str:
    """A Python module with the function `plan`, for `--module settings --config plan`."""
    fields: dict[str, Any] = dict(settings)
    name, flavor = fields.pop("model_spec.name"), fields.pop("model_spec.flavor")
    # A recompute that the settings cannot state, such as auto, leaves torchtitan's own.
    policy, converter = fields.pop("activation_checkpoint", ""), fields.pop("model_spec.converters", None)
    compiled = bool(fields.get("compile.enable"))
    imports = [
        f"from torchtitan.models.{name} import model_registry",
        f"from torchtitan.models.{name}.config_registry import {STARTS[name]}",
    ]
    arguments = repr(flavor)
    if converter:
        imports.insert(0, f"from torchtitan.components.quantization import {converter}")
        arguments += f", converters=[{converter}.Config(model_compile_enabled={compiled})]"
    if policy not in ("", "None"):
        imports.insert(0, f"from torchtitan.distributed.activation_checkpoint import {policy}")
    lines = [
        f"config = {STARTS[name]}()",
        f"config.model_spec = model_registry({arguments})",
        "config.loss.loss_fn.global_vocab_size = config.model_spec.model.vocab_size",
        *([f"config.activation_checkpoint = {'None' if policy == 'None' else policy + '.Config()'}"] if policy else []),
        *(f"config.{key} = {value!r}" for key, value in fields.items()),
        *(['config.compile.components = ["model", "loss"]'] if compiled else []),
        "return config",
    ]
    body = "".join(f"    {line}\n" for line in lines)
    return "\n".join(imports) + f'\n\n\ndef plan():\n    """Settings of the plan."""\n{body}'


def program_settings(text: str) -> Settings:
    """The settings in a Python module: fields that are assigned, and arguments of a config that is returned. Nothing of it is run."""
    out: Settings = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchtitan.models."):
            out["model_spec.name"] = str(node.module).split(".")[2]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            out |= _flat(ast.unparse(node.targets[0]).partition(".")[2], node.value)
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
            for argument in node.value.keywords:
                out |= _flat(str(argument.arg), argument.value)
    return out


def _flat(path: str, value: ast.expr) -> Settings:
    """A literal by its path; a call as its name, with the literals and calls among its arguments: `FullAC.Config()` is FullAC."""
    if isinstance(value, ast.List) and value.elts and isinstance(value.elts[0], ast.Call):
        return _flat(path, value.elts[0])
    if isinstance(value, ast.Call):
        out: Settings = {path: ast.unparse(value.func).removesuffix(".Config")}
        for argument in value.keywords:
            out |= _flat(f"{path}.{argument.arg}", argument.value)
        return out | (_flat(f"{path}.flavor", value.args[0]) if value.args else {})
    try:
        literal = ast.literal_eval(value)
    except (ValueError, TypeError):
        return {}  # computed by the program
    return {path: "None" if literal is None else literal}


TORCHTITAN_03 = framework(
    "torchtitan-0.3",
    not_modelled=(r"spmd_backend",),
    derive=_derive,
    restate=_restate,
    python=program_text,
    model_settings=_model_settings,
)
