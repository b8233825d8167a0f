"""The first place at which two trainings part, in the order of computation: for proofs and for recordings."""

from collections.abc import Callable, Iterable


def first_that_reaches(
    names: Iterable[str], is_off: Callable[[str], bool], seen: Callable[[str], bool] = lambda name: False
) -> str | None:
    """The first module whose output is off, and so is that of the module around it, where that can be compared: a part of a sum is not one
    device's output, and right when the module around it has summed it. A second output, `name [1]`, need not be one of the module around."""
    known: dict[str, bool] = {}

    def off(name: str) -> bool:
        if name not in known:
            known[name] = is_off(name)
        return known[name]

    def reaches(name: str) -> bool:
        around = name.rpartition(".")[0]
        return name.endswith("]") or not seen(around) or off(around)

    return next((name for name in names if off(name) and reaches(name)), None)
