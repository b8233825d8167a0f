"""How settings divide layers into pipeline stages: evenly, by layers per stage, by first and last stage, or by a layout.

A layout of Megatron is text such as `Et*3|(tt|)*6mL`: stages between bars, E the embedding, t a decoder layer, m a layer of multi-token
prediction, L the loss; `*n` repeats one letter or a group in parentheses. It may also be a list of stages, each a list of names.
"""

import math
import re
from itertools import groupby
from typing import Any, NamedTuple

from meshwright.interop.keys import Facts, Framework, SettingsProblem

MOST_TEXT = 20_000  # characters of an expanded layout
EVEN = "The framework gives every stage the same number of layers"


def layout_stages(layout: Any) -> list[int] | None:
    """Decoder layers of each stage of a layout; None if it cannot be read."""
    if isinstance(layout, list):
        if not all(isinstance(stage, list | str) for stage in layout):
            return None
        return [sum(1 for part in stage if str(part).startswith("decoder") or part == "t") for stage in layout]
    text = re.sub(r"[\s,'\"]", "", str(layout))
    while found := re.search(r"\(([^()]*)\)\*(\d{1,4})", text):
        text = text[: found.start()] + found[1] * int(found[2]) + text[found.end() :]
        if len(text) > MOST_TEXT:
            return None
    text = re.sub(r"\(([^()]*)\)", r"\1", text)
    text = re.sub(r"([A-Za-z])\*(\d{1,4})", lambda m: m[1] * int(m[2]), text)
    if len(text) > MOST_TEXT or not re.fullmatch(r"[A-Za-z|]*", text):
        return None
    return [stage.count("t") for stage in text.split("|")]


def layout_text(stage_layers: list[int]) -> str:
    """Megatron's text of a layout: the embedding before the first stage, the loss after the last one, equal neighbours as one group."""
    *others, last = stage_layers
    runs = [(layers, len(list(equal))) for layers, equal in groupby(others)]
    groups = [f"(t*{layers}|)*{count}" if count > 1 else f"t*{layers}|" for layers, count in runs]
    return f"E{''.join(groups)}t*{last}L"


def pattern_layers(pattern: str) -> int:
    """Layers of a hybrid pattern such as `MEM*|MEM*`: every letter and sign but bars; what follows a slash predicts further tokens."""
    return len(re.sub(r"[|\s]", "", str(pattern).split("/")[0]))


class StageDivision(NamedTuple):
    """Stages per rank, layers of each stage (empty: as even as possible), and what is wrong with them."""

    virtual: int = 1
    each: tuple[int, ...] = ()
    problem: SettingsProblem | None = None


def _refused(virtual: int, what: str, why: str = "", fix: str = "") -> StageDivision:
    return StageDivision(virtual, (), SettingsProblem("MW-SET-003", what, why, fix))


