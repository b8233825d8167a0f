"""Rules of a plan on a model: every axis divides what it splits."""

import numpy as np

from meshwright.describe.legality.case import RULES, Case, Flag, Problem, Reading, divisors, rule, values
from meshwright.describe.plan_fields import CP_KINDS, RECOMPUTES, Number, encode
from meshwright.errors import shown

MOST_DEGREE = 4096  # larger degrees are not offered
UNEVEN = "MW-PLAN-004"  # tensor parallelism does not divide what it splits
FULL, NONE = RECOMPUTES.index("full"), RECOMPUTES.index("none")
ALL_GATHER = encode("tp_form", "all-gather")
ROWS = ("row", "experts-row")  # styles of matrices whose inputs are cut
RING, ULYSSES = CP_KINDS.index("ring"), CP_KINDS.index("ulysses")


def neither_divides(a: Number, b: Number) -> Flag:
    """Whether neither of two numbers divides the other."""
    return (a % b != 0) & (b % a != 0)


# What an axis divides, and a residual network has not.
NEEDED = {
    "tp": "products that tensor parallelism divides by columns and rows",
    "cp": "a sequence",
    "pp": "layers of one shape of activations",
    "ep": "experts",
    "sp": "a sequence",
}


@rule("MW-PLAN-009", "model")
def counts_take_data_parallelism(p: Case) -> Reading:
    yield (p.model.kind == "counts") & ((p.tp > 1) | (p.cp > 1) | (p.pp > 1) | (p.ep > 1) | p.sp)
    axis = next((a for a in ("tp", "cp", "pp", "ep") if p.setting(f"plan.{a}") > 1), "sp")
    why = f"{p.model.name} is described by its totals only, so only data parallelism can be planned"
    needed = "the model's shape"
    if p.model.resnet.stages:
        needed, why = NEEDED[axis], f"{p.model.name} is a residual network, which takes data parallelism and ZeRO"
    alone = {**dict.fromkeys(("plan.tp", "plan.cp", "plan.pp", "plan.ep", "plan.virtual"), 1), "plan.sp": False}
    sharded = {**alone, "plan.schedule": "1f1b", "plan.layers_per_stage": (), "plan.shard": p.world // p.replicate}
    yield Problem(
        f"{axis}={shown(p.setting(f'plan.{axis}'))} needs {needed}",
        why=why,
        fixes=[{f"plan.{axis}": 1 if axis != "sp" else False}, alone, sharded, {**sharded, "plan.recompute": "none"}],
    )


@rule("MW-PLAN-009", "model")
def counts_are_recomputed(p: Case) -> Reading:
    """A residual network can recompute all blocks or none; a model given by totals has no parts to recompute."""
    blocks = bool(p.model.resnet.stages) & (p.recompute == FULL) & (p.recompute_every == 1) & (p.recompute_layers == 0)
    yield (p.model.kind == "counts") & (p.recompute != NONE) & np.logical_not(blocks)
    reset = {"plan.recompute_every": 1, "plan.recompute_layers": 0, "plan.recompute_budget": 0.0}
    why, valid = "Which parts there are to recompute is not known", ["none"]
    if p.model.resnet.stages:
        why, valid = "Of a residual network all blocks are recomputed, or none", ["none", "full"]
    what = f"recompute={p.word('recompute')} of {p.model.name}"
    yield Problem(what, why, valid, fixes=[{"plan.recompute": "none", **reset}])


@rule("MW-PLAN-006", "model")
def stages_have_layers(p: Case) -> Reading:
    yield (p.model.kind != "counts") & (p.stages > p.model.layers)
    most = max(1, p.model.layers // p.virtual)
    yield Problem(
        f"pp × virtual = {p.pp} × {p.virtual} = {p.stages} stages for {p.model.layers} layers of {p.model.name}",
        why="A stage needs at least one layer",
        valid=[f"pp up to {most}"],
        fixes=[
            *({"plan.pp": d} for d in range(most, max(0, most - 24), -1)),
            {"plan.virtual": 1, "plan.schedule": "1f1b"},
        ],
    )


@rule("MW-PLAN-007", "model")
def stages_sum_to_layers(p: Case) -> Reading:
    yield (p.model.kind != "counts") & (p.stage_entries > 0) & (p.stage_sum != p.model.layers)
    yield Problem(
        f"layers_per_stage sums to {p.stage_sum}, not the {p.model.layers} layers of {p.model.name}",
        fixes=[{"plan.layers_per_stage": ()}],
    )


def tensor_degrees(p: Case) -> list[int]:
    """Tensor-parallel degrees that this model accepts, by these same rules."""
    m = p.model
    split = m.hidden if m.kind == "mlp" else m.heads if m.has_attention_layers else m.linear.heads
    degrees = np.array([d for d in divisors(split) if d <= MOST_DEGREE])
    alone = Case({**p.columns, "tp": degrees, "expert_tp": p.columns["expert_tp"] * 0}, m)
    broken = np.zeros(len(degrees), bool)
    for one in RULES:
        if one.code == UNEVEN:
            broken = broken | one.broken(alone)
    return [int(d) for d in degrees[~broken]]


def cannot_split(p: Case, what: str, why: str = "") -> Problem:
    legal = tensor_degrees(p)
    return Problem(what, why=why, valid=legal, fixes=values("plan.tp", legal, p.tp))


@rule(UNEVEN, "model")
def tensor_divides_heads(p: Case) -> Reading:
    m = p.model
    if m.kind == "counts" or not m.has_attention_layers:
        return
    yield (m.hidden if m.kind == "mlp" else m.heads) % p.tp != 0
    split = f"hidden {m.hidden}" if m.kind == "mlp" else f"{m.heads} attention heads"
    yield cannot_split(p, f"tp={p.tp} does not divide {split} of {m.name}")


@rule("MW-PLAN-009", "model")
def mlp_has_no_sequence(p: Case) -> Reading:
    yield (p.model.kind == "mlp") & (p.sp | (p.cp > 1) | (p.ep > 1))
    if p.sp:
        yield Problem("sp: an mlp has no sequence", fixes=[{"plan.sp": False}])
    axis, lacks = ("cp", "sequence") if p.cp > 1 else ("ep", "experts")
    yield Problem(f"{axis}={p.setting(f'plan.{axis}')}: an mlp has no {lacks}", fixes=[{f"plan.{axis}": 1}])


@rule(UNEVEN, "model")
def tensor_fits_kv_heads(p: Case) -> Reading:
    m = p.model
    yield (m.kind == "transformer") & m.has_attention_layers & neither_divides(m.kv_groups, p.tp)
    yield cannot_split(p, f"tp={p.tp} and {m.kv_groups} KV heads of {m.name}: one must divide the other")


@rule("MW-PLAN-015", "model")
def local_sgd_needs_dense_model(p: Case) -> Reading:
    yield (p.model.experts > 0) & (p.average_every > 0)
    yield Problem(
        f"average_every={p.average_every} with the {p.model.experts} experts of {p.model.name}",
        why="Routers count the tokens of all replicas in every step",
        fixes=[{"plan.average_every": 0}],
    )


@rule(UNEVEN, "model")
def tensor_divides_ffn(p: Case) -> Reading:
    m = p.model
    if m.kind != "transformer":
        return
    yield ((m.ffn % p.tp != 0) & m.has_part("ffn")) | ((m.shared_width % p.tp != 0) & (m.shared_experts > 0))
    dense = m.has_part("ffn") and m.ffn % p.tp
    split = f"FFN width {m.ffn}" if dense else f"the shared experts' width {m.shared_width}"
    yield cannot_split(p, f"tp={p.tp} does not divide {split} of {m.name}", "Each rank holds whole columns")


@rule(UNEVEN, "model")
def tensor_divides_output_groups(p: Case) -> Reading:
    groups = p.model.compressed.out_groups
    yield (groups % p.tp != 0) if groups else False
    yield cannot_split(p, f"tp={p.tp} does not divide {groups} groups of the output projection of {p.model.name}")


@rule(UNEVEN, "model")
def tensor_divides_linear(p: Case) -> Reading:
    o = p.model.linear
    yield False if not o.kind else (o.heads % p.tp != 0) | (o.key_groups % p.tp != 0)
    split = f"{o.heads} linear heads" if o.heads % p.tp else f"{o.key_groups} groups of linear heads"
    yield cannot_split(p, f"tp={p.tp} does not divide {split} of {p.model.name}", "A state belongs to one rank")


@rule("MW-ADPT-006", "model")
def adapters_need_row_splits(p: Case) -> Reading:
    """The all-gather form cuts a row-split product by its outputs, which an adapter's A and B are not cut for."""
    yield (p.model.adapter.rank > 0) & (p.tp > 1) & (p.tp_form == ALL_GATHER)
    why = "It cuts every matrix by its outputs; A of a row-split matrix is cut with the inputs"
    yield Problem("tp_form=all-gather with adapters", why=why, fixes=[{"plan.tp_form": "megatron"}])


@rule("MW-PLAN-008", "model", "workload")
def sequence_parallel_divides_sequence(p: Case) -> Reading:
    yield (p.model.kind == "transformer") & p.sp & (p.workload.seq % (p.tp * p.cp) != 0)
    yield Problem(
        f"sequence {p.workload.seq} does not divide over tp × cp = {p.tp} × {p.cp}",
        why="Sequence parallelism shards the sequence",
        fixes=[{"plan.sp": False}, *other_sequences(p, p.tp * p.cp)],
    )


@rule("MW-PLAN-008", "model", "workload")
def context_divides_sequence(p: Case) -> Reading:
    if p.model.kind != "transformer":
        return
    pieces = p.cp * (1 + (p.cp_kind == RING) * p.model.causal)
    yield (p.cp > 1) & (p.workload.seq % pieces != 0)
    seq, twice = p.workload.seq, p.cp_kind == RING and p.model.causal
    pieces = p.cp * (2 if twice else 1)
    legal = [d for d in divisors(seq // 2 if twice and seq % 2 == 0 else 1 if twice else seq) if d <= 1024][:20]
    gathered = [{"plan.cp_kind": "all-gather"}] if twice and seq % p.cp == 0 else []
    yield Problem(
        f"sequence {seq} does not split into {pieces} pieces for cp={p.cp} ({p.word('cp_kind')})",
        why="Causal ring attention gives each rank two pieces, one early and one late" if twice else "",
        valid=[f"cp={d}" for d in legal],
        fixes=[*values("plan.cp", legal, p.cp), *gathered, *other_sequences(p, pieces)],
    )


def other_sequences(p: Case, unit: int) -> list[dict[str, int]]:
    """The nearest sequence lengths that are multiples of a unit."""
    below = p.workload.seq // unit * unit
    return [{"workload.seq": seq} for seq in (below + unit, below) if 0 < seq <= 2**32]


@rule("MW-PLAN-008", "model")
def ulysses_divides_heads(p: Case) -> Reading:
    m = p.model
    if m.kind != "transformer" or not m.has_attention_layers:
        return
    uneven = (m.heads // p.tp % p.cp != 0) | neither_divides(local_keys(p), p.cp)
    yield (p.cp > 1) & (p.cp_kind == ULYSSES) & uneven
    local, keys = m.heads // p.tp, int(local_keys(p))
    legal = [d for d in divisors(max(1, local)) if keys % d == 0 or d % keys == 0]
    what = f"{local} local attention heads" if local % p.cp else f"{keys} local KV heads"
    yield Problem(
        f"cp={p.cp} does not divide {what} of {p.model.name}",
        why="Ulysses trades sequence for heads: each rank attends with whole heads",
        valid=[*(f"cp={d}" for d in legal), "cp_kind=ring", "cp_kind=all-gather"],
        fixes=[{"plan.cp_kind": "ring"}, {"plan.cp_kind": "all-gather"}, *values("plan.cp", legal, p.cp)],
    )


@rule("MW-PLAN-008", "model")
def context_divides_linear(p: Case) -> Reading:
    o = p.model.linear
    yield False if not o.kind else (p.cp > 1) & (o.heads // p.tp % p.cp != 0)
    local = max(1, o.heads // p.tp)
    legal = [d for d in divisors(local) if d <= MOST_DEGREE]
    yield Problem(
        f"cp={p.cp} does not divide {local} local linear heads of {p.model.name}",
        why="A state needs all positions: linear mixers trade sequence for heads, and each rank has whole heads",
        valid=[f"cp={d}" for d in legal],
        fixes=values("plan.cp", legal, p.cp),
    )


def local_keys(p: Case) -> Flag:
    """KV heads of one tensor-parallel rank: at least one, copied where there are more ranks than heads."""
    return np.maximum(p.model.kv_groups // p.tp, 1)


# Experts


@rule("MW-PLAN-010", "model")
def experts_exist(p: Case) -> Reading:
    yield (p.model.experts == 0) & ((p.ep > 1) | (p.expert_tp > 0))
    named = f"ep={p.ep}" if p.ep > 1 else f"expert_tp={p.expert_tp}"
    yield Problem(f"{named} but {p.model.name} has no experts", fixes=[{"plan.ep": 1, "plan.expert_tp": 0}])


@rule("MW-PLAN-010", "model", "workload")
def loads_are_of_the_experts(p: Case) -> Reading:
    given = len(p.workload.loads)
    yield (given > 0) & ((given != p.model.experts) | (sum(p.workload.loads) == 0))
    yield Problem(
        f"workload.loads has {given} numbers, and {p.model.name} {p.model.experts} experts",
        why="Each number is the tokens of one expert; one of them is above 0",
        fixes=[{"workload.loads": ()}],
    )


@rule("MW-PLAN-010", "model")
def experts_divide(p: Case) -> Reading:
    yield (p.model.experts > 0) & (p.model.experts % p.ep != 0)
    legal = [d for d in divisors(p.model.experts) if d <= MOST_DEGREE]
    yield Problem(
        f"ep={p.ep} does not divide {p.model.experts} experts of {p.model.name}",
        valid=legal,
        fixes=values("plan.ep", legal, p.ep),
    )


@rule("MW-PLAN-010", "model")
def expert_tensor_divides_tensor(p: Case) -> Reading:
    yield (p.model.experts > 0) & (p.tp % p.etp != 0)
    legal = divisors(p.tp)
    yield Problem(
        f"expert_tp={p.expert_tp} does not divide tp={p.tp}",
        valid=legal,
        fixes=[*values("plan.expert_tp", legal, p.etp), {"plan.expert_tp": 0}],
    )


@rule("MW-PLAN-010", "model")
def expert_tensor_divides_width(p: Case) -> Reading:
    m = p.model
    yield (m.experts > 0) & (m.expert_width % p.etp != 0)
    legal = [d for d in divisors(p.tp) if m.expert_width % d == 0]
    named = f"expert_tp={p.etp}" if p.expert_tp else f"tp={p.tp}"
    yield Problem(
        f"{named} does not divide the experts' width {m.expert_width} of {m.name}",
        why="Each rank holds whole columns of an expert",
        valid=[f"expert_tp={d}" for d in legal],
        fixes=values("plan.expert_tp", legal, p.etp),
    )


@rule("MW-PLAN-010", "model")
def expert_ranks_divide(p: Case) -> Reading:
    yield (p.model.experts > 0) & (p.expert_ranks % p.ep != 0)
    ranks = p.expert_ranks
    legal = [d for d in divisors(ranks) if p.model.experts % d == 0]
    yield Problem(
        f"ep={p.ep} does not divide tp/expert_tp × cp × replicate × shard = {ranks}",
        why="Expert parallelism uses these ranks and adds none",
        valid=legal,
        fixes=values("plan.ep", legal, p.ep),
    )
