"""How settings divide layers into pipeline stages: evenly, by layers per stage, by first and last stage, or by a layout.

A layout of Megatron is text such as `Et*3|(tt|)*6mL`: stages between bars, E the embedding, t a decoder layer, m a layer of multi-token
prediction, L the loss; `*n` repeats one letter or a group in parentheses. It may also be a list of stages, each a list of names.
"""

import math
import re
from itertools import groupby
from typing import Any

from meshwright.interop.keys import Facts, Framework, SettingsProblem

MOST_TEXT = 20_000  # characters of an expanded layout


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


def stages(
    facts: Facts, layers: int | None, framework: Framework
) -> tuple[int, tuple[int, ...], list[SettingsProblem]]:
    """Stages per rank, layers of each stage (empty: as even as possible), and what is wrong with them."""
    pp, virtual, evenly = facts.get("pp", 1), facts.get("virtual") or 1, framework.splits_evenly
    if facts.get("layout") and pp > 1:
        return _by_layout(facts, pp, facts.get("virtual"), layers)
    if pp == 1 or layers is None:
        return (virtual if pp > 1 else 1), (), []
    split = layers + bool(facts.get("counts_embedding")) + bool(facts.get("counts_loss"))
    chunk = facts.get("layers_per_chunk")
    if chunk:
        return _by_chunk(facts, pp, layers, split, chunk, framework)
    if facts.get("first_layers") or facts.get("last_layers"):
        return _by_ends(facts, pp, virtual, layers)
    if "|" in str(facts.get("pattern", "")):
        return virtual, (), []
    if facts.get("scripted"):
        return virtual, (), []
    if evenly and split % (pp * virtual):
        return virtual, (), [_uneven(facts, layers, split, pp, virtual)]
    if evenly and split != layers:
        each = [split // (pp * virtual)] * (pp * virtual)
        each[0] -= bool(facts.get("counts_embedding"))
        each[-1] -= bool(facts.get("counts_loss"))
        return virtual, tuple(each) if min(each) > 0 else (), []
    return virtual, (), []


def _uneven(facts: Facts, layers: int, split: int, pp: int, virtual: int) -> SettingsProblem:
    counted = "" if split == layers else f" (with embedding and loss counted: {split})"
    stage = f"pp × virtual = {pp} × {virtual} = {pp * virtual}" if virtual > 1 else f"pp = {pp}"
    legal = [v for v in range(1, 65) if split % (pp * v) == 0] if virtual > 1 else []
    fix = f"virtual stages {max((v for v in legal if v <= virtual), default=legal[0])}" if legal else ""
    return SettingsProblem(
        "MW-SET-003",
        f"{layers} layers{counted} do not divide over {stage} stages",
        why="The framework gives every stage the same number of layers",
        fix=fix or "a degree that divides the layers, or explicit layers of the first and last stage",
    )


def _by_layout(
    facts: Facts, pp: int, virtual: int | None, layers: int | None
) -> tuple[int, tuple[int, ...], list[SettingsProblem]]:
    found = layout_stages(facts["layout"])
    if found is None:
        return (
            virtual or 1,
            (),
            [SettingsProblem("MW-SET-003", "the pipeline layout cannot be read", severity="warning")],
        )
    problems = []
    wanted = pp * virtual if virtual else math.ceil(len(found) / pp) * pp
    if len(found) != wanted:
        says = f"pp × virtual = {pp} × {virtual} = {wanted}" if virtual else f"a multiple of pp = {pp}"
        problems.append(
            SettingsProblem(
                "MW-SET-003",
                f"the pipeline layout has {len(found)} stages, not {says}",
                why="It was written for another pipeline",
                fix=f"virtual stages {len(found) // pp}"
                if len(found) % pp == 0
                else "a layout with that number of stages",
            )
        )
    elif layers is not None and sum(found) != layers:
        problems.append(
            SettingsProblem("MW-SET-003", f"the pipeline layout has {sum(found)} decoder layers, not {layers}")
        )
    usable = not problems and min(found) > 0 and layers is not None
    return max(1, len(found) // pp), tuple(found) if usable else (), problems


def _by_chunk(
    facts: Facts, pp: int, layers: int, split: int, chunk: int, framework: Framework
) -> tuple[int, tuple[int, ...], list[SettingsProblem]]:
    if framework.splits_evenly:
        if split % pp or split // pp % chunk:
            what = f"{layers} layers over pp = {pp} do not divide into stages of {chunk} layers"
            return (
                1,
                (),
                [SettingsProblem("MW-SET-003", what, why="The framework gives every stage the same number of layers")],
            )
        return split // pp // chunk, (), []
    count = math.ceil(layers / chunk)
    rounding = facts.get("round_stages")
    if rounding:
        count = max(pp, (count // pp if rounding == "down" else -(-count // pp)) * pp)
    elif framework.ends_are_layers:
        count = math.ceil((layers + facts.get("first_less", 1) + facts.get("last_less", 1)) / chunk)
    if count % pp:
        what = f"stages of {chunk} layers make {count} stages of {layers} layers, not a multiple of pp = {pp}"
        return 1, (), [SettingsProblem("MW-SET-003", what, why="Every rank has the same number of stages")]
    return count // pp, (), []


def _by_ends(facts: Facts, pp: int, virtual: int, layers: int) -> tuple[int, tuple[int, ...], list[SettingsProblem]]:
    first, last = facts.get("first_layers"), facts.get("last_layers")
    ends = [x for x in (first, last) if x]
    middle, ranks = layers - sum(ends), pp - len(ends)
    named = (
        f"{' and '.join(map(str, ends))} layers in the first and last stage"
        if len(ends) == 2
        else f"{ends[0]} layers in one end stage"
    )
    if middle < 0 or (ranks == 0) != (middle == 0) or (ranks and middle % ranks):
        what = f"{named} leave {middle} of {layers} layers for {ranks} stages between them"
        fix = "drop these counts, or give counts for this pipeline"
        return (
            virtual,
            (),
            [
                SettingsProblem(
                    "MW-SET-003", what, why="The stages between the ends have equal numbers of layers", fix=fix
                )
            ],
        )
    if virtual > 1:
        bad = [x for x in (*ends, *([middle // ranks] if ranks else [])) if x % virtual]
        if bad:
            return (
                virtual,
                (),
                [
                    SettingsProblem(
                        "MW-SET-003", f"{bad[0]} layers of a rank do not divide into {virtual} virtual stages"
                    )
                ],
            )
        return virtual, (), []
    each = [first] if first else []
    each += [middle // ranks] * ranks
    each += [last] if last else []
    return virtual, tuple(each) if min(each) > 0 else (), []
