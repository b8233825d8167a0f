"""The cases of the tests with real frameworks, and what Meshwright writes for them.

A case is a question to `meshwright plan`. Its winner for a framework is written twice: as `plan --for X --write` writes it and as
`launch --for X` starts it. A case that the planner refuses for a framework is not tried: the framework, or its settings, cannot run it.
"""

import shlex
from dataclasses import dataclass
from functools import cache
from typing import Any

from meshwright import api
from meshwright.describe.config import Config
from meshwright.errors import MeshwrightError
from meshwright.interop.frameworks import FRAMEWORKS
from meshwright.interop.frameworks.bridge import RECIPES
from meshwright.interop.write import settings_of
from meshwright.view.launch_files.job import make_job


@dataclass(frozen=True)
class Case:
    """One question: model, GPUs, batch and sequence length; words of --fix and of --set."""

    model: str
    gpus: int
    batch: int
    seq: int
    fix: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    cluster: str = "dgx-h100"


FP8 = ("workload.precision=fp8",)
CASES = {
    "1b one gpu": Case("llama3.2-1b", 1, 32, 4096),
    "1b one node": Case("llama3.2-1b", 8, 64, 8192),
    "8b one node": Case("llama3-8b", 8, 128, 8192),
    "8b 64": Case("llama3-8b", 64, 512, 8192),
    "8b fp8": Case("llama3-8b", 64, 512, 8192, settings=FP8),
    "8b 128k": Case("llama3.1-8b", 64, 32, 131072),
    "8b zero 0": Case("llama3-8b", 64, 512, 8192, ("zero=0",)),
    "8b zero 1": Case("llama3-8b", 64, 512, 8192, ("zero=1",)),
    "8b zero 2": Case("llama3-8b", 64, 512, 8192, ("zero=2",)),
    "8b zero 3": Case("llama3-8b", 64, 512, 8192, ("zero=3",)),
    "8b pipeline": Case("llama3-8b", 64, 512, 8192, ("pp=4", "tp=2")),
    "8b interleaved": Case("llama3-8b", 64, 512, 8192, ("pp=2", "virtual=4")),
    "8b recompute": Case("llama3-8b", 64, 512, 8192, ("recompute=full",)),
    "8b selective": Case("llama3-8b", 64, 512, 8192, ("recompute=selective",)),
    "8b lora": Case("llama3-8b", 8, 64, 4096, settings=("adapter.rank=16", "adapter.alpha=32", "adapter.targets=q_proj,k_proj,v_proj")),
    "70b qlora": Case(
        "llama3-70b", 8, 64, 4096, settings=("adapter.rank=8", "adapter.targets=all-linear", "adapter.base=nf4", "adapter.dropout=0.05")
    ),
    "qwen3 8b": Case("qwen3-8b", 64, 512, 4096),
    "70b 64": Case("llama3-70b", 64, 512, 8192),
    "70b 512": Case("llama3-70b", 512, 1024, 8192),
    "70b 128k": Case("llama3.1-70b", 512, 64, 131072),
    "405b 512": Case("llama3.1-405b", 512, 512, 8192),
    "405b 8192": Case("llama3.1-405b", 8192, 2048, 8192),
    "mixtral 64": Case("mixtral-8x7b", 64, 512, 4096),
    "mixtral experts": Case("mixtral-8x7b", 64, 512, 4096, ("ep=8",)),
    "deepseek lite 64": Case("deepseek-v2-lite", 64, 512, 4096),
    "deepseek lite experts": Case("deepseek-v2-lite", 64, 512, 4096, ("ep=8",)),
    "deepseek v3 2048": Case("deepseek-v3", 2048, 8192, 4096),
}  # fmt: skip


@dataclass(frozen=True)
class Offer:
    """What Meshwright gives a user for a case: the configuration, the settings file, and the words and the file of the launch."""

    config: Config
    written: str = ""
    flags: str = ""  # the settings as flags, where the framework takes both
    words: tuple[str, ...] = ()
    file: str = ""
    file_name: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    refused: str = ""  # by the planner: there is no plan for the framework
    launch_refused: str = ""  # by `launch`, of a plan that the planner gave


def offer(name: str, framework_name: str) -> Offer:
    """What Meshwright gives for one of the cases above."""
    return offer_of(CASES[name], framework_name)


@cache
def offer_of(case: Case, framework_name: str) -> Offer:
    """Plan a case for a framework, and write it."""
    framework = FRAMEWORKS[framework_name]
    try:
        config = api.plan(
            case.model, case.cluster, gpus=case.gpus, batch=case.batch, seq=case.seq, framework=framework_name, fix=case.fix, set=case.settings,
        ).config  # fmt: skip
    except MeshwrightError as error:
        return Offer(None, refused=str(error))  # type: ignore[arg-type]
    try:
        written = settings_of(config, framework).text
        flags = settings_of(config, framework, "args").text if framework.takes_flags else ""
        job = make_job(config, "plan.toml", typed="", framework=framework_name)
    except MeshwrightError as error:
        return Offer(config, launch_refused=str(error))
    program = job.program
    return Offer(
        config,
        written,
        flags,
        program.begin,
        program.settings,
        program.file,
        tuple((name, value) for name, (value, _) in program.variables.items()),
    )


def flags_of(text: str) -> list[str]:
    """The words of a file of flags."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return shlex.split(" ".join(lines).replace("\\", " "))


def facts_of(config: Config) -> dict[str, Any]:
    """What a driver is told of a configuration besides its settings."""
    shape = expected(config) | {"attention": config.model.attention}
    a = config.adapter
    targets = ["all-linear"] if "all-linear" in a.targets else list(a.targets) or None
    return {
        "world": config.plan.world,
        "shape": shape,
        "targets": targets,
        "recipe": RECIPES.get(config.model.name, ""),
    }


def expected(config: Config) -> dict[str, Any]:
    """The values of a plan under the names that the drivers print."""
    plan, work, model, a = config.plan, config.workload, config.model, config.adapter
    return {
        "world": plan.world, "tp": plan.tp, "cp": plan.cp, "pp": plan.pp, "dp": plan.dp, "replicate": plan.replicate, "shard": plan.shard,
        "ep": plan.ep, "expert_tp": plan.etp, "sp": plan.sp and plan.tp > 1, "zero": plan.zero,
        "reshard": plan.reshard and plan.pp == 1, "virtual": plan.virtual if plan.pp > 1 else 1,
        "batch": work.batch, "microbatch": plan.microbatch, "accumulation": plan.microbatches(work), "seq": work.seq,
        "recompute": plan.recompute, "dtype": plan.param_dtype, "fp8": work.precision in ("fp8", "mxfp8"),
        "layers": model.layers, "hidden": model.hidden, "heads": model.heads, "kv_heads": model.kv_heads or model.heads,
        "ffn": model.ffn if not model.experts or model.dense_layers else model.expert_ffn,
        "adapter": [a.rank, a.alpha or a.rank, a.dropout] if a.on else None, "base_bits": {"nf4": 4, "int8": 8}.get(a.base),
        "vocab": model.vocab, "experts": model.experts or 0, "top_k": model.top_k if model.experts else 0,
    }  # fmt: skip
