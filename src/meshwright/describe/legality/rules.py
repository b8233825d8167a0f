"""The table of all rules, in the order in which a plan's problems are reported."""

from __future__ import annotations

from functools import cache

from meshwright.describe.legality.model_rules import MODEL_RULES
from meshwright.describe.legality.plan_rules import PLAN_RULES
from meshwright.describe.legality.rule import Rule
from meshwright.describe.legality.run_rules import RUN_RULES, DegreesMultiplyToDevices, DeviceHasPrecision
from meshwright.describe.legality.stack_rules import STACK_RULES
from meshwright.describe.legality.trainer_rules import TRAINER_RULES

ALL_RULES: tuple[type[Rule], ...] = (
    *PLAN_RULES,
    DeviceHasPrecision,
    DegreesMultiplyToDevices,
    *MODEL_RULES,
    *RUN_RULES,
    *STACK_RULES,
    *TRAINER_RULES,
)


@cache
def rules_for(given: frozenset[str]) -> tuple[type[Rule], ...]:
    """The rules that apply where these things are known."""
    return tuple(rule for rule in ALL_RULES if set(rule.needs) <= given)