def stages(facts: Facts, layers: int | None, framework: Framework) -> StageDivision:
    """How settings divide the layers over the stages of a pipeline."""
    pp, virtual, evenly = facts.get("pp", 1), facts.get("virtual") or 1, framework.splits_evenly
    if pp == 1:
        return StageDivision()
    if facts.get("layout"):
        return _by_layout(facts, pp, layers)
    if layers is None:
        return StageDivision(virtual)
    split = layers + bool(facts.get("counts_embedding")) + bool(facts.get("counts_loss"))
    if facts.get("layers_per_chunk"):
        return _by_chunk(facts, pp, layers, split, framework)
    if facts.get("first_layers") or facts.get("last_layers"):
        return _by_ends(facts, pp, virtual, layers)
    if "|" in str(facts.get("pattern", "")) or facts.get("scripted") or not evenly:
        return StageDivision(virtual)
    if split % (pp * virtual):
        return _uneven(layers, split, pp, virtual)
    if split == layers:
        return StageDivision(virtual)
    each = [split // (pp * virtual)] * (pp * virtual)
    each[0] -= bool(facts.get("counts_embedding"))
    each[-1] -= bool(facts.get("counts_loss"))
    return StageDivision(virtual, tuple(each) if min(each) > 0 else ())


def _uneven(layers: int, split: int, pp: int, virtual: int) -> StageDivision:
    counted = "" if split == layers else f" (with embedding and loss counted: {split})"
    stage = f"pp × virtual = {pp} × {virtual} = {pp * virtual}" if virtual > 1 else f"pp = {pp}"
    legal = [v for v in range(1, 65) if split % (pp * v) == 0] if virtual > 1 else []
    fix = f"virtual stages {max((v for v in legal if v <= virtual), default=legal[0])}" if legal else ""
    fix = fix or "a degree that divides the layers, or explicit layers of the first and last stage"
    return _refused(virtual, f"{layers} layers{counted} do not divide over {stage} stages", EVEN, fix)


def _by_layout(facts: Facts, pp: int, layers: int | None) -> StageDivision:
    found, virtual = layout_stages(facts["layout"]), facts.get("virtual")
    if found is None:
        unread = SettingsProblem("MW-SET-003", "the pipeline layout cannot be read", severity="warning")
        return StageDivision(virtual or 1, (), unread)
    ranks = max(1, len(found) // pp)
    wanted = pp * virtual if virtual else math.ceil(len(found) / pp) * pp
    if len(found) != wanted:
        says = f"pp × virtual = {pp} × {virtual} = {wanted}" if virtual else f"a multiple of pp = {pp}"
        fix = "a layout with that number of stages" if len(found) % pp else f"virtual stages {len(found) // pp}"
        what = f"the pipeline layout has {len(found)} stages, not {says}"
        return _refused(ranks, what, "It was written for another pipeline", fix)
    if layers is not None and sum(found) != layers:
        return _refused(ranks, f"the pipeline layout has {sum(found)} decoder layers, not {layers}")
    return StageDivision(ranks, tuple(found) if min(found) > 0 and layers is not None else ())


def _by_chunk(facts: Facts, pp: int, layers: int, split: int, framework: Framework) -> StageDivision:
    chunk, rounding = facts["layers_per_chunk"], facts.get("round_stages")
    if framework.splits_evenly:
        if split % pp or split // pp % chunk:
            legal = [n for n in range(1, split // pp + 1) if split % pp == 0 and split // pp % n == 0]
            nearest = min(legal, key=lambda n: abs(n - chunk), default=0)
            fix = f"{nearest} layers per virtual stage" if legal else "a pipeline size that divides the layers"
            return _refused(1, f"{layers} layers over pp = {pp} do not divide into stages of {chunk} layers", EVEN, fix)
        return StageDivision(split // pp // chunk)
    count = math.ceil(layers / chunk)
    if rounding:
        count = max(pp, (count // pp if rounding == "down" else -(-count // pp)) * pp)
    elif framework.ends_are_layers:
        count = math.ceil((layers + facts.get("first_less", 1) + facts.get("last_less", 1)) / chunk)
    if count % pp:
        what = f"stages of {chunk} layers make {count} stages of {layers} layers, not a multiple of pp = {pp}"
        return _refused(1, what, "Every rank has the same number of stages")
    return StageDivision(count // pp)


def _by_ends(facts: Facts, pp: int, virtual: int, layers: int) -> StageDivision:
    first, last = ([facts[name]] if facts.get(name) else [] for name in ("first_layers", "last_layers"))
    ends = first + last
    middle, ranks = layers - sum(ends), pp - len(ends)
    if middle < 0 or (ranks == 0) != (middle == 0) or (ranks and middle % ranks):
        where = "the first and last stage" if len(ends) == 2 else "one end stage"
        named = f"{' and '.join(map(str, ends))} layers in {where}"
        what = f"{named} leave {middle} of {layers} layers for {ranks} stages between them"
        why = "The stages between the ends have equal numbers of layers"
        return _refused(virtual, what, why, "drop these counts, or give counts for this pipeline")
    between = [middle // ranks] if ranks else []
    if virtual == 1:
        each = (*first, *between * ranks, *last)
        return StageDivision(1, each if min(each) > 0 else ())
    if bad := [x for x in ends + between if x % virtual]:
        return _refused(virtual, f"{bad[0]} layers of a rank do not divide into {virtual} virtual stages")
    return StageDivision(virtual)
