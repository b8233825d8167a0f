"""The model and the plan of a trace, from its shapes and groups alone: what a prediction can be made of where nobody gives settings.

    heads, head width, sequence, micro-batch    dims of the attention operator, "[[batch, heads, sequence, width], …]"
    layers                                      attention calls in forward, per micro-batch
    hidden, FFN, vocabulary                     sizes of the products of forward: the vocabulary's occurs once per micro-batch; of those that
                                                occur in each layer the widest is the FFN's (twice per layer: gated)
    data parallelism                            group size of its collectives; gradients all-reduced: replicated; reduce-scattered: sharded,
                                                ZeRO-3 if parameters are gathered for each layer too
    tensor, pipeline, context, expert           group sizes of the axes that descriptions of groups name

It fits transformers with dense layers. What is assumed beside it is said in words.
"""

from collections import Counter

import numpy as np

from meshwright.describe.catalog import accelerator_of, names, tables
from meshwright.describe.config import Config, configure
from meshwright.errors import MeshwrightError
from meshwright.explain.collectives import groups_by_axis, shapes_in
from meshwright.explain.products import product_shape
from meshwright.explain.ranks import RankInGroup, TracedRun
from meshwright.units import Json

SEQUENCE_FIRST = ("flash_attn::", "aten::_flash_attention_forward")  # their dims are (batch, sequence, heads, width)


