"""Options of `meshwright show` that a topic does not use raise an error; none is ignored."""

from collections.abc import Iterable, Mapping, Set

from meshwright.errors import MeshwrightError

COLLECTIVES, PIPELINES, LESSON, STEP, NUMBERS = (
    "collective",
    "pipeline schedule",
    "lesson",
    "step program",
    "calculator",
)
EXAMPLES = {"ranks": 4, "segments": 4, "node": 2, "virtual": 2}  # offered in the place of 0
INSTEAD = {
    (PIPELINES, "ranks"): "--stages",
    (COLLECTIVES, "stages"): "--ranks",
    (PIPELINES, "segments"): "--microbatches",
}


def refuse_unused(topic: str, kind: str, names: Iterable[str], accepted: Set[str]) -> None:
    """Raise for the first option of the command line that the topic does not use."""
    for name in names:
        if name not in accepted:
            used = [f"--{option.replace('_', '-')}" for option in sorted(accepted - {"names"})] or ["--json"]
            option = "the second argument" if name == "names" else f"--{name.replace('_', '-')}"
            raise unused(option, f"{topic} is a {kind}", INSTEAD.get((kind, name), ""), used)


def refuse_zero(options: Mapping[str, object]) -> None:
    """Raise for a count of 0 on the command line: 0 stands for the default of an option that is not given."""
    for name, example in EXAMPLES.items():
        if options.get(name) == 0:
            what = f"--{name} 0 is not a whole number of 1 or more"
            raise MeshwrightError("MW-SHOW-003", what, fix=f"--{name} {example}")


def unused(option: str, why: str, fix: str = "", valid: list[str] | None = None) -> MeshwrightError:
    return MeshwrightError("MW-SHOW-003", f"{option} has no effect here", why=why, valid=valid or [], fix=fix)
