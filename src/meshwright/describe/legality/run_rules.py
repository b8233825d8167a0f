"""Rules of the machine, the batch, the training stack, and our own trainer."""

from __future__ import annotations

from meshwright.describe.legality.case import Case, Flag, lookup
from meshwright.describe.legality.fixes import divisors, fitting_microbatch, values
from meshwright.describe.legality.plan_rules import GATHERED
from meshwright.describe.legality.rule import Problem, Rule
from meshwright.describe.model import Model
from meshwright.describe.plan_fields import DTYPES, GATHER_DTYPES
from meshwright.describe.schedules import IN_ROUNDS, LEAST_MICROBATCHES, MOST_ACTIONS, RULES, action_count
from meshwright.describe.workload import FP8

ALWAYS_THERE = ("fp64", "fp32")  # every device computes in these, if slowly
TRAINED_DTYPES = ("fp32", "fp64", "bf16", "fp16")  # parameter dtypes that `train` runs
FP8_GATHERS = GATHER_DTYPES.index("fp8")
NOT_TRAINED = tuple(DTYPES.index(dtype) for dtype in DTYPES if dtype not in TRAINED_DTYPES)


# The machine


class DegreesMultiplyToDevices(Rule):
    code = "MW-PLAN-005"
    needs = ("cluster",)

    @staticmethod
    def broken(p: Case) -> Flag:
        return p.world != p.cluster.world

    @staticmethod
    def explain(p: Case) -> Problem:
        sizes = {axis: p.setting(f"plan.{axis}") for axis in ("replicate", "shard", "tp", "cp", "pp")}
        shown = {k: v for k, v in sizes.items() if v > 1} or {"tp": 1}
        devices = p.cluster.world
        product = " × ".join(shown) + " = " + " × ".join(str(v) for v in shown.values())
        total = f" = {p.world}" if len(shown) > 1 else ""
        divides = devices % p.rest == 0
        axes = sorted(("tp", "pp", "cp"), key=lambda axis: -sizes[axis])
        return Problem(
            f"{product}{total} ≠ {devices} GPUs",
            why=f"The degrees must multiply to the devices of {p.cluster.name}",
            valid=[] if divides else [f"tp·cp·pp = {d}" for d in divisors(devices)][:12],
            fixes=[{}, *(change for axis in axes for change in values(f"plan.{axis}", divisors(devices), sizes[axis]))],
        )


class DeviceHasPrecision(Rule):
    code = "MW-CLUS-003"
    needs = ("workload", "cluster")

    @staticmethod
    def broken(p: Case) -> Flag:
        return p.workload.precision not in (*p.cluster.accelerator.peak, *ALWAYS_THERE)

    @staticmethod
    def explain(p: Case) -> Problem:
        device = p.cluster.accelerator
        likely = [d for d in ("fp8", "bf16", "fp16", "fp32") if d in device.peak]
        return Problem(
            f"workload.precision={p.workload.precision}, and {device.name} has no {p.workload.precision} units",
            why="No peak rate is known for that dtype on this accelerator",
            valid=[d for d in device.peak if not d.startswith("int")],
            fixes=[
                *({"workload.precision": dtype} for dtype in likely),
                *({"workload.precision": dtype, "plan.gather_dtype": "same"} for dtype in likely),
            ],
        )


# The batch