def config_of_trace(run: TracedRun, cluster: str = "") -> Config:
    """The configuration that the traces of a run show; raises where they lack shapes."""
    rank = run.ranks[0]
    if not len(rank.found.backward):
        raise not_recognised("it has no backward pass")
    degrees = axis_degrees(run)
    tp = degrees.get("tp", 1)
    model, microbatch, seq = model_of(rank, tp)
    dp = max(1, run.world // (tp * degrees.get("pp", 1) * degrees.get("cp", 1)))
    layout = data_parallel_of(rank, dp, model["layers"])
    rounds = rank.found.microbatches
    return configure(
        model,
        cluster or cluster_of(run),
        gpus=run.world,
        stack=stack_of(rank),
        workload={"batch": microbatch * rounds * dp, "seq": seq, "precision": precision_of(rank)},
        plan={
            "microbatch": microbatch,
            **{axis: n for axis, n in degrees.items() if axis in ("tp", "pp", "cp")},
            **layout,
        },
    )


def not_recognised(what: str) -> MeshwrightError:
    return MeshwrightError(
        "MW-EXPL-004",
        f"the plan cannot be recognised from the trace: {what}",
        why="Sizes are read from operators of a transformer in a profile with record_shapes=True",
        fix="--plan FILE, a plan file or the settings of a framework",
    )


def model_of(rank: RankInGroup, tp: int) -> tuple[Json, int, int]:
    """The shape of the model, the micro-batch and the sequence length."""
    found, e = rank.found, rank.found.events
    shapes = [(e.names[e.name[i]], shapes_in(e.details[e.detail[i]].dims)) for i in found.attention.tolist()]
    shapes = [(name, s) for name, s in shapes if len(s) >= 2 and len(s[0]) == len(s[1]) == 4]
    if not shapes:
        raise not_recognised("it has no attention operator with shapes")
    name, ((microbatch, heads, seq, width), (_, kv_heads, kv_seq, _)) = shapes[0][0], shapes[0][1][:2]
    if name.startswith(SEQUENCE_FIRST):
        heads, seq, kv_heads = seq, heads, kv_seq
    passes = max(1, rank.found.microbatches * len(found.host_steps))
    layers = max(1, len(found.forward_attention) // passes)
    hidden, ffn, gated, vocab = widths_of(rank, microbatch * seq, layers, passes)
    model = {"hidden": hidden, "layers": layers, "heads": heads * tp, "kv_heads": kv_heads * tp, "head_dim": width, "ffn": ffn * tp,
             "vocab": vocab * tp, "max_positions": seq, "activation": "swiglu" if gated else "gelu"}  # fmt: skip
    return model, microbatch, seq


def within_steps(rank: RankInGroup) -> np.ndarray:
    """Which events started in a traced step of the host."""
    e, steps = rank.found.events, rank.found.host_steps
    return (e.start >= steps[0].start) & (e.start < steps[-1].end)


def widths_of(rank: RankInGroup, tokens: int, layers: int, passes: int) -> tuple[int, int, bool, int]:
    """Hidden size, FFN size, whether the FFN is gated, and vocabulary, from the products of forward with one row per token."""
    found, e = rank.found, rank.found.events
    products = np.flatnonzero(found.names_with("aten::mm", "aten::addmm") & within_steps(rank))
    forward = products[found.phase_of(e.start[products]) == "forward"]
    counts = Counter[tuple[int, int]]()
    for i in forward.tolist():
        shape = product_shape(e.names[e.name[i]], e.details[e.detail[i]])
        if shape and shape[1] == tokens:
            counts[shape[3], shape[2]] += 1  # inputs, outputs
    in_layers = {key: n // (layers * passes) for key, n in counts.items() if n >= layers * passes}
    at_end = [key for key, n in counts.items() if key not in in_layers and n >= passes]
    if not in_layers:
        raise not_recognised(f"no product with {tokens} rows occurs in each of {layers} layers")
    hidden = Counter(size for (a, b), n in in_layers.items() for size in {a, b} for _ in range(n)).most_common(1)[0][0]
    up = max((key for key in in_layers if key[0] == hidden), key=lambda key: key[1], default=None)
    if up is None:
        raise not_recognised(f"no product of a layer has inputs of its hidden size, {hidden}")
    down = [a for a, b in in_layers if b == hidden and a != hidden and up[1] in (a, 2 * a)]
    ffn = max(down, default=up[1])
    gated = up[1] == 2 * ffn or in_layers[up] > 1
    return hidden, ffn, gated, max((b for _, b in at_end), default=hidden)


def axis_degrees(run: TracedRun) -> dict[str, int]:
    """Group sizes by axis, of the groups whose collectives were traced."""
    out: dict[str, int] = {}
    for rank in run.ranks:
        for axis, ranks in groups_by_axis(rank.found, rank.collectives).items():
            out[axis] = max(out.get(axis, 1), len(ranks))
    return {axis: size for axis, size in out.items() if size > 1}


def data_parallel_of(rank: RankInGroup, dp: int, layers: int) -> Json:
    """How gradients and parameters are kept over the data-parallel ranks."""
    kinds = Counter(rank.collectives.kind)
    if dp == 1 or not kinds["reduce_scatter"]:
        return {"replicate": dp}
    gathered = kinds["all_gather"] / max(1, len(rank.steps) * rank.found.microbatches)
    return {"shard": dp, "zero": 3 if gathered >= layers else 2}


def precision_of(rank: RankInGroup) -> str:
    """The dtype of most products."""
    e = rank.found.events
    dtypes = Counter[str]()
    for i in np.flatnonzero(rank.found.names_with("aten::mm", "aten::addmm")).tolist():
        if shape := product_shape(e.names[e.name[i]], e.details[e.detail[i]]):
            dtypes[shape[4]] += 1
    common = dtypes.most_common(1)[0][0] if dtypes else "bf16"
    return common if common in ("bf16", "fp16", "fp32", "fp8") else "bf16"


def stack_of(rank: RankInGroup) -> str:
    """Compiled, eager, or processes on a CPU."""
    if not rank.found.trace.on_device:
        return "gloo-cpu"
    return "torch-compile" if any(name.startswith("triton_") for name in rank.found.events.names) else "torch-eager"


def cluster_of(run: TracedRun) -> str:
    """The first cluster of the catalog with the devices that the trace names."""
    devices = [str(d.get("name", "")) for r in run.ranks for d in r.found.trace.devices]
    card = accelerator_of(devices[0]) if devices else "cpu"
    for name in names("clusters"):
        if card is not None and tables("clusters")[name].get("accelerator") == card:
            return name
    raise not_recognised(
        f"no cluster of the catalog has devices named {devices[0] if devices else 'cpu'}: --cluster NAME names one"
    )
