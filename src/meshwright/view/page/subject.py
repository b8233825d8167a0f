"""What a view is about: one configuration, the options of the view, and results that several views share.

    subject = Subject(config)
    memory.data(subject)              # a view: plain JSON values

The estimate, the simulated step and the planner's result are computed when a view first asks for them, and once for all views of a
request. A search may take seconds. `subject.provisional()` answers sooner with the first map of plans (`planner.search.cells`): the views are the
same, and the page draws them until the complete search is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from meshwright.cost.walked import WalkedStep
from meshwright.describe.config import Config, Configured
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError, kind_of, shown
from meshwright.planner import api as planner
from meshwright.planner.question import Question, read
from meshwright.planner.result import Result
from meshwright.planner.search.cells import CellMap
from meshwright.planner.search.space import Space
from meshwright.planner.sizing import OPTIONS
from meshwright.predict.estimate import Estimate, estimate

FIRST_LEADERS = 3
T = TypeVar("T")


class Shared:
    """Results that all views of one configuration share."""

    def __init__(self, config: Config, question: Mapping[str, Any], result: Result | None = None) -> None:
        self.config, self.question = config, dict(question)
        self.known: dict[Any, Any] = {}
        if result is not None:
            self.__dict__["result"] = result

    def once(self, key: Any, function: Callable[[], T]) -> T:
        """A result that the provisional and the complete answer of a view both show, computed for the first of them."""
        if key not in self.known:
            self.known[key] = function()
        return self.known[key]

    @cached_property
    def estimate(self) -> Estimate:
        return estimate(self.config)

    @cached_property
    def result(self) -> Result:
        return planner.plan(self.config, **self.question)

    @cached_property
    def planner_question(self) -> Question:
        """The question that `result` answers."""
        words = {name: value for name, value in self.question.items() if name not in OPTIONS}
        return read(self.config, **words)

    @cached_property
    def space(self) -> Space:
        """The legal plans of the question."""
        return self.planner_question.space()

    @cached_property
    def map(self) -> CellMap:
        """The map of tp × pp: the first one within a second."""
        return CellMap(self.space, self.planner_question.headroom)

    @cached_property
    def feasible(self) -> bool:
        """Whether some plan fits: only then is there a `result`."""
        try:
            return self.result is not None
        except MeshwrightError:
            return False

    @cached_property
    def first_result(self) -> Result:
        """The fastest plans of the first map as a result; where none of them fits, what the complete search says."""
        if self.map.leaders is None:
            return self.result
        found, ranking = self.map.leaders
        config, headroom = self.planner_question.config.but(plan=ranking.best.plan), self.planner_question.headroom
        return Result(config, self.map.space, found, ranking, headroom, 0.0, FIRST_LEADERS)


@dataclass(frozen=True)
class Subject(Configured):
    """One configuration as a view sees it. `question` has the constraints of the search, as `planner.plan` takes them."""

    config: Config
    question: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    is_provisional: bool = False
    shared: Shared = None  # type: ignore[assignment]  # made below where it is not given

    def __post_init__(self) -> None:
        if self.shared is None:
            object.__setattr__(self, "shared", Shared(self.config, self.question))

    @classmethod
    def of_result(cls, result: Result) -> Subject:
        """The winner of a search, with the search itself."""
        return cls(result.config, shared=Shared(result.config, {}, result))

    @classmethod
    def of_estimate(cls, estimated: Estimate) -> Subject:
        """An estimate that a command has computed."""
        shared = Shared(estimated.config, {})
        shared.__dict__["estimate"] = estimated
        return cls(estimated.config, shared=shared)

    def with_options(self, options: Mapping[str, Any]) -> Subject:
        """The same configuration and results, with the options of another view."""
        return replace(self, options=options)

    def provisional(self) -> Subject:
        """The subject whose `result` is of the first map of plans, which takes less than a second."""
        return replace(self, is_provisional=True)

    @property
    def plan(self) -> Plan:
        return self.config.plan

    @property
    def estimate(self) -> Estimate:
        """Estimate the plan."""
        return self.shared.estimate

    @property
    def walked(self) -> WalkedStep:
        """The step simulated action by action, as `meshwright simulate` draws it."""
        return self.shared.estimate.walked

    @property
    def result(self) -> Result:
        """Search for the best plan; of a provisional subject, the fastest plans of the first map."""
        return self.shared.first_result if self.is_provisional else self.shared.result

    def option(self, name: str, default: Any, valid: Iterable[Any] | None = None, most: float | None = None) -> Any:
        """An option of the view, of the type of its default; it must be in `valid`, and a number between 0 and `most`."""
        value = self.options.get(name, default)
        if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        choices = list(valid) if valid is not None else []
        if type(value) is not type(default) and value not in choices:
            why = f"It must be {kind_of(default)}"
        elif choices and value not in choices:
            why = "It must be one of the valid values"
        elif most is not None and not 0 <= value <= most:
            why = f"It must be from 0 to {most:,g}"
        else:
            return value
        raise MeshwrightError(
            "MW-WEB-008", f"option {name} = {shown(value)} of a view is not valid", why=why, valid=choices
        )
