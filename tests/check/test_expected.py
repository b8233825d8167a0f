"""Collectives that a plan needs, beside those of a rank: taken from the step program, with one left out, repeated or in another group."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from meshwright.check.expected import Issued, RankPlan, check_same_model
from meshwright.check.folder import RankStep
from meshwright.describe.config import configure
from meshwright.describe.layout import Layout
from meshwright.errors import MeshwrightError
from meshwright.lower.rank import messages_of_rank
from meshwright.lower.step import step_program
from meshwright.proof.parts import RecordedValue

SHAPE = {"name": "toy", "layers": 4, "hidden": 32, "heads": 4, "ffn": 64, "vocab": 96, "tied": False}
PLAN = {"replicate": 2, "tp": 2, "pp": 2, "microbatch": 2, "param_dtype": "fp32", "grad_dtype": "fp32", "master": False}


def rank_plan(rank: int = 0, stack: str = "megatron-lm", **plan) -> RankPlan:
    """A rank that issues what its plan needs, gradients in one bucket."""
    config = configure(
        SHAPE, "dgx-h100", stack=stack, workload={"batch": 8, "seq": 16, "precision": "fp32"}, plan=PLAN | plan
    )
    program = step_program(config.model, config.plan, config.workload, config.stack)
    layout = Layout(config.plan, config.stack.order)
    needed, issued = messages_of_rank(program, config.plan, rank, layout.order), []
    for row in needed:
        ranks = tuple(sorted(layout.group_of({"world": "world"}.get(row.axis, row.axis), rank)))
        one = Issued(
            row.collective,
            ranks,
            round(row.bytes / row.times),
            round(row.bytes / row.times / 4),
            row.phase not in ("", "F"),
        )
        issued += [one] * round(row.times)
    return RankPlan(config, layout, rank, needed, issued)


@pytest.mark.parametrize("rank", range(8))
@pytest.mark.parametrize("plan", [{}, {"sp": True}, {"recompute": "full"}, {"schedule": "interleaved", "virtual": 2}])
def test_what_the_plan_needs_is_enough(rank: int, plan: dict) -> None:
    assert list(rank_plan(rank, **plan).findings()) == []


def is_tp(c: Issued) -> bool:
    return c.ranks == (0, 1) and c.bytes == 4096


def first(plan: RankPlan, chosen: Callable[[Issued], bool]) -> int:
    return next(i for i, c in enumerate(plan.issued) if chosen(c))


CASES = {
    "one reduction of backward is missing": (lambda c: is_tp(c) and c.backward, None, "missing", "tp", "1 of 8 reductions of 4 KiB in backward"),
    "all of backward are missing": (lambda c: is_tp(c) and c.backward, "all", "missing", "tp", "all 8 reductions of backward"),
    "a message to the next stage is missing": (lambda c: c.operation == "send", None, "missing", "pp", "1 of 2 messages"),
    "gradients are not reduced": (lambda c: c.elements > 5000, None, "missing", "dp", "all gradients"),
    "gradients are reduced three times": (lambda c: c.elements > 5000, "more", "repeated", "dp", "3 times"),
    "another group": (lambda c: c.elements > 5000, (0, 3), "group", "", "0, 3 is none of this plan"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_collective_is_named(name: str) -> None:
    chosen, change, kind, axis, text = CASES[name]
    plan = rank_plan()
    at = first(plan, chosen)
    match change:
        case None:
            issued = plan.issued[:at] + plan.issued[at + 1 :]
        case "all":
            issued = [c for c in plan.issued if not chosen(c)]
        case "more":
            issued = [*plan.issued, plan.issued[at], plan.issued[at]]
        case _:
            issued = [replace(c, ranks=change) if i == at else c for i, c in enumerate(plan.issued)]
    findings = list(replace(plan, issued=issued).findings())
    assert [(f.kind, f.axis) for f in findings][:1] == [(kind, axis)], findings
    assert text in findings[0].text


def test_settings_of_a_model_of_another_size_are_refused() -> None:
    config = rank_plan().config
    size = int(config.model.total)

    def step(*shapes: tuple[int, ...]) -> RankStep:
        return RankStep(
            0, [RecordedValue("parameter", str(i), 0, np.zeros(0), shape=s) for i, s in enumerate(shapes)], []
        )

    check_same_model([step((size - 8, 1), (8,)), step((size - 8, 1))], config)  # copies count once
    with pytest.raises(MeshwrightError, match="MW-CHECK-018"):
        check_same_model([step((2, size))], config)
