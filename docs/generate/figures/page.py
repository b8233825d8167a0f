"""All tables as one page."""

from __future__ import annotations

from functools import cache

from figures import (
    at_scale,
    basics,
    guide_collectives,
    guide_data,
    guide_links,
    guide_parallel,
    guide_runs,
    guide_scale,
    lecture,
    modeler,
)
from figures.figure import Figure, number

TEXTS = {
    "000": ("a guide to distributed training",
            (guide_scale, guide_collectives, guide_links, guide_data, guide_parallel, guide_runs)),
    "001": ("basics of distributed training", (basics,)),
    "002": ("distributed training at scale", (at_scale,)),
    "003": ("a lecture on parallelism", (lecture,)),
    "004": ("a bandwidth and efficiency modeler", (modeler,)),
}  # fmt: skip

INTRODUCTION = """# The figures of the seeds, recomputed

Meshwright grew from five texts. Every figure in them that can be checked is recomputed here by Meshwright's own functions: sizes and
states by `describe` and `cost.memory`, volumes by lowering a plan, collective and pipeline times by walking their programs. A figure
**holds** when ours lies within the rounding it is printed with; otherwise it is **wrong** and ours is right. Formulas are evaluated at the case
told beside them. This page is written by `make pages`; a test holds it to the code.
"""

CODE = """## Wrong, though no figure

- 000, 3.3: the code of the ring passes `all_to_all` a source and a destination it does not take; a ring sends and receives point to point.
- 000, 9.7: the row-parallel layer adds its bias on rank 0 only, *after* the all-reduce, so the ranks' outputs differ. Add it on all.
- 000, 10.7: `if stage.prev_rank` is false for rank 0, so stage 1 never receives: `is not None`.
- 000, 10.7: the backward sends `output_tensor.grad`; the stage before needs the gradient of the *input*.
- 000, 3.6: "one representative per node" leaves the other cards idle; reduce-scatter inside, all-reduce along each rail, all-gather inside use all.
- 001: "tree within a node, ring between nodes" is the reverse of NCCL, which builds trees between nodes over chains or rings inside.
- 002: DeepSeek-V3 uses E4M3 for all tensors, with scales per tile and block, not E5M2 for gradients with scales per tensor (its report, section 3.3).
- 003: NVSwitch joins the GPUs of a node (or of an NVLink domain); nodes are joined by InfiniBand or Ethernet.
- 003: `all_gather_into_tensor` takes (output, input), and `torch.empty(batch, local_dim)` is a shard, not the list of all of them.
- 004: the bubble is called (M−1)/M; M is the number of micro-batches, the idle time comes from the P−1 other stages.

## Not checkable from the texts

Latencies quoted without a library or size (000: NVLink 1–5 µs, InfiniBand 1–2 µs, Ethernet 50–100 µs, a collective's launch 10–50 µs; 003: home
Ethernet 200 MB/s); gains of overlap (000: 20–40%; 001: 50–90% hidden); extra iterations of compression (000: 5–10%); efficiencies and waits of
unnamed runs (001: 80–95%, below 20%, waiting 80%); the critical batch of an unnamed configuration (000, 6.5: 1K); the V100s, stages and micro-batches
of GPT-3 (000, 12.1) and the H800s of DeepSeek-V2 (12.4), which their makers did not publish; FLOPS lost to 3:1 oversubscription (004: 50%).
"""


@cache
def figures() -> tuple[Figure, ...]:
    """Every figure, text by text."""
    return tuple(figure for _, modules in TEXTS.values() for module in modules for figure in module.table())


def markdown() -> str:
    """The page `docs/figures.md`."""
    every = figures()
    wrong = sum(f.verdict == "wrong" for f in every)
    parts = [INTRODUCTION, f"**{len(every)} figures: {len(every) - wrong} hold, {wrong} are wrong.**\n"]
    for seed, (title, _) in TEXTS.items():
        mine = [f for f in every if f.seed == seed]
        bad = sum(f.verdict == "wrong" for f in mine)
        parts.append(f"## {seed}: {title}\n\n{len(mine)} figures, {bad} wrong.\n")
        lines = [
            "| place | claim | claimed | ours | | verdict | remark |",
            "| --- | --- | ---: | ---: | --- | --- | --- |",
        ]
        lines += [line(f) for f in mine]
        parts.append("\n".join(lines) + "\n")
    return "\n".join([*parts, CODE])


def line(f: Figure) -> str:
    """One row: the verdict in bold where it is wrong."""
    claimed = f.claimed if isinstance(f.claimed, str) else number(f.claimed)
    verdict = "holds" if f.verdict == "holds" else "**wrong**"
    cells = [f.place, f.claim, claimed, number(f.ours), f.unit, verdict, f.remark]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
