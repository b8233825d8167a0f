"""The plan and the workload of a published run. What the row does not state is assumed, and the assumption is listed.

The cluster of a published run: the catalog's cluster for its card and network.
"""

import re
from dataclasses import dataclass

from meshwright.calibrate.runs.row_model import PublishedRun, integer, number, refusal
from meshwright.describe import catalog
from meshwright.describe.catalog import accelerator_of
from meshwright.describe.cluster import Cluster
from meshwright.describe.plan import Plan, in_framework
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.units import Json

CLUSTER_COLUMNS = ("gpus", "gpu_type", "gpus_per_node", "interconnect", "tp", "cp", "pp", "dp", "ep", "etp")
CLUSTERS = (  # pattern of the accelerator, words of the network → catalog cluster; the first that fits
    ("gb300", r"", "gb300-nvl72"),
    ("gb200", r"", "gb200-nvl72"),
    ("b300", r"", "dgx-b300"),
    ("b200", r"efa", "aws-p6-b200"),
    ("b200", r"", "dgx-b200"),
    ("h800", r"", "dgx-h800"),
    ("h200", r"efa", "aws-p5e"),
    ("h200", r"", "dgx-h200"),
    (r"h100-sxm(-96gb)?", r"efa", "aws-p5"),
    (r"h100-sxm(-96gb)?", r"roce per gpu", "meta-h100"),
    (r"h100-sxm(-96gb)?", r"", "dgx-h100"),
    ("v100-sxm2-16gb", r"", "dgx-v100"),
    ("v100-sxm2-32gb", r"", "dgx-v100"),
    ("a100-40gb", r"efa", "aws-p4d"),
    ("a100-40gb", r"", "a100-40gb-roce"),
    ("a100-80gb", r"omni.path", "jean-zay-a100"),
    ("a100-80gb", r"800 gb/s per node", "a100-hdr4"),
    ("a100-80gb", r"efa", "aws-p4de"),
    ("a100-80gb", r"", "dgx-a100"),
    ("mi300x", r"", "mi300x-8"),
    ("mi355x", r"", "mi355x-8"),
    ("rtx-4090", r"", "workstation-2x4090"),
    ("rtx-3090", r"", "workstation-4x3090"),
    (r".*", r"", "ethernet-cluster"),  # cards on PCIe
)


def read_cluster(c: PublishedRun) -> Cluster:
    """The cluster of a row, with the assumptions added to the case."""
    r = c.row
    gpus = integer(r["gpus"])
    if not gpus:
        gpus = max(1, integer(r["tp"], 1) * integer(r["pp"], 1) * integer(r["cp"], 1) * max(1, integer(r["dp"], 1)))
        ranks = integer(r["ep"], 1) * max(1, integer(r["etp"], 1)) * integer(r["pp"], 1)
        gpus = max(gpus, ranks)
        c.assumed.append(f"GPUs: {gpus}, the smallest number that the degrees allow")
    if not r["gpu_type"]:
        raise refusal("the GPU is not published")
    card, network = accelerator_of(r["gpu_type"]), r["interconnect"].lower()
    if card is None:
        raise refusal(f"GPU {r['gpu_type']!r} is not in the catalog")
    name = next(n for gpu, words, n in CLUSTERS if re.fullmatch(gpu, card) and re.search(words, network))
    if not network and gpus > 8:
        c.assumed.append(f"network: as {name}")
    cluster: Cluster = catalog.load("clusters", name)
    if cluster.accelerator.name != card:
        cluster = cluster.but(name=f"{name}-{card}", accelerator=card)
    return _with_nodes_of(_with_power_of(cluster, r["gpu_type"]), integer(r["gpus_per_node"]), gpus).with_gpus(gpus)


def _with_power_of(cluster: Cluster, text: str) -> Cluster:
    """The cluster with boards of the published power, where it is below that of the card."""
    watts, board = re.search(r"(\d{3,4}) ?w\b", text.lower()), cluster.accelerator
    if not watts or not board.power > float(watts[1]):
        return cluster
    return cluster.but(name=f"{cluster.name}-{watts[1]}w", accelerator=board.but(power_limit=float(watts[1])))


