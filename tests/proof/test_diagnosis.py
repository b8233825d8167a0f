"""The pattern of a difference, from the numbers alone, and its phase, from which tensors differ."""

import numpy as np
import pytest

from meshwright.proof import diagnosis
from meshwright.proof.compare import Agreement, Break
from meshwright.proof.patterns import Copy, pattern_of
from meshwright.proof.records import PieceTrace, Trace

AXES = {"dp": 4, "tp": 2}
FACTORS = {**AXES, "micro-batches": 3}
RANDOM = np.random.default_rng(0)
WHOLE, BEFORE = RANDOM.normal(size=(8, 6)), RANDOM.normal(size=(8, 6))
PARTS = RANDOM.dirichlet(np.ones(4), size=(8, 6)).transpose(2, 0, 1) * WHOLE  # they sum to the whole


def with_rows(rows, values):
    out = WHOLE.copy()
    out[rows] = values
    return out


PATTERNS = {
    "zero": (lambda rank: np.zeros_like(WHOLE), "zero", ""),
    "stale": (lambda rank: BEFORE, "stale", "step before"),
    "stale, added": (lambda rank: WHOLE + BEFORE, "stale", "added"),
    "missing sum": (lambda rank: PARTS[rank], "missing sum", "4 ranks of dp"),
    "missing mean": (lambda rank: 4 * PARTS[rank], "missing sum", "whose mean is right"),
    "averaged": (lambda rank: WHOLE / 4, "factor", "1/dp"),
    "by micro-batch": (lambda rank: WHOLE / 3, "factor", "1/micro-batches"),
    "twice": (lambda rank: 2 * WHOLE, "factor", "× 2 = tp"),
    "unnamed": (lambda rank: 0.9 * WHOLE, "factor", "× 0.9"),
    "transposed blocks": (lambda rank: np.roll(WHOLE, 4, 0), "permutation", "another order"),
    "rows": (lambda rank: with_rows(slice(4, 6), 0.0), "part", "2 of 8 rows, from 4 on: zero"),
    "columns": (lambda rank: with_rows(slice(0, 8), WHOLE * [1, 1, 1, 1, 1, 3]), "part", "1 of 6 columns, from 5 on: factor × 3"),
    "one rank's part again": (lambda rank: WHOLE + PARTS[rank], "counted twice", "too much"),
    "bf16": (lambda rank: WHOLE * (1 + RANDOM.normal(size=(8, 6)) * 2.0**-9), "noise", "as bf16 rounds"),
    "fp32": (lambda rank: WHOLE * (1 + RANDOM.normal(size=(8, 6)) * 2.0**-19.5), "noise", "as fp32 rounds|six digits"),
    "unrelated": (lambda rank: RANDOM.normal(size=(8, 6)), "other", "off by"),
    "not a number": (lambda rank: WHOLE * np.nan, "other", "not a number"),
}  # fmt: skip


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_is_named(name):
    make, kind, words = PATTERNS[name]
    copies = [
        Copy({"dp": rank, "tp": tp}, (0, 0), make(rank), WHOLE, BEFORE, BEFORE) for rank in range(4) for tp in range(2)
    ]
    found = pattern_of(copies, FACTORS, AXES)
    assert found.kind == kind
    assert any(word in found.detail for word in words.split("|"))


def test_the_right_ranks_do_not_hide_the_wrong_one():
    copies = [Copy({"dp": rank}, (0, 0), WHOLE / 4 if rank == 2 else WHOLE, WHOLE) for rank in range(4)]
    assert pattern_of(copies, FACTORS, {"dp": 4}).detail == "× 0.25 = 1/dp"


NAMES = ("embedding", "first", "norm", "second", "head")


