"""A plan against a model, a workload and a cluster: the first thing that makes it impossible, with the arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.describe.cluster import Cluster
from meshwright.describe.model import Model
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError, nearest_number

if TYPE_CHECKING:
    from meshwright.describe.plan import Plan


def check(plan: Plan, model: Model, workload: Workload, cluster: Cluster | None) -> None:
    if cluster is not None:
        _check_world(plan, cluster)
    _check_model(plan, model, workload)
    _check_batch(plan, workload)


def _check_world(plan: Plan, cluster: Cluster) -> None:
    if plan.world == cluster.world:
        return
    parts = {"replicate": plan.replicate, "shard": plan.shard, "tp": plan.tp, "cp": plan.cp, "pp": plan.pp}
    said = {k: v for k, v in parts.items() if v > 1} or {"tp": 1}
    rest = plan.world // plan.dp
    why = " × ".join(said) + " = " + " × ".join(str(v) for v in said.values())
    fix, valid = "", []
    if cluster.world % rest == 0:
        axis = "shard" if plan.shard > 1 else "replicate"
        other = plan.replicate if axis == "shard" else plan.shard
        if cluster.world // rest % other == 0:
            fix = f"--set plan.{axis}={cluster.world // rest // other}"
    else:
        valid = [f"tp·cp·pp = {d}" for d in divisors(cluster.world)][:12]
    raise MeshwrightError(
        "MW-PLAN-005",
        f"{why}{' = ' + str(plan.world) if len(said) > 1 else ''} ≠ {cluster.world} GPUs",
        why=f"The degrees must multiply to the devices of {cluster.name}",
        valid=valid,
        fix=fix,
    )


def _check_model(plan: Plan, m: Model, w: Workload) -> None:
    if m.kind == "counts":
        for axis in ("tp", "cp", "pp", "ep"):
            if getattr(plan, axis) > 1:
                raise MeshwrightError(
                    "MW-PLAN-009",
                    f"{axis}={getattr(plan, axis)} needs the model's shape",
                    why=f"Of {m.name} only counts are known; data parallelism alone can be planned",
                    fix=f"--set plan.{axis}=1",
                )
        return
    if plan.stages > m.layers:
        legal = [p for p in range(1, min(m.layers, 4096) + 1) if p * plan.virtual <= m.layers]
        raise MeshwrightError(
            "MW-PLAN-006",
            f"pp × virtual = {plan.pp} × {plan.virtual} = {plan.stages} stages for {m.layers} layers of {m.name}",
            why="A stage needs at least one layer",
            valid=[f"pp up to {max(legal, default=1)}"],
            fix=f"--set plan.pp={max(legal, default=1)}",
        )
    if plan.layers_per_stage and sum(plan.layers_per_stage) != m.layers:
        raise MeshwrightError(
            "MW-PLAN-007",
            f"layers_per_stage sums to {sum(plan.layers_per_stage)}, not the {m.layers} layers of {m.name}",
        )
    _divides(
        plan,
        "tp",
        plan.tp,
        m.hidden if m.kind == "mlp" else m.heads,
        f"hidden {m.hidden}" if m.kind == "mlp" else f"{m.heads} attention heads",
        m,
        "MW-PLAN-004",
    )
    if m.kind == "mlp":
        if plan.sp:
            raise MeshwrightError("MW-PLAN-009", "sp: an mlp has no sequence", fix="--set plan.sp=false")
        for axis in ("cp", "ep"):
            if getattr(plan, axis) > 1:
                raise MeshwrightError(
                    "MW-PLAN-009",
                    f"{axis}={getattr(plan, axis)}: an mlp has no {'sequence' if axis == 'cp' else 'experts'}",
                    fix=f"--set plan.{axis}=1",
                )
        return
    if m.kv_groups % plan.tp and plan.tp % m.kv_groups:
        legal = [t for t in divisors(m.heads) if m.kv_groups % t == 0 or t % m.kv_groups == 0]
        raise MeshwrightError(
            "MW-PLAN-004",
            f"tp={plan.tp} and {m.kv_groups} KV heads of {m.name}: one must divide the other",
            valid=legal,
            fix=f"--set plan.tp={nearest_number(plan.tp, legal)}",
        )
    if m.experts and plan.average_every:
        raise MeshwrightError(
            "MW-PLAN-015",
            f"average_every={plan.average_every} with the {m.experts} experts of {m.name}",
            why="Routers count the tokens of all replicas",
            fix="--set plan.average_every=0",
        )
    if not m.experts:
        _divides(plan, "tp", plan.tp, m.ffn, f"FFN width {m.ffn}", m, "MW-PLAN-004")
    if plan.sp and w.seq % (plan.tp * plan.cp):
        raise MeshwrightError(
            "MW-PLAN-008",
            f"sequence {w.seq} does not divide over tp × cp = {plan.tp} × {plan.cp}",
            why="Sequence parallelism shards the sequence",
            fix="--set plan.sp=false",
        )
    _check_context(plan, m, w)
    _check_experts(plan, m)


def _check_context(plan: Plan, m: Model, w: Workload) -> None:
    if plan.cp == 1:
        return
    pieces = plan.cp * (2 if plan.cp_kind == "ring" and m.causal else 1)
    if w.seq % pieces:
        raise MeshwrightError(
            "MW-PLAN-008",
            f"sequence {w.seq} does not split into {pieces} pieces for cp={plan.cp} ({plan.cp_kind})",
            why="Causal ring attention gives each rank two pieces, one early and one late" if pieces > plan.cp else "",
            valid=[d for d in divisors(w.seq) if d <= 1024][:20],
        )
    if plan.cp_kind == "ulysses":
        local = m.heads // plan.tp
        _divides(
            plan,
            "cp",
            plan.cp,
            local,
            f"{local} local attention heads (Ulysses trades sequence for heads)",
            m,
            "MW-PLAN-008",
        )
        if max(m.kv_groups // plan.tp, 1) % plan.cp and plan.cp % max(m.kv_groups // plan.tp, 1):
            raise MeshwrightError(
                "MW-PLAN-008",
                f"cp={plan.cp} and {max(m.kv_groups // plan.tp, 1)} local KV heads: one must divide the other",
            )


def _check_experts(plan: Plan, m: Model) -> None:
    if plan.ep == 1 and not plan.expert_tp:
        return
    if not m.experts:
        raise MeshwrightError("MW-PLAN-010", f"ep={plan.ep} but {m.name} has no experts", fix="--set plan.ep=1")
    _divides(plan, "ep", plan.ep, m.experts, f"{m.experts} experts", m, "MW-PLAN-010")
    if plan.tp % plan.etp:
        raise MeshwrightError(
            "MW-PLAN-010",
            f"expert_tp={plan.expert_tp} does not divide tp={plan.tp}",
            valid=divisors(plan.tp),
            fix=f"--set plan.expert_tp={nearest_number(plan.etp, divisors(plan.tp))}",
        )
    room = plan.tp // plan.etp * plan.cp * plan.dp
    if room % plan.ep:
        legal = [d for d in divisors(room) if m.experts % d == 0]
        raise MeshwrightError(
            "MW-PLAN-010",
            f"ep={plan.ep} does not divide tp/expert_tp × cp × replicate × shard = {room}",
            why="Expert parallelism re-factorises those ranks and adds none",
            valid=legal,
            fix=f"--set plan.ep={nearest_number(plan.ep, legal)}",
        )


def _check_batch(plan: Plan, w: Workload) -> None:
    unit = plan.microbatch * plan.dp
    if w.batch % unit:
        batches = [w.batch // unit * unit, (w.batch // unit + 1) * unit]
        near = nearest_number(w.batch, [b for b in batches if b])
        raise MeshwrightError(
            "MW-PLAN-011",
            f"batch {w.batch} is not a multiple of microbatch × dp = {plan.microbatch} × {plan.dp} = {unit}",
            why="batch = micro-batch × accumulation × dp",
            valid=[f"batch={b}" for b in batches if b],
            fix=f"--set workload.batch={near}",
        )
    if (
        plan.pp > 1
        and plan.schedule in ("interleaved", "interleaved-zb")
        and plan.virtual > 1
        and plan.microbatches(w) % plan.pp
    ):
        m = plan.microbatches(w)
        raise MeshwrightError(
            "MW-PLAN-012",
            f"{m} micro-batches are not a multiple of pp={plan.pp}",
            why="Interleaved schedules run them in rounds of pp",
            valid=["schedule=1f1b with virtual=1"],
            fix=f"--set workload.batch={max(1, round(m / plan.pp)) * plan.pp * unit}",
        )


def _divides(plan: Plan, axis: str, degree: int, number: int, what: str, m: Model, code: str) -> None:
    if number % degree:
        legal = [d for d in divisors(number) if d <= 4096]
        raise MeshwrightError(
            code,
            f"{axis}={degree} does not divide {what} of {m.name}",
            valid=legal,
            fix=f"--set plan.{axis}={nearest_number(degree, legal)}",
        )


def divisors(n: int) -> list[int]:
    """All divisors in order; trial division up to √n, bounded for hostile input."""
    if n > 2**44:
        return [1]
    small = [d for d in range(1, min(int(n**0.5), 1 << 20) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