def _with_nodes_of(cluster: Cluster, size: int, gpus: int) -> Cluster:
    """The cluster with smaller nodes, where a row has them and needs more than one. An NVLink domain of many nodes stays whole."""
    node = cluster.levels[0]
    if not 0 < size < min(node.size, gpus) or node.size > 16:
        return cluster
    levels = (node.but(size=size), *cluster.levels[1:])
    return cluster.but(name=f"{cluster.name}-nodes-of-{size}", levels=levels)


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
MX_WORDS = r"FP8-MX|32x32 MX"  # of Megatron-Bridge's tables of 2025, for runs whose dtype is fp8; on Hopper it is another kind of blocks
DDP_BUCKET = 25 * 2.0**20  # bytes of 16-bit parameters
SIMILAR = 0.8  # a schedule with this share of the published virtual stages is predicted in its place
WIDTHS = {"fp32": 4.0}
ROUNDING = 1e-3  # of published rates and step times

# NVIDIA's recipes for fine-tuning pack SQuAD (NeMo's llama3_8b.py, packed_sequence_specs in performance mode; Megatron-Bridge's perf_recipes,
# offline_packing_specs) with masks between documents: a paragraph of about 750 characters, a question and an answer.
FINE_TUNING, PACKED = ("sft", "lora"), ("nvidia_dgxc_benchmarking", "megatron_bridge_perf_summary")
PACKED_DOCUMENT = 190  # tokens


@dataclass(frozen=True)
class RowDegrees:
    tp: int
    cp: int
    pp: int
    dp: int


def read_plan(c: PublishedRun) -> None:
    """Set the plan and the workload of a case whose model, cluster and stack are known."""
    d, workload = _degrees(c, c.cluster.world), _workload(c)
    fields: Json = {"tp": d.tp, "cp": d.cp, "pp": d.pp, "microbatch": _microbatch(c, d, workload.batch)}
    several = workload.batch > fields["microbatch"] * d.dp  # micro-batches
    fields |= _stages(c, d.pp, c.model.layers) | _sequence_parallel(c, d.tp) | _sharding(c, d, several)
    if c.model.experts:
        fields |= _experts(c, d)
    if d.cp > 1 and c.stack.can.cp_kinds:
        fields["cp_kind"] = c.stack.can.cp_kinds[0]
    if workload.precision in c.stack.gathers_narrow and fields["sp"]:
        fields["gather_dtype"] = "fp8"
    mode = c.row["recompute_mode"] or c.stack.usual_recompute
    if mode == "full":
        fields["recompute_layers"] = integer(c.row["recompute_layers"])
    if c.row["offload_layers"]:
        fields |= {"offload": "activations", "offload_layers": integer(c.row["offload_layers"])}
    plan = in_framework(Plan(**fields, recompute=mode or "none"), c.model, c.stack)
    if "ep" in c.row["overlap"]:
        plan = plan.but(overlap=(*plan.overlapped(c.stack, c.cluster.node_size), "ep"))
    c.config = c.config.but(plan=plan, workload=workload)
    if not c.row["recompute_mode"]:
        c.assumed.append(
            f"recompute: {mode}, usual in {_framework(c.stack)}" if mode else "recompute: the least that fits"
        )


def _degrees(c: PublishedRun, gpus: int) -> RowDegrees:
    r = c.row
    tp, pp, cp = integer(r["tp"], 0), integer(r["pp"], 0), integer(r["cp"], 1) or 1
    if not tp or not pp:
        raise refusal("the parallel degrees are not published")
    if gpus % (tp * pp * cp):
        raise refusal(f"tp × cp × pp = {tp} × {cp} × {pp} does not divide {gpus} GPUs")
    dp = gpus // (tp * pp * cp)
    if r["dp"] and integer(r["dp"]) != dp:
        c.assumed.append(f"dp: {dp} by arithmetic (the table says {r['dp']})")
    return RowDegrees(tp, cp, pp, dp)


def _workload(c: PublishedRun) -> Workload:
    r = c.row
    batch, seq = integer(r["global_batch"]), integer(r["seq_len"]) or _sequence_of_rate(c)
    if not batch or not seq or "token" in r["global_batch"]:
        raise refusal("the batch or the sequence length is not published")
    if not r["dtype"] or r["dtype"] not in PRECISIONS:
        c.assumed.append(_assumption("precision", "bf16", r["dtype"]))
    precision = PRECISIONS.get(r["dtype"], "bf16")
    if precision == "fp8" and re.search(MX_WORDS, r["precision"]) and "mxfp8" in c.cluster.accelerator.peak:
        precision = "mxfp8"
    workload = Workload(batch=batch, seq=seq, precision=precision)
    if r["task"] in FINE_TUNING and r["file"] in PACKED:
        c.assumed.append(f"documents: packed, {PACKED_DOCUMENT} tokens each")
        return workload.but(lengths=(PACKED_DOCUMENT,))
    return workload