class BatchDivides(Rule):
    code = "MW-PLAN-011"
    needs = ("workload",)

    @staticmethod
    def broken(p: Case) -> Flag:
        return p.workload.batch % p.unit != 0

    @staticmethod
    def explain(p: Case) -> Problem:
        batch, unit = p.workload.batch, p.unit
        batches = [b for b in (batch // unit * unit, (batch // unit + 1) * unit) if b]
        smaller = fitting_microbatch(batch, p.dp, p.microbatch)
        return Problem(
            f"batch {batch} is not a multiple of microbatch × dp = {p.microbatch} × {p.dp} = {unit}",
            why="batch = micro-batch × accumulation × dp",
            valid=[f"batch={b}" for b in batches] + ([f"microbatch={smaller}"] if smaller else []),
            fixes=[
                *values("workload.batch", batches, batch),
                *([{"plan.microbatch": smaller}] if smaller else []),
            ],
        )


class ScheduleHasMicrobatches(Rule):
    code = "MW-PLAN-016"
    needs = ("workload",)

    @staticmethod
    def broken(p: Case) -> Flag:
        return (p.pp > 1) & (p.microbatches < lookup(LEAST_MICROBATCHES, p.schedule) * p.pp)

    @staticmethod
    def explain(p: Case) -> Problem:
        name = p.word("schedule")
        least = RULES[name].least_microbatches_per_rank * p.pp
        smaller = [d for d in divisors(p.workload.batch // p.dp) if p.workload.batch // p.dp // d >= least]
        return Problem(
            f"schedule {name} on pp={p.pp} needs {least} micro-batches, not {p.microbatches}",
            why="Both stages of every rank must be filled",
            valid=[f"{least} or more micro-batches"],
            fixes=[
                *values("plan.microbatch", smaller, p.microbatch),
                {"workload.batch": least * p.unit},
                {"plan.schedule": "zbv"},
            ],
        )


class ProgramIsBounded(Rule):
    code = "MW-PLAN-017"
    needs = ("workload",)

    @staticmethod
    def broken(p: Case) -> Flag:
        return (p.pp > 1) & (action_count(p.pp, p.microbatches, p.virtual) > MOST_ACTIONS)

    @staticmethod
    def explain(p: Case) -> Problem:
        return Problem(
            f"{p.pp} ranks × {p.microbatches} micro-batches × {p.virtual} stages per rank",
            why=f"A pipeline program has at most {MOST_ACTIONS:,} actions",
            fixes=values("plan.microbatch", divisors(p.workload.batch // p.dp)[-24:], p.microbatch),
        )


def round_size(p: Case) -> Flag:
    """Micro-batches that the stack takes together: their number is a multiple of this."""
    interleaved = p.stack.interleaved_rounds & lookup(IN_ROUNDS, p.schedule) & (p.virtual > 1)
    return 1 + interleaved * (p.pp - 1)


class InterleavedRounds(Rule):
    """Our programs take any number of micro-batches; Megatron's interleaved schedules take rounds of pp."""

    code = "MW-PLAN-012"
    needs = ("workload", "stack")

    @staticmethod
    def broken(p: Case) -> Flag:
        return p.microbatches % round_size(p) != 0

    @staticmethod
    def explain(p: Case) -> Problem:
        rounds = max(1, round(p.microbatches / p.pp))
        local = p.workload.batch // p.dp
        sizes = [d for d in divisors(local) if local // d % p.pp == 0]
        return Problem(
            f"{p.microbatches} micro-batches are not a multiple of pp={p.pp}",
            why=f"{p.stack.name} runs interleaved schedules in rounds of pp micro-batches",
            valid=["schedule=1f1b with virtual=1"],
            fixes=[
                {"workload.batch": rounds * p.pp * p.unit},
                *values("plan.microbatch", sizes, p.microbatch),
                {"plan.schedule": "1f1b", "plan.virtual": 1},
            ],
        )


# What `meshwright train` and `verify` run


class ModelHasShape(Rule):
    code = "MW-BUILD-001"
    needs = ("model", "trainer")

    @staticmethod
    def broken(p: Case) -> Flag:
        return p.model.kind == "counts"

    @staticmethod
    def explain(p: Case) -> Problem:
        return Problem(
            f"{p.model.name} cannot be built",
            why="It is described by its totals only, not by its shape",
            valid=["kind=transformer", "kind=mlp"],
        )


def unsupported_parts(m: Model) -> list[str]:
    """What a model has and our transformer does not implement."""
    if m.kind != "transformer":
        return []
    field, width = ("rope_dim", m.rope_dim) if m.attention == "mla" else ("head_dim", m.head_width)
    parts = {
        "attention=mla with qk_norm": m.attention == "mla" and m.qk_norm,
        "positions=alibi": m.positions == "alibi",
        "sinks": m.sinks,
        "norm_position=post": m.norm_position == "post",
        "qk_norm_width=projection": m.qk_norm and m.qk_norm_width == "projection",
        f"norms_per_layer={m.norms_per_layer}": m.norms_per_layer not in (2, 4),
        f"rotary positions with the odd {field}={width}": m.positions == "rope" and width % 2 == 1,
    }
    return [part for part, present in parts.items() if present]


class TransformerHasParts(Rule):
    code = "MW-BUILD-002"
    needs = ("model", "trainer")

    @staticmethod
    def broken(p: Case) -> Flag:
        return bool(unsupported_parts(p.model))

    @staticmethod
    def explain(p: Case) -> Problem:
        return Problem(
            f"{p.model.name} has {unsupported_parts(p.model)[0]}, which our transformer does not implement",
            why="It can be planned and costed, not trained",
            valid=["positions=rope|learned|none", "norms_per_layer=2|4", "an even rotary width"],
        )


class PositionsAreLearned(Rule):
    code = "MW-BUILD-003"
    needs = ("model", "workload", "trainer")

    @staticmethod
    def broken(p: Case) -> Flag:
        m = p.model
        return m.kind == "transformer" and m.positions == "learned" and p.workload.seq > m.max_positions

    @staticmethod
    def explain(p: Case) -> Problem:
        most = p.model.max_positions
        return Problem(
            f"a sequence of {p.workload.seq} with {most} learned positions",
            why="A position beyond the table has no embedding",
            fixes=values("workload.seq", [most], most) if most else (),
        )


class GatheredColumnsDivide(Rule):
    code = "MW-PAR-001"
    needs = ("model", "trainer")

    @staticmethod
    def broken(p: Case) -> Flag:
        return (p.model.kind == "transformer") & (p.tp_form == GATHERED) & (p.model.hidden % p.tp != 0)

    @staticmethod
    def explain(p: Case) -> Problem:
        return Problem(
            f"plan.tp_form=all-gather with tp={p.tp} can be planned, but `train` does not support it",
            why=f"Each rank computes hidden/tp columns, and {p.tp} does not divide hidden {p.model.hidden}",
            fixes=[{"plan.tp_form": "megatron"}],
        )


class GathersAreTrained(Rule):
    code = "MW-PAR-001"
    needs = ("trainer",)

    @staticmethod
    def broken(p: Case) -> Flag:
        return p.gather_dtype == FP8_GATHERS

    @staticmethod
    def explain(p: Case) -> Problem:
        return Problem(
            "plan.gather_dtype=fp8 can be planned, but `train` does not support it",
            why="fp8 all-gathers are modelled only: our trainer gathers activations and weights in their own dtype",
            fixes=[{"plan.gather_dtype": "same"}],
        )


class GathersNeedFp8Products(Rule):
    code = "MW-PLAN-018"
    needs = ("workload",)

    @staticmethod
    def broken(p: Case) -> Flag:
        return (p.gather_dtype == FP8_GATHERS) & (p.workload.precision not in FP8)

    @staticmethod
    def explain(p: Case) -> Problem:
        return Problem(
            f"plan.gather_dtype=fp8 with workload.precision={p.workload.precision}",
            why="A tensor is gathered in fp8 because the product that reads it multiplies in fp8; other products would lose precision",
            valid=["gather_dtype=same", *(f"precision={name}" for name in FP8)],
            fixes=[{"plan.gather_dtype": "same"}, *({"workload.precision": name} for name in FP8)],
        )


class TokensDivideOverTensorRanks(Rule):
    code = "MW-EP-001"
    needs = ("model", "workload", "trainer")

    @staticmethod
    def broken(p: Case) -> Flag:
        if not p.model.experts:
            return False
        tokens = p.microbatch * (p.workload.seq // p.cp)
        return (p.sp == False) & (tokens % p.tp != 0)  # noqa: E712

    @staticmethod
    def explain(p: Case) -> Problem:
        return Problem(
            f"{p.microbatch * (p.workload.seq // p.cp)} tokens of a micro-batch over tp={p.tp}",
            why="Without sequence parallelism each tensor-parallel rank routes an equal slice of the tokens",
            fixes=[{"plan.sp": True}, {"plan.microbatch": p.microbatch * p.tp}, {"plan.microbatch": p.tp}],
        )


class ParametersAreTrained(Rule):
    code = "MW-TRAIN-001"
    needs = ("dtypes",)

    @staticmethod
    def broken(p: Case) -> Flag:
        out: Flag = False
        for code in NOT_TRAINED:
            out = out | (p.param_dtype == code)
        return out

    @staticmethod
    def explain(p: Case) -> Problem:
        return Problem(
            f"plan.param_dtype={p.word('param_dtype')} can be planned, but `train` does not support it",
            valid=TRAINED_DTYPES,
            fixes=[
                *({"plan.param_dtype": dtype} for dtype in ("bf16", "fp32")),
                {"plan.param_dtype": "fp32", "workload.precision": "fp32"},
            ],
        )


class ProductsAreTrained(Rule):
    code = "MW-TRAIN-001"
    needs = ("workload", "dtypes")

    @staticmethod
    def broken(p: Case) -> Flag:
        precision = p.workload.precision
        if precision == "fp8":
            return False
        own = p.param_dtype == DTYPES.index(precision) if precision in DTYPES else False
        return (own | ((precision == "tf32") & (p.param_dtype == DTYPES.index("fp32")))) == False  # noqa: E712

    @staticmethod
    def explain(p: Case) -> Problem:
        dtype, precision = p.word("param_dtype"), p.workload.precision
        products = (dtype, "fp8", *(["tf32"] if dtype == "fp32" else []))
        return Problem(
            f"workload.precision={precision} with plan.param_dtype={dtype} can be planned, but `train` does not support it",
            why="Products are computed in the parameters' dtype, or in fp8",
            valid=products,
            fixes=[{"workload.precision": dtype}, {"plan.param_dtype": precision}]
            if precision in DTYPES
            else [{"workload.precision": dtype}],
        )


RUN_RULES: tuple[type[Rule], ...] = (
    BatchDivides,
    ScheduleHasMicrobatches,
    ProgramIsBounded,
    InterleavedRounds,
    ModelHasShape,
    TransformerHasParts,
    PositionsAreLearned,
    GatheredColumnsDivide,
    GathersAreTrained,
    GathersNeedFp8Products,
    TokensDivideOverTensorRanks,
    ParametersAreTrained,
    ProductsAreTrained,
)
