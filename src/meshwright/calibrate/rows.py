"""Convert a row of published measurements to a model, cluster, stack, workload and plan, with the list of assumptions.

A blank cell means *not published*, never zero. Missing values come from the stack, or from the catalog entry of the model
family; if recompute is not published, the least recompute that fits is assumed. A row that lacks the
shape of its model, its GPUs or its batch is refused with the reason.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.describe import catalog
from meshwright.describe.cluster import Cluster, Level, Link
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError

LIMIT = 200_000_000
REQUIRED = ("row_id", "file", "gpus", "tp", "pp", "global_batch", "seq_len", "step_time_s")

FAMILIES = (  # model name → catalog entry; published shapes override the entry
    (r"deepseek.?v3", "deepseek-v3"),
    (r"qwen3.235b", "qwen3-235b-a22b"),
    (r"qwen3.30b", "qwen3-30b-a3b"),
    (r"gpt.oss.120b", "gpt-oss-120b"),
    (r"mixtral.8x22b", "mixtral-8x22b"),
    (r"mixtral.8x7b", "mixtral-8x7b"),
    (r"llama.?3\.1.405b|llama.?3.405b", "llama3.1-405b"),
    (r"llama.?3(\.1)?.70b", "llama3-70b"),
    (r"llama.?3(\.1)?.8b", "llama3-8b"),
    (r"llama.?2.70b", "llama2-70b"),
    (r"llama.?65b", "llama-65b"),
    (r"mt.nlg", "mt-nlg-530b"),
    (r"gpt.?3.175b", "gpt3-175b"),
    (r"opt.175b", "gpt3-175b"),
)
GATED = r"llama|qwen|mixtral|deepseek|grok|gpt.?oss|mistral"
SCHEDULES = {
    "": "1f1b",
    "none": "1f1b",
    "1f1b": "1f1b",
    "interleaved": "interleaved",
    "1f1b-i": "interleaved",
    "zb-1p": "zb-h1",
    "zb-2p": "zb-h2",
}
PRECISIONS = {"bf16": "bf16", "16bit": "bf16", "fp16": "fp16", "fp8": "fp8", "mxfp8": "mxfp8", "fp4": "fp4", "": "bf16"}


@dataclass
class Case:
    """One published run: its measurements and its configuration."""

    row: dict[str, str]
    model: Model | None = None
    cluster: Cluster | None = None
    stack: Stack = field(default_factory=Stack)
    workload: Workload | None = None
    plan: Plan | None = None
    assumed: list[str] = field(default_factory=list)
    refused: str = ""

    @property
    def row_id(self) -> str:
        return self.row.get("row_id", "")

    @property
    def step_time(self) -> float | None:
        """The published step time, or the one that follows from tokens per second and device."""
        published = number(self.row.get("step_time_s", ""))
        rate = number(self.row.get("tokens_per_s_per_gpu", ""))
        if published is None and rate and self.workload and self.cluster:
            return self.workload.tokens_per_step / (rate * self.cluster.world)
        return published

    @property
    def memory(self) -> float | None:
        return number(self.row.get("memory_gib", ""))


def number(text: str | None) -> float | None:
    """The first number in a cell, or None if the cell is blank."""
    match = re.search(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?", text or "")
    return float(match[0]) if match else None


def integer(text: str | None, default: int = 0) -> int:
    """The first number in a cell as an integer, or `default` if the cell is blank."""
    value = number(text)
    return default if value is None else int(min(value, 2**40))


def read(path: str | Path) -> Iterator[dict[str, str]]:
    """Rows of a CSV with the columns of `runs.csv`."""
    path = Path(path)
    if not path.is_file():
        raise MeshwrightError(
            "MW-VAL-001", f"the file {str(path)!r} does not exist", fix="give a CSV with the columns of runs.csv"
        )
    if path.stat().st_size > LIMIT:
        raise MeshwrightError("MW-VAL-001", f"{str(path)!r} is larger than {LIMIT // 10**6} MB")
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [c for c in REQUIRED if c not in (reader.fieldnames or [])]
            if missing:
                raise MeshwrightError(
                    "MW-VAL-002",
                    f"{path.name} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}",
                    valid=REQUIRED,
                )
            for row in reader:
                yield {
                    k: (v or "").strip()
                    for k, v in row.items()
                    if isinstance(k, str) and (v is None or isinstance(v, str))
                }
    except (UnicodeDecodeError, csv.Error) as error:
        raise MeshwrightError("MW-VAL-001", f"{path.name} is not a readable CSV", why=str(error)[:100]) from None


def case(row: dict[str, str]) -> Case:
    """Read one row; `refused` is the reason if it cannot be predicted."""
    out = Case(defaultdict(str, row))
    try:
        out.stack = _stack(out)
        out.model = _model(out)
        out.cluster = _cluster(out)
        _plan(out)
        assert out.plan is not None
        assert out.workload is not None
        out.plan.check(out.model, out.workload, out.cluster)
    except MeshwrightError as error:
        out.refused = error.what
    return out


def _refuse(what: str) -> MeshwrightError:
    return MeshwrightError("MW-VAL-003", what)


def _stack(c: Case) -> Stack:
    name = c.row["stack"]
    stack: Stack = catalog.load("stacks", name if name in catalog.names("stacks") else "default")
    if not name:
        c.assumed.append("stack: default")
    kernel = {"0": "stored", "1": "flash"}.get(c.row["flash_attn"])
    if c.row["flash_attn"] in ("TE auto", "fused (cuDNN)"):
        kernel = "fused"
    if kernel:
        return stack.but(attention=kernel)
    c.assumed.append(f"attention: {stack.attention}")
    return stack


def _model(c: Case) -> Model:
    r, name = c.row, c.row["model"].lower()
    base = next(
        (entry for pattern, entry in FAMILIES if re.search(pattern, name) and entry in catalog.names("models")), None
    )
    if re.search(r"nemotron.h|nemotron.?3|kimi|v4 flash", name):
        raise _refuse(f"the shape of {r['model']} cannot be described")
    published = {
        k: integer(r[col])
        for k, col in (("layers", "layers"), ("hidden", "hidden"), ("heads", "heads"), ("vocab", "vocab"))
        if integer(r[col])
    }
    if base:
        shape: Model = catalog.load("models", base)
        if published.get("hidden", shape.hidden) == shape.hidden:
            keep = {k: v for k, v in published.items() if k != "heads" or shape.attention == "gqa"}
            if r["kv_heads"].isdigit() and shape.attention == "gqa":
                keep["kv_heads"] = integer(r["kv_heads"])
            if "layers" in keep:
                keep["dense_layers"] = min(shape.dense_layers, keep["layers"])
            if not published:
                c.assumed.append(f"shape: catalog {base}")
            return shape.but(name=r["model"], **keep)
    if not {"layers", "hidden"} <= set(published):
        raise _refuse("the shape of the model is not published")
    return _custom(c, published, name)


def _custom(c: Case, published: dict[str, int], name: str) -> Model:
    r = c.row
    hidden = published["hidden"]
    if "heads" not in published:
        published["heads"] = max(1, hidden // 128)
        c.assumed.append(f"heads: hidden / 128 = {published['heads']}")
    if "vocab" not in published:
        published["vocab"] = 50304
        c.assumed.append("vocabulary: 50304")
    gated = bool(re.search(GATED, name))
    ffn = integer(r["ffn_hidden"])
    if not ffn:
        ffn = 4 * hidden
        c.assumed.append("FFN: 4 × hidden")
    experts = integer(r["experts"])
    fields: dict[str, Any] = dict(
        published,
        name=r["model"],
        kv_heads=integer(r["kv_heads"]) or published["heads"],
        ffn=ffn,
        max_positions=integer(r["seq_len"], 2048),
    )
    if published["heads"] % fields["kv_heads"]:
        fields["kv_heads"] = published["heads"]
    if experts:
        dense = re.search(r"dense (\d+)", r["ffn_hidden"])
        shared = re.search(r"\+ (\d+) shared", r["ffn_hidden"])
        fields |= dict(
            experts=experts, top_k=integer(r["topk"], 2), expert_ffn=ffn, ffn=int(dense[1]) if dense else ffn
        )
        if shared:
            fields |= dict(shared_experts=1, shared_ffn=int(shared[1]))
        if "every 2nd" in r["ffn_hidden"]:
            fields["moe_every"] = 2
    if gated:
        tied = r["stack"] == "nanotron" and hidden <= 3072
        return Model(**fields, activation="swiglu", tied=tied)
    squared = "nemotron" in name
    gpt = dict(
        norm="layernorm", positions="learned", tied=True, qkv_bias=True, out_bias=True, ffn_bias=True, dropout=True
    )
    if "mpt" in name:
        gpt = dict(norm="layernorm", positions="alibi", tied=True)
    if "bloom" in c.row["file"]:
        gpt |= dict(positions="alibi", embedding_norm=True, dropout=False)
    if squared:
        gpt = dict(norm="layernorm", tied=False)
    return Model(**fields, activation="relu" if squared else "gelu", vocab_multiple=128, **gpt)


CLUSTERS = (  # GPU and network in the row → catalog cluster
    (r"gb300", r"", "gb300-nvl72"),
    (r"gb200", r"", "gb200-nvl72"),
    (r"b300", r"", "dgx-b300"),
    (r"b200", r"", "dgx-b200"),
    (r"h800", r"", "dgx-h800"),
    (r"h100|h200", r"efa", "aws-p5"),
    (r"h100", r"roce per gpu", "meta-h100"),
    (r"h100", r"", "dgx-h100"),
    (r"v100", r"", "dgx-v100"),
    (r"a100.?40|40gb", r"", "a100-40gb-roce"),
    (r"a100|ampere", r"omni.path", "jean-zay-a100"),
    (r"a100|ampere", r"800 gb/s per node", "a100-hdr4"),
    (r"a100|ampere", r"", "dgx-a100"),
)


def _cluster(c: Case) -> Cluster:
    r = c.row
    gpus = integer(r["gpus"])
    if not gpus:
        gpus = max(1, integer(r["tp"], 1) * integer(r["pp"], 1) * integer(r["cp"], 1) * max(1, integer(r["dp"], 1)))
        ranks = integer(r["ep"], 1) * max(1, integer(r["etp"], 1)) * integer(r["pp"], 1)
        gpus = max(gpus, ranks)
        c.assumed.append(f"GPUs: {gpus}, the smallest number that the degrees allow")
    if not r["gpu_type"]:
        raise _refuse("the GPU is not published")
    kind, network = r["gpu_type"].lower(), r["interconnect"].lower()
    name = next((n for gpu, net, n in CLUSTERS if re.search(gpu, kind) and re.search(net, network)), None)
    if name is None:
        raise _refuse(f"GPU {r['gpu_type']!r} is not in the catalog")
    if not network and gpus > 8:
        c.assumed.append(f"network: as {name}")
    return preset(name).with_gpus(gpus)


def preset(name: str) -> Cluster:
    """A catalog cluster, or a cluster of a published run that is not in the catalog."""
    if name in catalog.names("clusters"):
        return catalog.load("clusters", name)
    base: Cluster = catalog.load("clusters", "dgx-a100")
    node, network = base.levels[0], base.levels[1]
    if name == "a100-hdr4":
        return base.but(name=name, levels=(node, Level(name="fabric", size=1024, link=network.link, ports=4)))
    if name == "a100-40gb-roce":
        roce = Link(name="roce", alpha="6us", bandwidth="200Gb/s", efficiency=0.75, hop=network.link.library_hop)
        return base.but(name=name, accelerator="a100-40gb", levels=(node, Level(name="fabric", size=1024, link=roce)))
    raise _refuse(f"cluster {name} is not in the catalog")


def _plan(c: Case) -> None:
    r = c.row
    assert c.cluster is not None
    assert c.model is not None
    gpus = c.cluster.world
    tp, pp, cp = integer(r["tp"], 0), integer(r["pp"], 0), integer(r["cp"], 1) or 1
    if not tp or not pp:
        raise _refuse("the parallel degrees are not published")
    if gpus % (tp * pp * cp):
        raise _refuse(f"tp × cp × pp = {tp} × {cp} × {pp} does not divide {gpus} GPUs")
    dp = gpus // (tp * pp * cp)
    if r["dp"] and integer(r["dp"]) != dp:
        c.assumed.append(f"dp: {dp} by arithmetic (the table says {r['dp']})")
    batch, seq = integer(r["global_batch"]), integer(r["seq_len"])
    if not batch or not seq or "token" in r["global_batch"]:
        raise _refuse("the batch or the sequence length is not published")
    micro = integer(r["micro_batch"])
    if not micro:
        local = max(1, batch // dp)
        micro = (
            max(1, local // integer(r["grad_accum"])) if integer(r["grad_accum"]) else (1 if pp > 1 else min(local, 8))
        )
        c.assumed.append(f"micro-batch: {micro}")
    while micro > 1 and batch % (micro * dp):
        micro -= 1
    zero = integer(r["zero"]) if r["zero"] else 1
    if not r["zero"]:
        c.assumed.append("ZeRO: 1 (distributed optimizer)")
    schedule, virtual = SCHEDULES.get(r["schedule"], "1f1b"), max(1, integer(r["vpp"], 1))
    if pp == 1 or schedule not in ("interleaved",):
        virtual = 1
    if schedule == "interleaved" and virtual == 1:
        virtual = max(2, next((v for v in (2, 3, 4, 5) if c.model.layers % (pp * v) == 0), 2))
        c.assumed.append(f"virtual stages: {virtual}")
    while virtual > 1 and pp * virtual > c.model.layers:
        virtual -= 1
    if pp == 1 or (virtual == 1 and schedule == "interleaved"):
        schedule = "1f1b"
    if r["sp"]:
        sp = integer(r["sp"]) > 0 and tp > 1
    else:
        sp = tp > 1
        c.assumed.append(f"sequence parallel: {'on' if sp else 'off'}")
    sharded = zero > 0 and dp > 1
    grad = c.stack.gradient_dtype
    c.workload = Workload(batch=batch, seq=seq, precision=PRECISIONS.get(r["dtype"], "bf16"))
    fields: dict[str, Any] = dict(
        replicate=1 if sharded else dp,
        shard=dp if sharded else 1,
        zero=zero if sharded else 0,
        tp=tp,
        sp=sp,
        cp=cp,
        pp=pp,
        virtual=virtual,
        schedule=schedule,
        microbatch=micro,
        grad_dtype=grad,
        comm_dtype=grad,
        bucket=_bucket(c),
        reduce="step" if zero == 2 and pp > 1 else "auto",
        master=c.stack.name != "composer-fsdp" or "pure" not in r["zero_fsdp"].lower(),
    )
    if c.stack.name == "composer-fsdp":
        fields |= dict(
            param_dtype="bf16", grad_dtype="bf16" if "pure" in r["zero_fsdp"].lower() else "fp32", comm_dtype="bf16"
        )
    if zero == 3:  # ZeRO-3 prefetches its all-gathers even if the stack has no other overlap
        fields["overlap"] = tuple(dict.fromkeys(("dp", *c.stack.overlap)))
    if c.model.experts:
        fields |= dict(
            ep=max(1, integer(r["ep"], 1)), expert_tp=integer(r["etp"]) or (1 if integer(r["ep"], 1) > 1 else 0)
        )
        ranks = tp * cp * dp
        if ranks % (fields["ep"] * max(1, fields["expert_tp"] or tp)):
            fields["expert_tp"] = 1
    mode = r["recompute_mode"]
    c.plan = Plan(**fields, recompute=mode or "none")
    if not mode:
        c.assumed.append("recompute: the least that fits")


def _bucket(c: Case) -> float:
    """The bucket size: Megatron reduces in large buckets (at least 40M elements), DDP in buckets of 25 MB."""
    return 160e6 if c.stack.name.startswith(("megatron", "nemo")) else 25e6