def _sequence_of_rate(c: PublishedRun) -> int:
    """The sequence length that the published tokens/s and step time have in common: a multiple of 128, up to rounding; else 0."""
    rate, seconds, batch, gpus = (
        number(c.row[name]) for name in ("tokens_per_s_per_gpu", "step_time_s", "global_batch", "gpus")
    )
    if not (rate and seconds and batch and gpus):
        return 0
    length = rate * gpus * seconds / batch
    seq = 128 * round(length / 128)
    if not seq or abs(length / seq - 1) > ROUNDING:
        return 0
    c.assumed.append(f"sequence length: {seq}, tokens/s × step time / batch")
    return seq


def _assumption(what: str, value: str, published: str) -> str:
    return f"{what}: {value} ({published!r} is not known)" if published else f"{what}: {value}"


def _microbatch(c: PublishedRun, d: RowDegrees, batch: int) -> int:
    """The published micro-batch; else by gradient accumulation, one in a pipeline, or up to eight. It must divide the batch."""
    r = c.row
    micro = integer(r["micro_batch"])
    if not micro:
        local, steps = max(1, batch // d.dp), integer(r["grad_accum"])
        micro = max(1, local // steps) if steps else 1 if d.pp > 1 else min(local, 8)
        c.assumed.append(f"micro-batch: {micro}")
    while micro > 1 and batch % (micro * d.dp):
        micro -= 1
    return micro


def _stages(c: PublishedRun, pp: int, layers: int) -> Json:
    """The schedule, and the virtual stages of an interleaved one."""
    r = c.row
    schedule = SCHEDULES.get(r["schedule"], "1f1b")
    if pp > 1 and (not r["schedule"] or r["schedule"] not in SCHEDULES):
        c.assumed.append(_assumption("schedule", schedule, r["schedule"]))
    if pp == 1 or schedule != "interleaved":
        return {
            "schedule": "1f1b" if pp == 1 else schedule,
            "virtual": 1,
            **_stage_layers(r["stages"] if pp > 1 else ""),
        }
    virtual = max(1, integer(r["vpp"], 1))
    if virtual == 1:
        virtual = max(2, next((v for v in (2, 3, 4, 5) if layers % (pp * v) == 0), 2))
        c.assumed.append(f"virtual stages: {virtual}")
    if pp * virtual > layers:  # embedding and head are stages too
        if layers // pp < SIMILAR * virtual:
            raise refusal(f"{pp} × {virtual} virtual stages for {layers} layers: a plan has no stage without layers")
        virtual = max(1, layers // pp)
        c.assumed.append(f"virtual stages: {virtual}, each with a layer")
    return {"schedule": "interleaved" if virtual > 1 else "1f1b", "virtual": virtual, **_stage_layers(r["stages"])}


def _stage_layers(text: str) -> Json:
    """The layers of each stage, as in `4*15 1`: fifteen stages of four layers and one of one."""
    counts = [(part.partition("*")[0], part.partition("*")[2] or "1") for part in text.split()]
    layers = tuple(int(size) for size, times in counts for _ in range(int(times)))
    return {"layers_per_stage": layers} if layers else {}


def _sequence_parallel(c: PublishedRun, tp: int) -> dict[str, bool]:
    if c.row["sp"]:
        return {"sp": integer(c.row["sp"]) > 0 and tp > 1}
    c.assumed.append(f"sequence parallel: {'on' if tp > 1 else 'off'}")
    return {"sp": tp > 1}


def _sharding(c: PublishedRun, d: RowDegrees, several: bool) -> Json:
    """ZeRO, and the dtypes and buckets of gradients, which follow from the stack. FSDP adds up those of several micro-batches in the dtype of their
    reduction."""
    r, stack = c.row, c.stack
    zero = integer(r["zero"]) if r["zero"] else stack.usual_zero
    if not r["zero"]:
        c.assumed.append(f"ZeRO: {zero}, usual in {_framework(stack)}")
    precision = PRECISIONS.get(r["dtype"], "bf16")
    sharded = zero > 0 and d.dp * d.cp > 1
    replicas = _replicas(c, d) if zero == 3 else 1
    pure = stack.name == "composer-fsdp" and "pure" in r["zero_fsdp"].lower()
    fields: Json = {
        "replicate": replicas if sharded else d.dp,
        "shard": d.dp // replicas if sharded else 1,
        "zero": zero if sharded else 0,
        "grad_dtype": stack.accumulation_dtype(precision),
        "comm_dtype": stack.reduced_dtype(precision),
        "bucket": _bucket(c, d),
        "reduce": "step" if zero == 2 and d.pp > 1 else "auto",
        "master": not pure,
    }
    if pure:
        fields |= {"grad_dtype": "bf16", "comm_dtype": "bf16"}
    if stack.half_states:
        added = d.pp > 1 or (several and stack.defers_reduction)
        fields |= {"master": False, "state_dtype": "bf16", "grad_dtype": "fp32" if added else "bf16"}
    on = tuple(axis for axis in stack.overlap if axis not in stack.asks_overlap or _says_overlap(c, axis))
    if on != stack.overlap:
        fields["overlap"] = on
    if zero == 3:  # ZeRO-3 prefetches its all-gathers even if the stack has no other overlap
        ring = (*stack.can.cp_kinds, "ring")[0] == "ring"
        beside = ("cp",) if d.cp > 1 and stack.overlaps("cp", True, 3, ring) else ()
        fields["overlap"] = tuple(dict.fromkeys(("dp", *on, *beside)))
        if stack.defers_reduction and several and d.pp == 1:
            fields["reduce"] = "step"
        if stack.keeps_expert_weights and integer(c.row["ep"]) > 1:
            fields["reshard"] = False
    return fields


def _framework(stack: Stack) -> str:
    return stack.can.framework or stack.name


def _says_overlap(c: PublishedRun, axis: str) -> bool:
    """Whether the text of a row says that the messages of an axis overlap: "AsyncTP", "async-TP", "asynchronous tensor parallel"."""
    names = {"tp": "tp|tensor"}.get(axis, axis)
    text = " ".join(c.row[name] for name in ("overlap", "source", "table", "notes")).lower()
    return re.search(rf"async(hronous)?[ _-]?({names})", text) is not None or axis in c.row["overlap"].split()


def _replicas(c: PublishedRun, d: RowDegrees) -> int:
    """Copies of the weights under hybrid sharding: of the published number of ranks that share one ("data=-1, fsdp=8"), or one in each node, which
    is FSDP's default for it."""
    if "hsdp" in c.stack.can.without:
        return 1
    text = c.row["zero_fsdp"].lower()
    stated, inside = re.search(r"\bfsdp ?= ?(\d+)", text), max(c.cluster.node_size // (d.tp * d.cp), 1)
    if not stated and not text and c.stack.usual_sharding == "node" and inside < d.dp:
        c.assumed.append(f"sharding: over {inside} ranks of a node, usual in {_framework(c.stack)}")
    elif not stated and not re.search(r"hsdp|hybrid", text):
        return 1
    ranks = int(stated[1]) if stated else inside
    return d.dp // ranks if ranks and d.dp % ranks == 0 else 1


def _experts(c: PublishedRun, d: RowDegrees) -> dict[str, int]:
    """Expert parallelism; tensor parallelism inside experts only where the ranks divide."""
    ep, etp = max(1, integer(c.row["ep"], 1)), integer(c.row["etp"])
    etp = etp or (1 if ep > 1 else 0)
    if d.tp * d.cp * d.dp % (ep * max(1, etp or d.tp)):
        etp = 1
    return {"ep": ep, "expert_tp": etp}


def _bucket(c: PublishedRun, d: RowDegrees) -> float:
    """The bucket size: Megatron reduces in large buckets (at least 40M elements), DeepSpeed in buckets of 500M elements in 16 bits. DDP adds whole
    tensors, the last one first, until a bucket has 25 MiB of 16-bit parameters; its gradients may be wider than its parameters. The mean of these
    buckets, on a stage with an end of the model."""
    if c.stack.name == "megatron-deepspeed":
        return 1e9
    if c.stack.name.startswith(("megatron", "nemo")):
        return 160e6
    if integer(c.row["zero"]) == 3:  # units, no buckets
        return DDP_BUCKET
    block = c.model.blocks[c.model.layer_kinds[0]]
    tensors = [sum(linear.parameters for linear in fused) / d.tp for fused in reversed(block.fused_matrices())]
    closed, filled, total = 0, 0.0, 0.0
    ends = [c.model.vocab * c.model.hidden / d.tp] * (1 if c.model.tied or d.pp > 1 else 2)
    for elements in ends[:1] + tensors * (c.model.layers // d.pp) + ends[1:]:
        filled, total = filled + elements, total + elements
        if 2 * filled >= DDP_BUCKET:
            closed, filled = closed + 1, 0.0
    return WIDTHS.get(c.stack.gradient_dtype, 2.0) * total / max(closed + (filled > 0), 1)
