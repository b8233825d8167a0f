"""Figures of the third part: tensor, sequence, pipeline, context and expert parallelism."""

import numpy as np

from meshwright import formulas
from meshwright.cost.overlap import prefetch_timeline
from meshwright.describe.shape_parts import RouterOptions
from meshwright.programs.pipelines import SCHEDULES
from meshwright.programs.pipelines.walk import held_changes
from meshwright.units import Json, format_decimal_bytes, format_seconds
from meshwright.view.page.course import drawing as draw
from meshwright.view.page.course.copies import ACHIEVED
from meshwright.view.page.course.drawing import Control, Figure, Values, registered, sentence, stat
from meshwright.view.page.subject import Subject
from meshwright.view.show import matrices as products
from meshwright.view.show.overlap import pair
from meshwright.view.show.pipelines import walked_for

FIGURES: dict[str, Figure] = {}
figure = registered(FIGURES)

POWERS = tuple(2**k for k in range(7))
HIDDEN = (1024, 2048, 4096, 8192, 12288, 16384)
DRAWN = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv")
NODE, HEAD = 8, 128  # GPUs of a node; width of an attention head


@figure("matrices", Control("split", "Split", "column-parallel", ("column-parallel", "row-parallel"), kind="choice"))
def matrices(subject: Subject, v: Values) -> Json:
    """One product on two GPUs, with all values."""
    found, words = products.data(v["split"]), products.PAGES[v["split"]]
    cards = []
    for gpu in range(products.GPUS):
        rows = []
        for name, key in words["cards"]:
            value = found[key][gpu] if isinstance(found[key][0][0], list) else found[key]
            wide = len(found["W"][gpu]) if words["wide"] == 2 else len(found["W"][gpu][0])
            rows.append({"name": name.format(g=gpu, first=gpu * wide, last=(gpu + 1) * wide - 1), "rows": value})
        cards.append({"title": f"GPU {gpu}", "matrices": rows})
    result = {"title": words["Y"][0], "matrices": [{"name": "Y, the same as X·W on one GPU", "rows": found["whole Y"]}]}
    return {
        "draw": "matrices",
        "data": {"cards": [*cards, result]},
        "note": " ".join(sentence(": ".join(words[phase].split(maxsplit=1))) for phase in ("forward", "backward")),
    }


