"""Rules of a plan on a model with experts: expert parallelism re-factorises the ranks of a stage."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.describe.legality.case import Case, Flag, Problem, Rule, divisors, values

MOST_DEGREE = 4096  # larger degrees are not offered


class LocalSgdNeedsDenseModel(Rule, code="MW-PLAN-015", needs=("model",)):
    def broken(self, p: Case) -> Flag:
        return (p.model.experts > 0) & (p.average_every > 0)

    def explain(self, p: Case) -> Problem:
        return Problem(
            f"average_every={p.average_every} with the {p.model.experts} experts of {p.model.name}",
            why="Routers count the tokens of all replicas in every step",
            fixes=[{"plan.average_every": 0}],
        )


class ExpertsExist(Rule, code="MW-PLAN-010", needs=("model",)):
    def broken(self, p: Case) -> Flag:
        return (p.model.experts == 0) & ((p.ep > 1) | (p.expert_tp > 0))

    def explain(self, p: Case) -> Problem:
        named = f"ep={p.ep}" if p.ep > 1 else f"expert_tp={p.expert_tp}"
        return Problem(f"{named} but {p.model.name} has no experts", fixes=[{"plan.ep": 1, "plan.expert_tp": 0}])


class ExpertsDivide(Rule, code="MW-PLAN-010", needs=("model",)):
    def broken(self, p: Case) -> Flag:
        return (p.model.experts > 0) & (p.model.experts % p.ep != 0)

    def explain(self, p: Case) -> Problem:
        legal = [d for d in divisors(p.model.experts) if d <= MOST_DEGREE]
        return Problem(
            f"ep={p.ep} does not divide {p.model.experts} experts of {p.model.name}",
            valid=legal,
            fixes=values("plan.ep", legal, p.ep),
        )


class ExpertTensorDividesTensor(Rule, code="MW-PLAN-010", needs=("model",)):
    def broken(self, p: Case) -> Flag:
        return (p.model.experts > 0) & (p.tp % p.etp != 0)

    def explain(self, p: Case) -> Problem:
        legal = divisors(p.tp)
        return Problem(
            f"expert_tp={p.expert_tp} does not divide tp={p.tp}",
            valid=legal,
            fixes=[*values("plan.expert_tp", legal, p.etp), {"plan.expert_tp": 0}],
        )


class ExpertTensorDividesWidth(Rule, code="MW-PLAN-010", needs=("model",)):
    def broken(self, p: Case) -> Flag:
        return (p.model.experts > 0) & (p.model.expert_width % p.etp != 0)

    def explain(self, p: Case) -> Problem:
        m = p.model
        legal = [d for d in divisors(p.tp) if m.expert_width % d == 0]
        named = f"expert_tp={p.etp}" if p.expert_tp else f"tp={p.tp}"
        return Problem(
            f"{named} does not divide the experts' width {m.expert_width} of {m.name}",
            why="Each rank holds whole columns of an expert",
            valid=[f"expert_tp={d}" for d in legal],
            fixes=values("plan.expert_tp", legal, p.etp),
        )


class ExpertRanksDivide(Rule, code="MW-PLAN-010", needs=("model",)):
    def broken(self, p: Case) -> Flag:
        return (p.model.experts > 0) & (p.expert_ranks % p.ep != 0)

    def explain(self, p: Case) -> Problem:
        ranks = p.expert_ranks
        legal: Iterable[int] = [d for d in divisors(ranks) if p.model.experts % d == 0]
        return Problem(
            f"ep={p.ep} does not divide tp/expert_tp × cp × replicate × shard = {ranks}",
            why="Expert parallelism uses these ranks and adds none",
            valid=legal,
            fixes=values("plan.ep", legal, p.ep),
        )


EXPERT_RULES: tuple[type[Rule], ...] = (
    ExpertsExist,
    ExpertsDivide,
    ExpertTensorDividesTensor,
    ExpertTensorDividesWidth,
    ExpertRanksDivide,
)