def traces(change, losses=(1.0, 1.0), norms=(1.0, 1.0)):
    """One device and two ranks of tp that hold copies of all tensors; `change(name, rank, tensor)` is the bug of the second step."""
    values = {name: [RANDOM.normal(size=(4, 3)) for _ in range(4)] for name in NAMES}

    def pieces(rank=None):
        for name, (first, second, initial, moved) in values.items():
            wrong = second if rank is None else change(name, rank, second)
            yield PieceTrace(name, (0, 0), [first, wrong], [moved, moved + 0.1], initial=initial)

    one = Trace(0, "fp64", {}, [1.0, 2.0], [1.0, 2.0], list(pieces()))
    many = [Trace(r, "fp64", {"tp": r}, list(losses), list(norms), list(pieces(r))) for r in range(2)]
    return one, many


def at(what, name=""):
    return Break(1, what, name, 0, 1.0, 0.0, "fp64")


def diagnose(one, many, first, factors, *others):
    return diagnosis.diagnose([Agreement("fp64", {}, [first, *others], one=one, many=many)], factors)


def half(tensor, rank):
    return tensor * (0.3 if rank else 0.7)


PHASES = {
    "everything averaged": (lambda name, rank, g: g / 2, at("gradient", "head"), "reduction", "factor"),
    "the norm is not summed": (
        lambda name, rank, g: half(g, rank) if name == "norm" else g, at("gradient", "norm"), "reduction", "missing sum"),
    "an activation's gradient is not summed": (
        lambda name, rank, g: half(g, rank) if name in NAMES[:3] else g, at("gradient", "norm"), "backward", "missing sum"),
    "rows of experts": (lambda name, rank, g: g[::-1] if name in NAMES[:3] else g, at("gradient", "norm"), "backward", "permutation"),
}  # fmt: skip


@pytest.mark.parametrize("name", PHASES)
def test_the_phase_follows_from_the_tensors_that_differ(name):
    change, first, phase, kind = PHASES[name]
    found = diagnose(*traces(change, (1.0, 2.0), (1.0, 2.0)), first, {"tp": 2})
    assert (found.phase, found.pattern.kind) == (phase, kind)
    assert found.causes
    assert found.tensor == first.name


def plain(name, rank, gradient):
    return gradient


def test_a_loss_that_alone_differs_is_only_reported_wrong():
    found = diagnose(*traces(plain, losses=(1.0, 1.0)), at("loss"), {"tp": 2})
    assert (found.phase, found.pattern.kind) == ("reduction", "stale")
    found = diagnose(*traces(lambda name, rank, g: g * 1.5, losses=(1.0, 2.7)), at("loss"), {"tp": 2})
    assert (found.phase, found.pattern.kind) == ("forward", "other")


def test_a_norm_that_counts_copies_names_their_axis():
    one, many = traces(plain)
    square = sum(float((p.gradients[1] ** 2).sum()) for p in one.pieces)
    one.norms[1] = square**0.5
    for trace in many:
        trace.norms[1] = (2 * square) ** 0.5
    found = diagnose(one, many, at("norm"), {"tp": 2})
    assert (found.phase, found.pattern.kind, found.pattern.axis) == ("clipping", "counted twice", "tp")


def test_a_parameter_that_stays_was_not_updated():
    one, many = traces(plain)
    for trace in many:
        trace.pieces[1].parameters[1] = trace.pieces[1].parameters[0]
    found = diagnose(one, many, at("parameter", "first"), {"tp": 2})
    assert (found.phase, found.pattern.kind) == ("update", "stale")
    assert "not updated" in str(found)


def test_an_update_of_wrongly_clipped_gradients_is_an_error_of_clipping():
    replayed = Break(1, "gradient given to the optimizer", "first", 0, 0.3, 1e-6, "fp32", ratio=1.4)
    found = diagnose(*traces(plain), at("parameter", "first"), {"tp": 2}, replayed)
    assert (found.phase, found.pattern.kind, found.pattern.detail) == (
        "clipping",
        "factor",
        "gradient given to the optimizer × 1.4",
    )


def test_nothing_is_said_of_a_proof_without_a_difference():
    assert diagnosis.diagnose([Agreement("fp64", {}, [])], {"tp": 2}) is None