@figure(
    "tensor-parallel",
    Control("hidden", "Hidden size", 8192, HIDDEN, "whole"),
    Control("tokens", "Tokens of a micro-batch", 4096, tuple(2**k for k in range(8, 18)), "whole"),
    Control("network", "Network of a GPU", 50e9, (3e9, 12.5e9, 25e9, 50e9, 100e9), "rate"),
)
def tensor_parallel(subject: Subject, v: Values) -> Json:
    """Compute and communication of one layer by the degree of tensor parallelism, inside a node of 8 and beyond."""
    tokens, hidden = v["tokens"], v["hidden"]
    work = 6 * 12 * hidden**2 * tokens / ACHIEVED

    def sums(t: int) -> float:
        nodes = {"nodes": t // NODE, "latency_between": "5us", "bandwidth_between": v["network"]} if t > NODE else {}
        return 4 * formulas.collective_time(
            "all-reduce", 2 * tokens * hidden, t, "1.5us", "378GB/s", "two-level" if nodes else "ring", **nodes
        )

    degrees = POWERS[1:]
    points = {t: (work / t, sums(t)) for t in degrees}
    series = [
        draw.curve("compute of a layer", {t: c for t, (c, _) in points.items()}),
        draw.curve("its four all-reduces", {t: s for t, (_, s) in points.items()}, dash="7 4"),
        draw.curve("both: nothing hides", {1: work} | {t: sum(both) for t, both in points.items()}, width=3),
    ]
    best, sent = min(degrees, key=lambda t: sum(points[t])), formulas.tensor_parallel_traffic(1, tokens, hidden, 8)
    stats = [
        stat("Sent by a GPU, tp 8", format_decimal_bytes(sent), "per layer and step"),
        stat("Share at tp 8", f"{points[8][1] / sum(points[8]):.0%}", "of the layer is communication"),
        stat("Share at tp 16", f"{points[16][1] / sum(points[16]):.0%}", "over two nodes"),
        stat("Fastest", f"tp {best}", f"{work / sum(points[best]):.1f} times one GPU"),
    ]
    x, y = draw.axis("degree of tensor parallelism", "whole", 2), draw.axis("seconds", "s", 10)
    note = "NVLink at 378 GB/s inside a node of 8, 400 TFLOP/s per GPU."
    return draw.lines(series, x, y, [draw.mark(NODE, "a node ends", low=True)], stats=stats, note=note)


@figure(
    "sequence-parallel",
    Control("tp", "Tensor-parallel GPUs", 8, POWERS[:5], "whole"),
    Control("hidden", "Hidden size", 8192, HIDDEN, "whole"),
    Control("seq", "Tokens of a sequence", 4096, tuple(2**k for k in range(10, 17)), "whole"),
)
def sequence_parallel(subject: Subject, v: Values) -> Json:
    """Bytes that one layer saves for backward on one GPU."""
    shape = {"seq": v["seq"], "batch": 1, "hidden": v["hidden"], "heads": v["hidden"] // HEAD, "recompute": "selective"}
    whole = formulas.activation_memory(**shape)
    cut = formulas.activation_memory(**shape, tp=v["tp"])
    both = formulas.activation_memory(**shape, tp=v["tp"], sequence_parallel=True)
    kept = 10 * v["seq"] * v["hidden"]  # norms, dropout masks and residuals

    def row(name: str, total: float, copied: float) -> Json:
        divided = total - copied
        small = draw.part("norms, dropout, residuals", copied, "tp", f"10·s·h = {format_decimal_bytes(copied)}")
        large = draw.part("products", divided, "activations", f"24·s·h: {format_decimal_bytes(divided)}")
        return draw.bar(name, format_decimal_bytes(total), small, large)

    rows = [
        row("one GPU", whole, kept),
        row(f"tp {v['tp']}", cut, kept),
        row(f"tp {v['tp']} with sp", both, kept / v["tp"]),
    ]
    stats = [
        stat("Without sp", f"÷ {whole / cut:.2g}", "norms stay whole"),
        stat("With sp", f"÷ {whole / both:.2g}", "everything is divided"),
    ]
    note = "16 bits, attention scores recomputed: s·b·h·34 bytes on one GPU."
    return draw.bars(rows, draw.axis("bytes saved by one layer on one GPU", "bytes"), stats=stats, note=note)


@figure(
    "pipeline",
    Control("schedule", "Schedule", "1f1b", DRAWN, kind="choice"),
    Control("stages", "Ranks", 4, (2, 3, 4, 6, 8), "whole"),
    Control("microbatches", "Micro-batches", 8, (2, 4, 6, 8, 12, 16), "whole"),
)
def pipeline(subject: Subject, v: Values) -> Json:
    """A schedule that plays, with the micro-batches in flight on every rank."""
    walked = walked_for(
        v["schedule"], v["stages"], max(v["microbatches"], v["stages"] if SCHEDULES[v["schedule"]].virtual > 1 else 1)
    )
    p = walked.program
    columns = (p.rank, p.kind, p.microbatch, walked.start, walked.end, p.chunk_of[p.stage])
    actions = [
        [int(r), "FBIW"[k], int(b), float(s), float(e), int(c) / p.virtual]
        for r, k, b, s, e, c in zip(*columns, strict=True)
    ]
    held = [
        [[float(t), float(n) / p.virtual] for t, n in zip(*held_changes(walked, rank), strict=True)]
        for rank in range(p.ranks)
    ]
    drawn = f" Drawn with {p.microbatches} micro-batches, its least." if p.microbatches != v["microbatches"] else ""
    data = {
        "ranks": p.ranks,
        "makespan_s": walked.makespan,
        "actions": actions,
        "held": held,
        "peak": walked.peak_memory.tolist(),
    }
    return {
        "draw": "pipeline",
        "data": data,
        "stats": [
            stat("Bubble", f"{walked.bubble_fraction:.1%}", "idle share of the schedule"),
            stat("In flight, most", f"{walked.peak_memory.max():g}", "micro-batches on one rank"),
            stat("Length", f"{walked.makespan:g}", f"units; {3 * p.microbatches} without a bubble"),
        ],
        "note": sentence(SCHEDULES[v["schedule"]].about) + drawn,
    }  # fmt: skip


@figure("bubble", Control("stages", "Ranks", 8, (2, 4, 8, 16, 32), "whole"))
def bubble(subject: Subject, v: Values) -> Json:
    """The bubble by the number of micro-batches."""
    p = v["stages"]
    counts = [p * k for k in (1, 2, 3, 4, 6, 8, 12, 16)]
    named = (("1f1b", "GPipe and 1F1B", 0), ("interleaved", "interleaved, V = 2", 2), ("interleaved", "interleaved, V = 4", 4),
             ("zb-h1", "ZB-H1", 0))  # fmt: skip
    series = []
    for name, words, virtual in named:
        points = ((m, formulas.bubble_fraction(name, p, m, virtual), f"{words}, {m} micro-batches") for m in counts)
        series.append(draw.curve(words, points, dots=True))
    stats = [
        stat("At M = 4P", f"{formulas.bubble_fraction('1f1b', p, 4 * p):.1%}", "GPipe and 1F1B"),
        stat("For 10%", f"{formulas.microbatches_for_efficiency('1f1b', p, 0.9)}", "micro-batches of 1F1B"),
    ]
    x, y = draw.axis("micro-batches", "whole", 2), draw.axis("bubble, share of the step", "share", low=0)
    return draw.lines(series, x, y, stats=stats)


@figure(
    "ring-attention",
    Control("seq", "Tokens of the sequence", 131072, tuple(2**k for k in range(13, 21)), "whole"),
    Control("ranks", "Context-parallel GPUs", 8, (2, 4, 8, 16), "whole"),
    Control("kv", "KV heads, of 32", 8, (1, 2, 4, 8, 16, 32), "whole"),
    Control("bandwidth", "Link of a GPU", 50e9, (3e9, 12.5e9, 25e9, 50e9, 100e9, 378e9), "rate"),
)
def ring_attention(subject: Subject, v: Values) -> Json:
    """Blocks of attention with K and V of the next block sent before, and sent meanwhile."""
    compute, send = formulas.ring_attention_step(v["seq"], v["ranks"], 32, HEAD, v["kv"], ACHIEVED, v["bandwidth"])
    names = [f"block {k}" for k in range(v["ranks"])]

    def timeline(ahead: bool) -> list[object]:
        spans = prefetch_timeline(
            names, compute, send, ahead
        )  # the first block is the rank's own: nothing is sent for it
        return [s._replace(start=s.start - send) for s in spans if s.stream == "compute" or s.name != "block 0"]

    one = f"attention of a block takes {format_seconds(compute)}, sending K and V {format_seconds(send)}"
    found = pair([timeline(False), timeline(True)], ("receive, then compute", "double buffering"), one)  # type: ignore[list-item]
    size = formulas.ring_attention_buffer(v["seq"], v["ranks"], v["kv"] * HEAD)
    stats = [
        stat("Attention of a block", format_seconds(compute), f"{v['seq'] // v['ranks']:,} tokens"),
        stat("Sending K and V", format_seconds(send), "hidden" if send <= compute else "not hidden"),
        stat("Double buffers", format_decimal_bytes(size), "2 × K and V of a block"),
        stat("Saved", f"{found['saved']:.0%}", "by double buffering"),
    ]
    note = "Forward of one layer of 32 heads of 128, at 400 TFLOP/s, with balanced work."
    drawn = ("attention of a block", "K and V of the next block")
    return draw.spans(found, "forward", "cp", *drawn, stats=stats, note=note)


@figure(
    "zigzag",
    Control("ranks", "Context-parallel GPUs", 4, (2, 4, 8), "whole"),
    Control("cut", "Cut", "plain", ("plain", "zigzag"), kind="choice"),
)
def zigzag(subject: Subject, v: Values) -> Json:
    """The pairs of query and key that each rank computes under a causal mask."""
    c = v["ranks"]
    blocks = np.arange(2 * c)
    owner = blocks // 2 if v["cut"] == "plain" else np.minimum(blocks, 2 * c - 1 - blocks)
    work = (blocks + 0.5) / (2 * c**2)  # of a block of queries: all keys before it, and half of its own
    shares = [float(work[owner == r].sum()) for r in range(c)]
    rows = []
    for r, s in enumerate(shares):
        own = list(map(str, blocks[owner == r]))
        whole = draw.part("work", s, "cp", f"blocks {', '.join(own)} of {2 * c}: {s:.1%}")
        rows.append(draw.bar(f"rank {r}", f"{s:.1%} · blocks {' and '.join(own)}", whole))
    stats = [stat("Slowest rank", f"{max(shares) * c:.2f} ×", "the mean: all wait for it")]
    return draw.bars(rows, draw.axis("share of all query-key pairs", "share", high=2 / c), stats=stats)


@figure(
    "experts",
    Control("experts", "Experts", 8, (4, 8, 16, 32), "whole"),
    Control("top", "Experts per token", 2, (1, 2, 4), "whole"),
    Control("skew", "Skew of the router", 0.3, (0.0, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2), "number"),
    Control("capacity", "Capacity factor (0: none)", 0.0, (0.0, 1.0, 1.25, 1.5, 2.0), "number"),
)
def experts(subject: Subject, v: Values) -> Json:
    """Token copies that arrive at each expert, one to a GPU, when experts are not equally popular."""
    e, k = v["experts"], v["top"]
    tokens, hidden = 4096, 4096
    load = popularity(e, k, v["skew"]) * tokens * k
    mean = tokens * k / e
    kept = np.minimum(load, v["capacity"] * mean) if v["capacity"] else load
    rows = []
    for i in range(min(e, 16)):
        computed = draw.part("computed", float(kept[i]), "ep", f"{kept[i]:,.0f} token copies")
        dropped = draw.part("dropped", float(load[i] - kept[i]), "bad", "above the capacity", pattern="hatch")
        rows.append(draw.bar(f"expert {i}", f"{kept[i]:,.0f}", computed, dropped))
    sent = formulas.bytes_sent("all-to-all", tokens * k * hidden * 2, e)
    router = RouterOptions(capacity=v["capacity"])
    busiest = float(router.busiest(1.0, load.tolist(), e)[0])
    stats = [
        stat("Busiest expert", f"{busiest:.2f} ×", "the mean: the layer waits for it"),
        stat("Dropped", f"{router.dropped(load.tolist()):.1%}", "of the token copies"),
        stat("One all-to-all", format_decimal_bytes(sent), "sent by a GPU; four in a layer and step"),
    ]
    note = f"{tokens:,} tokens of width {hidden:,} from every GPU. Expert i is chosen in proportion to (i+1)^−skew."
    limit = mean, f"even: {mean:,.0f}"
    return draw.bars(rows, draw.axis("token copies in one layer", "whole"), limit, stats=stats, note=note)


def popularity(experts: int, top: int, skew: float) -> np.ndarray:
    """The share of token copies of each expert, if tokens choose `top` different experts in proportion to (i+1)^−skew: at most 1/top each."""
    share = np.arange(1, experts + 1) ** -skew
    share /= share.sum()
    for _ in range(experts):  # an expert that every token chooses takes no more, the others share the rest
        full = share >= 1 / top
        rest = share[~full].sum()
        if not full.any() or not rest:
            break
        share = np.where(full, 1 / top, share * (1 - full.sum() / top) / rest)
    return share
