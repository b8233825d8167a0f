"""Rules of our own trainer: what `meshwright train` and `verify` can run. What breaks one can be planned and estimated: it is modelled only.

`needs = ("trainer",)`: whatever dtypes it runs in. `needs = ("dtypes",)`: in the plan's own dtypes.
"""

from meshwright.describe.legality.case import Case, Flag, LegalityRule, Problem, values
from meshwright.describe.legality.plan_rules import GATHERED
from meshwright.describe.legality.run_rules import FP8_GATHERS
from meshwright.describe.model import Model
from meshwright.describe.plan_fields import DTYPES
from meshwright.describe.variants import ATTENTIONS, OPTIMIZERS

TRAINED_DTYPES = ("fp32", "fp64", "bf16", "fp16")  # parameter dtypes that `train` runs
FP16 = DTYPES.index("fp16")
NOT_TRAINED = tuple(DTYPES.index(dtype) for dtype in DTYPES if dtype not in TRAINED_DTYPES)


class ModelHasShape(LegalityRule, code="MW-BUILD-001", needs=("model", "trainer")):
    def broken(self, p: Case) -> Flag:
        return p.model.kind == "counts" and not p.model.resnet.stages

    def explain(self, p: Case) -> Problem:
        return Problem(
            f"{p.model.name} cannot be built",
            why="It is described by its totals only, not by its shape",
            valid=["kind=transformer", "kind=mlp", "a [model.resnet] table"],
        )


def unsupported_parts(m: Model) -> list[str]:
    """List the parts of a model that our transformer does not implement."""
    if m.kind != "transformer":
        return []
    post, one = m.norm_position == "post", m.norms_per_layer == 1
    field, width = ("rope_dim" if m.rope_dim else "head_dim"), m.rotated_width
    kind = ATTENTIONS[m.attention]
    parts = {
        **{f"attention={kind.name} with {flag}": bool(getattr(m, flag)) for flag in kind.not_trained},
        "positions=alibi": m.positions == "alibi",
        f"norms_per_layer={m.norms_per_layer}{' with norm_position=post' * post}{' without parallel_residual' * one}": (
            m.norms_per_layer not in ((2,) if post else (1, 2) if m.parallel_residual else (2, 4))
        ),
        f"embedding_dim={m.embedding_dim}": bool(m.embedding_dim),
        f"the extra weight {m.extra[0].name if m.extra else ''} (extra)": bool(m.extra),
        f"layers of the kinds {', '.join(m.kinds)} (pattern)": bool(m.pattern),
        f"linear mixers ({m.linear.kind})": bool(m.linear.kind),
        f"attention={kind.name}": kind.planning_only,
        f"{m.streams} residual streams (streams)": m.streams > 1,
        "sparse attention (index_heads)": bool(m.index_heads),
        "an output gate of attention (output_gate)": m.output_gate,
        "multi-token prediction (mtp_layers)": bool(m.mtp_layers),
        "latent experts (expert_hidden)": bool(m.expert_hidden),
        f"rotary positions with the odd {field}={width}": m.positions == "rope" and width % 2 == 1,
    }
    return [part for part, present in parts.items() if present]


class TransformerHasParts(LegalityRule, code="MW-BUILD-002", needs=("model", "trainer")):
    def broken(self, p: Case) -> Flag:
        return bool(unsupported_parts(p.model))

    def explain(self, p: Case) -> Problem:
        return Problem(
            f"{p.model.name} has {', '.join(unsupported_parts(p.model))}, which our transformer does not implement",
            why="It can be planned and costed, not trained",
            valid=[
                f"attention ({' or '.join(n for n, kind in ATTENTIONS.items() if not kind.planning_only)}) with an FFN or experts in every layer",
                "positions=rope|learned|none",
                "norms_per_layer=2|4, or 1 with parallel_residual",
                "an even rotary width",
            ],
        )


class ModelIsComputed(LegalityRule, code="MW-BUILD-005", needs=("model", "trainer")):
    def broken(self, p: Case) -> Flag:
        return bool(p.model.differences)

    def explain(self, p: Case) -> Problem:
        names = ",".join(entry.partition(":")[0] for entry in p.model.differences)
        return Problem(
            f"`train` and `verify` would compute another model than {p.model.name}: {'; '.join(p.model.differences)}",
            why=f"They do not implement these parts. --allow-differences {names} runs without them, and the report says so",
        )


class ConvolutionsAreWide(LegalityRule, code="MW-BUILD-002", needs=("model", "workload", "trainer")):
    def broken(self, p: Case) -> Flag:
        return bool(p.model.resnet.stages) and p.workload.precision == "fp8"

    def explain(self, p: Case) -> Problem:
        return Problem(
            f"workload.precision=fp8 with the convolutions of {p.model.name}",
            why="`train` and `verify` compute products of layers in fp8, not convolutions",
            fixes=[{"workload.precision": "bf16"}, {"workload.precision": "fp32"}],
        )


