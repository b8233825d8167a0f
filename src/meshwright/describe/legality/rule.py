"""The shape of a rule and of its explanation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from meshwright.describe.legality.case import Case, Flag


@dataclass(frozen=True)
class Problem:
    """The explanation of a broken rule: what is wrong, why, the valid values, and changes to try, the likeliest first."""

    what: str
    why: str = ""
    valid: Iterable[object] = ()
    fixes: Iterable[Mapping[str, Any]] = ()


class Rule:
    """An error code and two functions: `broken` for one plan or a batch, `explain` for one plan that breaks the rule.

    The rule applies where everything it `needs` is given: model, workload, cluster, stack, trainer, dtypes, framework.
    """

    code: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def broken(p: Case) -> Flag:
        raise NotImplementedError

    @staticmethod
    def explain(p: Case) -> Problem:
        raise NotImplementedError
