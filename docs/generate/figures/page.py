"""All tables as one page."""

from collections import Counter
from collections.abc import Sequence
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

# Title of each text, or its subject where it prints none.
TEXTS = {
    "guide": (
        "A first-principles guide to distributed training",
        (guide_scale, guide_collectives, guide_links, guide_data, guide_parallel, guide_runs),
    ),
    "basics": ("Distributed Training Basics", (basics,)),
    "at-scale": ("Distributed Training at Scale", (at_scale,)),
    "lecture": ("Lecture 08: Parallelism 2", (lecture,)),
    "modeler": ("Parallelism Bandwidth & Efficiency Modeler", (modeler,)),
}

VERDICTS = {
    "holds": "holds",
    "bound": "holds as a bound",
    "convention": "holds by another convention",
    "wrong": "**wrong**",
}

INTRODUCTION = """# The figures of five texts on distributed training, recomputed

Meshwright began with five texts on distributed training. Meshwright's own functions recompute every figure in them that can be checked:
`describe` and `cost.memory` give sizes and model states, a lowered plan gives communication volumes, and walking the programs of collectives and
pipelines gives times. The verdicts:

- **holds**: our value lies within the rounding of the printed figure.
- **holds as a bound**: the text prints a bound ("over 1.2 TB", "500+ GB") and our value satisfies it. The bound may be far from the value.
- **holds by another convention**: our value differs; the remark starts with the value by the convention that makes the printed figure right, and
  names the convention. The text states it, or the data sheet or paper that it quotes uses it, or the text cuts digits off instead of rounding.
- **wrong**: none of these; our value is right, and the remark gives the reason.

A formula is evaluated at the case named in its row. `make pages` writes this page, and a test compares it with the code.
"""

CODE = """## Errors that are not figures

- Guide, 3.3: the code of the ring passes `all_to_all` a source and a destination, which it does not accept; a ring sends and receives point to point.
- Guide, 3.6: "one representative per node" leaves the other network cards idle. A reduce-scatter inside the node, an all-reduce along each rail and an
  all-gather inside the node use all of them.
- Guide, 9.7: the row-parallel layer adds its bias on rank 0 only, *after* the all-reduce, so the outputs of the ranks differ. Every rank must add it.
- Guide, 10.7: `if stage.prev_rank` is false for rank 0, so stage 1 never receives. Write `is not None`.
- Guide, 10.7: the backward pass sends `output_tensor.grad`; the previous stage needs the gradient of the *input*.
- Basics: "tree within a node, ring between nodes" is the reverse of NCCL, which builds trees between nodes over chains or rings inside them.
- At Scale: DeepSeek-V3 uses E4M3 for all tensors, with scales per tile and block, not E5M2 for gradients with scales per tensor (its report, section 3.3).
- Lecture: NVSwitch connects the GPUs of a node (or of an NVLink domain); InfiniBand or Ethernet connects nodes.
- Lecture: `all_gather_into_tensor` takes (output, input), and `torch.empty(batch, local_dim)` has the size of one shard, not of all shards.
- Modeler: it derives the bubble as (M−1)/M. M is the number of micro-batches; the idle time comes from the P−1 other stages.

## Figures that the texts give no means to check

- Latencies quoted without a library or a message size. Guide: NVLink 1–5 µs, InfiniBand 1–2 µs, Ethernet 50–100 µs, the launch of a collective
  10–50 µs. Lecture: home Ethernet 200 MB/s.
- Gains of overlap (Guide: 20–40%; Basics: 50–90% hidden) and extra iterations from compression (Guide: 5–10%).
- Efficiencies and waiting times of unnamed runs (Basics: 80–95%, below 20%, waiting 80%) and the critical batch of an unnamed configuration
  (Guide, 6.5: 1K).
- The V100s, stages and micro-batches of GPT-3 (Guide, 12.1) and the H800s of DeepSeek-V2 (Guide, 12.4), which their authors did not publish.
- FLOPS lost to 3:1 oversubscription (Modeler: 50%).
"""


@cache
def figures() -> tuple[Figure, ...]:
    """All figures, text by text."""
    return tuple(figure for _, modules in TEXTS.values() for module in modules for figure in module.table())


def counts(listed: Sequence[Figure]) -> str:
    """The number of figures with each verdict, as one sentence."""
    of = Counter(figure.verdict for figure in listed)
    return (
        f"{len(listed)} figures: {of['holds']} hold, {of['bound']} hold as a bound, "
        f"{of['convention']} hold by another convention, {of['wrong']} are wrong."
    )


def markdown() -> str:
    """The page `docs/figures.md`."""
    parts = [INTRODUCTION, f"**{counts(figures())}**\n"]
    for text, (title, _) in TEXTS.items():
        listed = [figure for figure in figures() if figure.text == text]
        parts.append(f"## {title}\n\n{counts(listed)}\n")
        lines = [
            "| place | claim | claimed | ours | | verdict | remark |",
            "| --- | --- | ---: | ---: | --- | --- | --- |",
        ]
        lines += [line(figure) for figure in listed]
        parts.append("\n".join(lines) + "\n")
    return "\n".join([*parts, CODE])


def line(f: Figure) -> str:
    """One row of a table; the remark of a convention starts with our value by it and its name."""
    claimed = f.claimed if isinstance(f.claimed, str) else number(f.claimed)
    remark = f.remark
    if f.by_convention is not None:
        remark = "; ".join(filter(None, [f"{number(f.by_convention)}: {f.convention}", f.remark]))
    cells = [f.place, f.claim, claimed, number(f.ours), f.unit, VERDICTS[f.verdict], remark]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
