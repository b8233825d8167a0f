"""Rules of a plan on a model: every axis divides what it splits."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from meshwright.describe.legality.case import Case, Flag
from meshwright.describe.legality.fixes import divisors, values
from meshwright.describe.legality.rule import Problem, Rule
from meshwright.describe.plan_fields import CP_KINDS

RING, ULYSSES = CP_KINDS.index("ring"), CP_KINDS.index("ulysses")
MOST_DEGREE = 4096  # larger degrees are not offered


def neither_divides(a: Flag, b: Flag) -> Flag:
    """Whether neither of two numbers divides the other."""
    return (a % b != 0) & (b % a != 0)


class CountsTakeDataParallelism(Rule):
    code = "MW-PLAN-009"
    needs = ("model",)

    @staticmethod
    def broken(p: Case) -> Flag:
        return (p.model.kind == "counts") & ((p.tp > 1) | (p.cp > 1) | (p.pp > 1) | (p.ep > 1))

    @staticmethod
    def explain(p: Case) -> Problem:
        axis = next(a for a in ("tp", "cp", "pp", "ep") if p.setting(f"plan.{a}") > 1)
        return Problem(
            f"{axis}={p.setting(f'plan.{axis}')} needs the model's shape",
            why=f"{p.model.name} is described by its totals only, so only data parallelism can be planned",
            fixes=[{f"plan.{axis}": 1}, dict.fromkeys(("plan.tp", "plan.cp", "plan.pp", "plan.ep", "plan.virtual"), 1)],
        )


class StagesHaveLayers(Rule):
    code = "MW-PLAN-006"
    needs = ("model",)

    @staticmethod
    def broken(p: Case) -> Flag:
        return (p.model.kind != "counts") & (p.stages > p.model.layers)

    @staticmethod
    def explain(p: Case) -> Problem:
        most = max(1, p.model.layers // p.virtual)
        candidates: list[dict[str, object]] = [{"plan.pp": d} for d in range(most, 0, -1)]
        return Problem(
            f"pp × virtual = {p.pp} × {p.virtual} = {p.stages} stages for {p.model.layers} layers of {p.model.name}",
            why="A stage needs at least one layer",
            valid=[f"pp up to {most}"],
            fixes=[*candidates[:24], {"plan.virtual": 1, "plan.schedule": "1f1b"}],
        )


class StagesSumToLayers(Rule):
    code = "MW-PLAN-007"
    needs = ("model",)

    @staticmethod
    def broken(p: Case) -> Flag:
        return (p.model.kind != "counts") & (p.stage_entries > 0) & (p.stage_sum != p.model.layers)

    @staticmethod
    def explain(p: Case) -> Problem:
        return Problem(
            f"layers_per_stage sums to {p.stage_sum}, not the {p.model.layers} layers of {p.model.name}",
            fixes=[{"plan.layers_per_stage": ()}],
        )


class MlpHasNoSequence(Rule):
    code = "MW-PLAN-009"
    needs = ("model",)

    @staticmethod
    def broken(p: Case) -> Flag:
        return (p.model.kind == "mlp") & (p.sp | (p.cp > 1) | (p.ep > 1))

    @staticmethod
    def explain(p: Case) -> Problem:
        if p.sp:
            return Problem("sp: an mlp has no sequence", fixes=[{"plan.sp": False}])
        axis, lacks = ("cp", "sequence") if p.cp > 1 else ("ep", "experts")
        return Problem(f"{axis}={p.setting(f'plan.{axis}')}: an mlp has no {lacks}", fixes=[{f"plan.{axis}": 1}])


def tensor_degrees(p: Case) -> list[int]:
    """Tensor-parallel degrees that this model accepts, by these same rules."""
    m = p.model
    found = np.array([d for d in divisors(m.hidden if m.kind == "mlp" else m.heads) if d <= MOST_DEGREE])
    alone = Case({**p.fields, "tp": found, "expert_tp": p.fields["expert_tp"] * 0}, m)
    broken = np.zeros(len(found), bool)
    for each in TENSOR_RULES:
        broken = broken | each.broken(alone)
    return [int(d) for d in found[~broken]]


def cannot_split(p: Case, what: str, why: str = "") -> Problem:
    legal = tensor_degrees(p)
    return Problem(what, why=why, valid=legal, fixes=values("plan.tp", legal, p.tp))


class TensorDividesHeads(Rule):
    code = "MW-PLAN-004"
    needs = ("model",)

    @staticmethod
    def broken(p: Case) -> Flag:
        m = p.model
        return (m.kind != "counts") & ((m.hidden if m.kind == "mlp" else m.heads) % p.tp != 0)

    @staticmethod
    def explain(p: Case) -> Problem:
        m = p.model
        split = f"hidden {m.hidden}" if m.kind == "mlp" else f"{m.heads} attention heads"
        return cannot_split(p, f"tp={p.tp} does not divide {split} of {m.name}")


class TensorFitsKvHeads(Rule):
    code = "MW-PLAN-004"
    needs = ("model",)

    @staticmethod
    def broken(p: Case) -> Flag:
        return (p.model.kind == "transformer") & neither_divides(p.model.kv_groups, p.tp)

    @staticmethod
    def explain(p: Case) -> Problem:
        m = p.model
        return cannot_split(p, f"tp={p.tp} and {m.kv_groups} KV heads of {m.name}: one must divide the other")


class TensorDividesFfn(Rule):
    code = "MW-PLAN-004"
    needs = ("model",)

    @staticmethod
    def broken(p: Case) -> Flag:
        m = p.model
        if m.kind != "transformer":
            return False
        return ((m.ffn % p.tp != 0) & m.has_dense_layers) | ((m.shared_width % p.tp != 0) & (m.shared_experts > 0))

    @staticmethod
    def explain(p: Case) -> Problem:
        m = p.model
        dense = m.has_dense_layers and m.ffn % p.tp
        split = f"FFN width {m.ffn}" if dense else f"the shared experts' width {m.shared_width}"
        return cannot_split(p, f"tp={p.tp} does not divide {split} of {m.name}", "Each rank holds whole columns")


TENSOR_RULES: tuple[type[Rule], ...] = (TensorDividesHeads, TensorFitsKvHeads, TensorDividesFfn)


class LocalSgdNeedsDenseModel(Rule):
    code = "MW-PLAN-015"
    needs = ("model",)

    @staticmethod
    def broken(p: Case) -> Flag:
        return (p.model.experts > 0) & (p.average_every > 0)

    @staticmethod
    def explain(p: Case) -> Problem:
        return Problem(
            f"average_every={p.average_every} with the {p.model.experts} experts of {p.model.name}",
            why="Routers count the tokens of all replicas in every step",
            fixes=[{"plan.average_every": 0}],
        )


class SequenceParallelDividesSequence(Rule):
    code = "MW-PLAN-008"
    needs = (
        "model",
        "workload",
    )

    @staticmethod
    def broken(p: Case) -> Flag:
        return (p.model.kind == "transformer") & p.sp & (p.workload.seq % (p.tp * p.cp) != 0)

    @staticmethod
    def explain(p: Case) -> Problem:
        return Problem(
            f"sequence {p.workload.seq} does not divide over tp × cp = {p.tp} × {p.cp}",
            why="Sequence parallelism shards the sequence",
            fixes=[{"plan.sp": False}, *other_sequences(p, p.tp * p.cp)],
        )


class ContextDividesSequence(Rule):
    code = "MW-PLAN-008"
    needs = (
        "model",
        "workload",
    )

    @staticmethod
    def broken(p: Case) -> Flag:
        if p.model.kind != "transformer":
            return False
        pieces = p.cp * (1 + (p.cp_kind == RING) * p.model.causal)
        return (p.cp > 1) & (p.workload.seq % pieces != 0)

    @staticmethod
    def explain(p: Case) -> Problem:
        seq, twice = p.workload.seq, p.cp_kind == RING and p.model.causal
        pieces = p.cp * (2 if twice else 1)
        legal = [d for d in divisors(seq // 2 if twice and seq % 2 == 0 else 1 if twice else seq) if d <= 1024][:20]
        gathered = [{"plan.cp_kind": "all-gather"}] if twice and seq % p.cp == 0 else []
        return Problem(
            f"sequence {seq} does not split into {pieces} pieces for cp={p.cp} ({p.word('cp_kind')})",
            why="Causal ring attention gives each rank two pieces, one early and one late" if twice else "",
            valid=[f"cp={d}" for d in legal],
            fixes=[*values("plan.cp", legal, p.cp), *gathered, *other_sequences(p, pieces)],
        )


def other_sequences(p: Case, unit: int) -> list[dict[str, int]]:
    """The nearest sequence lengths that are multiples of a unit."""
    below = p.workload.seq // unit * unit
    return [{"workload.seq": seq} for seq in (below + unit, below) if 0 < seq <= 2**32]


class UlyssesDividesHeads(Rule):
    code = "MW-PLAN-008"
    needs = ("model",)

    @staticmethod
    def broken(p: Case) -> Flag:
        m = p.model
        if m.kind != "transformer":
            return False
        uneven = (m.heads // p.tp % p.cp != 0) | neither_divides(local_keys(p), p.cp)
        return (p.cp > 1) & (p.cp_kind == ULYSSES) & uneven

    @staticmethod
    def explain(p: Case) -> Problem:
        local, keys = p.model.heads // p.tp, int(local_keys(p))
        legal = [d for d in divisors(max(1, local)) if keys % d == 0 or d % keys == 0]
        heads = bool(local % p.cp)
        what = f"{local} local attention heads" if heads else f"{keys} local KV heads"
        return Problem(
            f"cp={p.cp} does not divide {what} of {p.model.name}",
            why="Ulysses trades sequence for heads: each rank attends with whole heads",
            valid=[*(f"cp={d}" for d in legal), "cp_kind=ring", "cp_kind=all-gather"],
            fixes=[
                {"plan.cp_kind": "ring"},
                {"plan.cp_kind": "all-gather"},
                *values("plan.cp", legal, p.cp),
            ],
        )


def local_keys(p: Case) -> Flag:
    """KV heads of one tensor-parallel rank: at least one, copied where there are more ranks than heads."""
    return np.maximum(p.model.kv_groups // p.tp, 1)


class ExpertsExist(Rule):
    code = "MW-PLAN-010"
    needs = ("model",)

    @staticmethod
    def broken(p: Case) -> Flag:
        return (p.model.experts == 0) & ((p.ep > 1) | (p.expert_tp > 0))

    @staticmethod
    def explain(p: Case) -> Problem:
        named = f"ep={p.ep}" if p.ep > 1 else f"expert_tp={p.expert_tp}"
        return Problem(f"{named} but {p.model.name} has no experts", fixes=[{"plan.ep": 1, "plan.expert_tp": 0}])


class ExpertsDivide(Rule):
    code = "MW-PLAN-010"
    needs = ("model",)

    @staticmethod
    def broken(p: Case) -> Flag:
        return (p.model.experts > 0) & (p.model.experts % p.ep != 0)

    @staticmethod
    def explain(p: Case) -> Problem:
        legal = [d for d in divisors(p.model.experts) if d <= MOST_DEGREE]
        return Problem(
            f"ep={p.ep} does not divide {p.model.experts} experts of {p.model.name}",
            valid=legal,
            fixes=values("plan.ep", legal, p.ep),
        )


class ExpertTensorDividesTensor(Rule):
    code = "MW-PLAN-010"
    needs = ("model",)

    @staticmethod
    def broken(p: Case) -> Flag:
        return (p.model.experts > 0) & (p.tp % p.etp != 0)

    @staticmethod
    def explain(p: Case) -> Problem:
        legal = divisors(p.tp)
        return Problem(
            f"expert_tp={p.expert_tp} does not divide tp={p.tp}",
            valid=legal,
            fixes=[*values("plan.expert_tp", legal, p.etp), {"plan.expert_tp": 0}],
        )


class ExpertTensorDividesWidth(Rule):
    code = "MW-PLAN-010"
    needs = ("model",)

    @staticmethod
    def broken(p: Case) -> Flag:
        return (p.model.experts > 0) & (p.model.expert_width % p.etp != 0)

    @staticmethod
    def explain(p: Case) -> Problem:
        m = p.model
        legal = [d for d in divisors(p.tp) if m.expert_width % d == 0]
        named = f"expert_tp={p.etp}" if p.expert_tp else f"tp={p.tp}"
        return Problem(
            f"{named} does not divide the experts' width {m.expert_width} of {m.name}",
            why="Each rank holds whole columns of an expert",
            valid=[f"expert_tp={d}" for d in legal],
            fixes=values("plan.expert_tp", legal, p.etp),
        )


class ExpertRanksDivide(Rule):
    code = "MW-PLAN-010"
    needs = ("model",)

    @staticmethod
    def broken(p: Case) -> Flag:
        return (p.model.experts > 0) & (p.expert_ranks % p.ep != 0)

    @staticmethod
    def explain(p: Case) -> Problem:
        ranks = p.expert_ranks
        legal: Iterable[int] = [d for d in divisors(ranks) if p.model.experts % d == 0]
        return Problem(
            f"ep={p.ep} does not divide tp/expert_tp × cp × replicate × shard = {ranks}",
            why="Expert parallelism uses these ranks and adds none",
            valid=legal,
            fixes=values("plan.ep", legal, p.ep),
        )


MODEL_RULES: tuple[type[Rule], ...] = (
    CountsTakeDataParallelism,
    StagesHaveLayers,
    StagesSumToLayers,
    TensorDividesHeads,
    MlpHasNoSequence,
    TensorFitsKvHeads,
    LocalSgdNeedsDenseModel,
    TensorDividesFfn,
    SequenceParallelDividesSequence,
    ContextDividesSequence,
    UlyssesDividesHeads,
    ExpertsExist,
    ExpertsDivide,
    ExpertTensorDividesTensor,
    ExpertTensorDividesWidth,
    ExpertRanksDivide,
)