class PositionsAreLearned(LegalityRule, code="MW-BUILD-003", needs=("model", "workload", "trainer")):
    def broken(self, p: Case) -> Flag:
        m = p.model
        return m.kind == "transformer" and m.positions == "learned" and p.workload.seq > m.max_positions

    def explain(self, p: Case) -> Problem:
        most = p.model.max_positions
        return Problem(
            f"a sequence of {p.workload.seq} with {most} learned positions",
            why="A position beyond the table has no embedding",
            fixes=values("workload.seq", [most], most) if most else (),
        )


class GatheredColumnsDivide(LegalityRule, code="MW-PAR-001", needs=("model", "trainer")):
    def broken(self, p: Case) -> Flag:
        return (p.model.kind == "transformer") & (p.tp_form == GATHERED) & (p.model.hidden % p.tp != 0)

    def explain(self, p: Case) -> Problem:
        return Problem(
            f"plan.tp_form=all-gather with tp={p.tp} is modelled only: `train` and `verify` do not run it",
            why=f"Each rank computes hidden/tp columns, and {p.tp} does not divide hidden {p.model.hidden}",
            fixes=[{"plan.tp_form": "megatron"}],
        )


class SequenceGathersAreTrained(LegalityRule, code="MW-PAR-001", needs=("trainer",)):
    def broken(self, p: Case) -> Flag:
        weights = (p.zero == 3) & (p.shard * p.cp > 1)
        return (p.gather_dtype == FP8_GATHERS) & (p.tp > 1) & p.sp & (weights == False)  # noqa: E712

    def explain(self, p: Case) -> Problem:
        return Problem(
            "plan.gather_dtype=fp8 with sp and without ZeRO-3 is modelled only: `train` and `verify` do not run it",
            why="Our trainer gathers the weights of ZeRO-3 in fp8, and the activations of sequence parallelism in 16 bits",
            fixes=[{"plan.gather_dtype": "same"}, {"plan.sp": False}],
        )


class TokensDivideOverTensorRanks(LegalityRule, code="MW-EP-001", needs=("model", "workload", "trainer")):
    def broken(self, p: Case) -> Flag:
        if not p.model.experts:
            return False
        tokens = p.microbatch * (p.workload.seq // p.cp)
        return (p.sp == False) & (tokens % p.tp != 0)  # noqa: E712

    def explain(self, p: Case) -> Problem:
        return Problem(
            f"{p.microbatch * (p.workload.seq // p.cp)} tokens of a micro-batch over tp={p.tp}",
            why="Without sequence parallelism each tensor-parallel rank routes an equal slice of the tokens",
            fixes=[{"plan.sp": True}, {"plan.microbatch": p.microbatch * p.tp}, {"plan.microbatch": p.tp}],
        )


class ParametersAreTrained(LegalityRule, code="MW-TRAIN-001", needs=("dtypes",)):
    def broken(self, p: Case) -> Flag:
        out: Flag = False
        for code in NOT_TRAINED:
            out = out | (p.param_dtype == code)
        return out

    def explain(self, p: Case) -> Problem:
        return Problem(
            f"plan.param_dtype={p.word('param_dtype')} is modelled only: `train` and `verify` do not run it",
            valid=TRAINED_DTYPES,
            fixes=[
                *({"plan.param_dtype": dtype} for dtype in ("bf16", "fp32")),
                {"plan.param_dtype": "fp32", "workload.precision": "fp32"},
            ],
        )


class ProductsAreTrained(LegalityRule, code="MW-TRAIN-001", needs=("workload", "dtypes")):
    def broken(self, p: Case) -> Flag:
        precision = p.workload.precision
        if precision == "fp8":
            return False
        own = p.param_dtype == DTYPES.index(precision) if precision in DTYPES else False
        return (own | ((precision == "tf32") & (p.param_dtype == DTYPES.index("fp32")))) == False  # noqa: E712

    def explain(self, p: Case) -> Problem:
        dtype, precision = p.word("param_dtype"), p.workload.precision
        products = (dtype, "fp8", *(["tf32"] if dtype == "fp32" else []))
        return Problem(
            f"workload.precision={precision} with plan.param_dtype={dtype} is modelled only: `train` and `verify` do not run it",
            why="Products are computed in the parameters' dtype, or in fp8",
            valid=products,
            fixes=[{"plan.param_dtype": precision}, {"workload.precision": dtype}]
            if precision in TRAINED_DTYPES
            else [{"workload.precision": dtype}],
        )


class AdamNeedsRange(LegalityRule, code="MW-PLAN-019", needs=("workload", "dtypes")):
    def broken(self, p: Case) -> Flag:
        return (p.param_dtype == FP16) & (p.master == False) & OPTIMIZERS[p.workload.optimizer].divides  # noqa: E712

    def explain(self, p: Case) -> Problem:
        return Problem(
            f"plan.param_dtype=fp16 without master weights under {p.workload.optimizer}",
            why="Our trainer then keeps the moments in fp16 too: epsilon (1e-8) and squares of gradients below 2.4e-4 round to zero, and "
            "the first update divides by zero",
            valid=["master=true", "param_dtype=bf16", "optimizer=momentum|sgd"],
            fixes=[
                {"plan.master": True},
                {"plan.param_dtype": "bf16", "workload.precision": "bf16"},
            ],
        )
