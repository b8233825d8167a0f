"""Rules of our own trainer: what `meshwright train` and `verify` can run. What breaks one can be planned and estimated: it is modelled only.

`needs = ("trainer",)`: whatever dtypes it runs in. `needs = ("dtypes",)`: in the plan's own dtypes.
"""

import numpy as np

from meshwright.describe.legality.case import Case, Problem, Reading, rule, values
from meshwright.describe.legality.plan_rules import GATHERED
from meshwright.describe.legality.run_rules import FP8_GATHERS
from meshwright.describe.model import Model
from meshwright.describe.plan_fields import DTYPES
from meshwright.describe.variants import ATTENTIONS, COMPRESSIONS, OPTIMIZERS

TRAINED_DTYPES = ("fp32", "fp64", "bf16", "fp16")  # parameter dtypes that `train` runs
FP16 = DTYPES.index("fp16")
ABSOLUTE = COMPRESSIONS.names.index("absolute-threshold")
NOT_TRAINED = tuple(DTYPES.index(dtype) for dtype in DTYPES if dtype not in TRAINED_DTYPES)


@rule("MW-BUILD-001", "model", "trainer")
def model_has_shape(p: Case) -> Reading:
    yield p.model.kind == "counts" and not p.model.resnet.stages
    yield Problem(
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


@rule("MW-BUILD-002", "model", "trainer")
def transformer_has_parts(p: Case) -> Reading:
    yield bool(unsupported_parts(p.model))
    yield Problem(
        f"{p.model.name} has {', '.join(unsupported_parts(p.model))}, which our transformer does not implement",
        why="It can be planned and costed, not trained",
        valid=[
            f"attention ({' or '.join(n for n, kind in ATTENTIONS.items() if not kind.planning_only)}) with an FFN or experts in every layer",
            "positions=rope|learned|none",
            "norms_per_layer=2|4, or 1 with parallel_residual",
            "an even rotary width",
        ],
    )


@rule("MW-BUILD-005", "model", "trainer")
def model_is_computed(p: Case) -> Reading:
    yield bool(p.model.differences)
    names = ",".join(entry.partition(":")[0] for entry in p.model.differences)
    yield Problem(
        f"`train` and `verify` would compute another model than {p.model.name}: {'; '.join(p.model.differences)}",
        why=f"They do not implement these parts. --allow-differences {names} runs without them, and the report says so",
    )


@rule("MW-BUILD-002", "model", "workload", "trainer")
def convolutions_are_wide(p: Case) -> Reading:
    yield bool(p.model.resnet.stages) and p.workload.precision == "fp8"
    yield Problem(
        f"workload.precision=fp8 with the convolutions of {p.model.name}",
        why="`train` and `verify` compute products of layers in fp8, not convolutions",
        fixes=[{"workload.precision": "bf16"}, {"workload.precision": "fp32"}],
    )


@rule("MW-BUILD-003", "model", "workload", "trainer")
def positions_are_learned(p: Case) -> Reading:
    m = p.model
    yield m.kind == "transformer" and m.positions == "learned" and p.workload.seq > m.max_positions
    most = m.max_positions
    yield Problem(
        f"a sequence of {p.workload.seq} with {most} learned positions",
        why="A position beyond the table has no embedding",
        fixes=values("workload.seq", [most], most) if most else (),
    )


@rule("MW-PAR-001", "model", "trainer")
def gathered_columns_divide(p: Case) -> Reading:
    yield (p.model.kind == "transformer") & (p.tp_form == GATHERED) & (p.model.hidden % p.tp != 0)
    yield Problem(
        f"plan.tp_form=all-gather with tp={p.tp} is modelled only: `train` and `verify` do not run it",
        why=f"Each rank computes hidden/tp columns, and {p.tp} does not divide hidden {p.model.hidden}",
        fixes=[{"plan.tp_form": "megatron"}],
    )


@rule("MW-PAR-001", "trainer")
def sequence_gathers_are_trained(p: Case) -> Reading:
    weights = (p.zero == 3) & (p.shard * p.cp > 1)
    yield (p.gather_dtype == FP8_GATHERS) & (p.tp > 1) & p.sp & np.logical_not(weights)
    yield Problem(
        "plan.gather_dtype=fp8 with sp and without ZeRO-3 is modelled only: `train` and `verify` do not run it",
        why="Our trainer gathers the weights of ZeRO-3 in fp8, and the activations of sequence parallelism in 16 bits",
        fixes=[{"plan.gather_dtype": "same"}, {"plan.sp": False}],
    )


@rule("MW-EP-001", "model", "workload", "trainer")
def tokens_divide_over_tensor_ranks(p: Case) -> Reading:
    if not p.model.experts:
        return
    tokens = p.microbatch * (p.workload.seq // p.cp)
    yield np.logical_not(p.sp) & (tokens % p.tp != 0)
    yield Problem(
        f"{tokens} tokens of a micro-batch over tp={p.tp}",
        why="Without sequence parallelism each tensor-parallel rank routes an equal slice of the tokens",
        fixes=[{"plan.sp": True}, {"plan.microbatch": p.microbatch * p.tp}, {"plan.microbatch": p.tp}],
    )


@rule("MW-TRAIN-001", "dtypes")
def parameters_are_trained(p: Case) -> Reading:
    yield np.isin(p.param_dtype, NOT_TRAINED)
    yield Problem(
        f"plan.param_dtype={p.word('param_dtype')} is modelled only: `train` and `verify` do not run it",
        valid=TRAINED_DTYPES,
        fixes=[
            *({"plan.param_dtype": dtype} for dtype in ("bf16", "fp32")),
            {"plan.param_dtype": "fp32", "workload.precision": "fp32"},
        ],
    )


@rule("MW-TRAIN-001", "workload", "dtypes")
def products_are_trained(p: Case) -> Reading:
    precision = p.workload.precision
    if precision == "fp8":
        return
    own = p.param_dtype == DTYPES.index(precision) if precision in DTYPES else False
    yield np.logical_not(own | ((precision == "tf32") & (p.param_dtype == DTYPES.index("fp32"))))
    dtype = p.word("param_dtype")
    yield Problem(
        f"workload.precision={precision} with plan.param_dtype={dtype} is modelled only: `train` and `verify` do not run it",
        why="Products are computed in the parameters' dtype, or in fp8",
        valid=[dtype, "fp8", *["tf32"] * (dtype == "fp32")],
        fixes=[*[{"plan.param_dtype": precision}] * (precision in TRAINED_DTYPES), {"workload.precision": dtype}],
    )


@rule("MW-COMP-004", "dtypes")
def absolute_threshold_needs_unscaled_gradients(p: Case) -> Reading:
    yield (p.param_dtype == FP16) & (p.compression == ABSOLUTE)
    yield Problem(
        "plan.compression=absolute-threshold with plan.param_dtype=fp16",
        why="The loss is scaled in fp16, and gradients with it: a threshold would mean another number in every step",
        valid=["param_dtype=bf16", "compression=threshold", "compression=top-k"],
        fixes=[{"plan.compression": "threshold"}, {"plan.param_dtype": "bf16", "workload.precision": "bf16"}],
    )


@rule("MW-PLAN-019", "workload", "dtypes")
def adam_needs_range(p: Case) -> Reading:
    yield (p.param_dtype == FP16) & np.logical_not(p.master) & OPTIMIZERS[p.workload.optimizer].divides
    yield Problem(
        f"plan.param_dtype=fp16 without master weights under {p.workload.optimizer}",
        why="Our trainer then keeps the moments in fp16 too: epsilon (1e-8) and squares of gradients below 2.4e-4 round to zero, and "
        "the first update divides by zero",
        valid=["master=true", "param_dtype=bf16", "optimizer=momentum|sgd"],
        fixes=[{"plan.master": True}, {"plan.param_dtype": "bf16", "workload.precision": "bf16"}],
    )


@rule("MW-ADPT-015", "model", "workload", "trainer")
def adapters_in_fp8(p: Case) -> Reading:
    """A base in fp8 has a scale for each row of a matrix."""
    runs = p.model.adapter.base == "fp8" and p.workload.scaling == "row" and not p.model.experts
    yield p.model.adapter.on and p.workload.precision == "fp8" and not runs
    yield Problem(
        "workload.precision=fp8 with [adapter] is modelled only: `train` and `verify` run it with base=fp8 and scaling=row, without experts",
        why="Other fp8 products compute the gradient of their weight, which a frozen base does not have",
        valid=["adapter.base=fp8 with workload.scaling=row"],
        fixes=[{"workload.precision": "bf16"}, {"workload.precision": "fp32"}],
    )


@rule("MW-ADPT-015", "model", "trainer")
def experts_drop_no_inputs(p: Case) -> Reading:
    adapter = p.model.adapter
    on_experts = any(x.rank and x.style.startswith("experts") for b in p.model.blocks.values() for x in b.linears)
    yield adapter.dropout > 0 and on_experts
    yield Problem(
        f"adapter.dropout={adapter.dropout:g} with adapters of routed experts is modelled only: `train` and `verify` do not run it",
        why="Copies of tokens that were sent to experts do not know their positions, from which masks are computed (PEFT has none there either)",
        valid=["adapter.dropout=0", "adapter.targets without experts"],
    )


@rule("MW-ADPT-015", "model", "trainer")
def stages_train(p: Case) -> Reading:
    """torch's pipeline stages run a backward each, which needs something to train."""
    m = p.model
    kinds = set(m.layer_kinds) if m.kind == "transformer" else set()
    idle = any(not m.blocks[k].trained for k in kinds)
    yield (p.pp > 1) & bool(m.adapter.on and idle)
    yield Problem(
        f"pp={p.pp} with layers in which nothing trains is modelled only: `train` and `verify` do not run it",
        why="A pipeline stage without a trained parameter has no backward",
        fixes=[{"plan.pp": 1}],
    )
