"""Comparing recordings that are made of numbers, without a training."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.check.compare import RunComparison, compare
from meshwright.check.folder import RankStep, Recording
from meshwright.check.match import by_rank, nearest
from meshwright.proof.parts import RecordedValue

Entry = tuple[str, str, Any]  # kind, name, value
MODULES = ("first", "second", "head")


class MadeRecording(Recording):
    """Steps by rank, each a list of entries; parameters and their gradients are whole on every rank."""

    def __init__(self, *ranks: list[list[Entry]], places: Iterable[dict[str, int]] = ({},), dtype: str = "float64"):
        self.made, self.dtype = ranks, dtype
        about: list[dict[str, Any]] = [
            {
                "rank": i,
                "world": len(ranks),
                "steps": len(ranks[0]),
                "parameters": [name for kind, name, _ in steps[0] if kind == "initial parameter"],
                "modules": MODULES,
                "batch_dim": 0,
                "coordinates": place,
                "groups": {},
            }
            for i, (steps, place) in enumerate(zip(ranks, places, strict=True))
        ]
        super().__init__(Path("made"), about)

    def rank_step(self, rank: int, number: int) -> RankStep:
        values = []
        for kind, name, value in self.made[rank][number]:
            value = np.atleast_1d(np.asarray(value, float))
            whole = not kind.startswith("output")
            box: dict[str, Any] = (
                {"shape": value.shape, "start": (0,) * value.ndim, "size": value.shape} if whole else {}
            )
            values.append(RecordedValue(kind, name, rank, value, self.dtype, **box))
        return RankStep(rank, values, [])


def stage(*modules: str, factor: float = 1.0, wrong: str = "") -> list[Entry]:
    """A step of a stage: outputs, and gradients in the order of backward. `wrong`: a module whose gradient is another."""
    rng = {name: np.random.default_rng(i) for i, name in enumerate(MODULES)}
    rows = {name: (rng[name].normal(size=(2, 3)), rng[name].normal(size=(2, 3))) for name in MODULES}
    out: list[Entry] = [("initial parameter", f"{name}.weight", np.ones(3)) for name in modules]
    out += [("output", name, rows[name][0]) for name in modules]
    out += [("loss", "", 1.0)] if "head" in modules else []
    for name in reversed(modules):
        gradient = rows[name][1] * factor
        out.append(("output gradient", name, gradient[::-1] if name == wrong else gradient))
    scale = 2.0 if wrong or factor != 1.0 else 1.0
    return [*out, *(("gradient", f"{name}.weight", scale * rows[name][1].sum(0)) for name in reversed(modules))]


def compared(*stages: list[Entry]) -> RunComparison:
    places = [{"pp": i} for i in range(len(stages))]
    return compare(MadeRecording([stage(*MODULES)]), MadeRecording(*([s] for s in stages), places=places))


def test_stages_of_a_pipeline_share_a_scale() -> None:
    """What the first stage gets is halved on the way: the last one's gradients tell that half is not the scale of the loss."""
    found = compared(stage("first", "second", factor=0.5), stage("head")).diagnosis
    assert found is not None
    assert (found.phase, found.tensor, found.pattern.kind) == ("backward", "second", "factor")


def test_the_first_module_is_the_reference_s_first() -> None:
    """Not the first of rank 0, which has the first stage."""
    found = compared(stage("first", "second", wrong="second"), stage("head", wrong="head")).diagnosis
    assert found is not None
    assert (found.phase, found.tensor) == ("backward", "head")


def adam(moved: float, off: float) -> list[list[Entry]]:
    """Two steps in float32: a parameter whose gradient is nearly zero is moved by rounding; what follows is off in proportion."""
    gradient = np.array([1.0, 1e-6])
    steps: list[list[Entry]] = []
    for step in range(2):
        weights = np.array([1.0, 1.0 + moved])
        of_step = gradient * (1 + off * step) + np.array([0.0, 1e-8 * (moved > 0)])
        steps.append([
            ("initial parameter", "w", np.ones(2)), ("output", "m", np.ones((2, 2))), ("learning rate", "", 1e-3), ("gradient", "w", of_step),
            ("state exp_avg", "w", of_step), ("parameter", "w", weights),
        ])  # fmt: skip
    return steps


@pytest.mark.parametrize(("off", "verdict"), [(2e-5, "equal within rounding"), (1e-3, "differs")])
def test_weights_that_rounding_moved_further_move_the_next_gradient_further(off: float, verdict: str) -> None:
    """In the perturbed references by 2e-6 of the weight, after which gradients are off by 1e-6; in the candidate by 20 times as much."""
    one, moved = (MadeRecording(adam(*how), dtype="float32") for how in ((0.0, 0.0), (2e-6, 1e-6)))
    comparison = compare(one, MadeRecording(adam(4e-5, off), dtype="float32"), [moved, moved])
    assert comparison.verdict == verdict, comparison.differences


def test_features_in_two_parts_that_are_each_cut_are_found() -> None:
    """A gate and what it gates in one matrix: a rank has a half of both."""
    samples = list(np.random.default_rng(0).normal(size=(3, 4, 8)))
    row = np.concatenate([samples[2][:, 2:4], samples[2][:, 6:8]], axis=1)
    match = nearest(row, samples, None, 1.0)
    assert match is not None
    assert (match.sample, match.parts, match.error) == (2, 2, 0.0)
    assert np.array_equal(by_rank(samples[2], 4, 2)[:, 4:], row)
