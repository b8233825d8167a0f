"""Options of `meshwright show` that a topic does not use raise an error; none is ignored."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.errors import MeshwrightError

COLLECTIVES, PIPELINES, LESSON = "collective", "pipeline schedule", "lesson"
USED = {
    COLLECTIVES: {"names", "compare", "algorithm", "ranks", "size", "cluster", "elements", "root", "segments", "node", "values", "html"},
    PIPELINES: {"names", "compare", "stages", "microbatches", "virtual", "trace", "html"},
    LESSON: set(),
}  # fmt: skip
INSTEAD = {
    (PIPELINES, "ranks"): "--stages",
    (COLLECTIVES, "stages"): "--ranks",
    (PIPELINES, "segments"): "--microbatches",
}


def refuse_unused(topic: str, kind: str, given: Iterable[str]) -> None:
    """Raise for the first option of the command line that topics of this kind do not use."""
    for name in given:
        if name not in USED[kind]:
            used = [f"--{option}" for option in sorted(USED[kind] - {"names"})] or ["--json"]
            option = "the second argument" if name == "names" else f"--{name}"
            raise unused(option, f"{topic} is a {kind}", INSTEAD.get((kind, name), ""), used)


def unused(option: str, why: str, fix: str = "", valid: list[str] | None = None) -> MeshwrightError:
    return MeshwrightError("MW-SHOW-003", f"{option} has no effect here", why=why, valid=valid or [], fix=fix)
