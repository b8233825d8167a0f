"""One legality predicate: the same result for one plan and for a batch, and every offered fix is legal."""

import itertools
import shlex

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.describe import catalog, legality
from meshwright.describe.adapter import Adapter
from meshwright.describe.config import Config
from meshwright.describe.legality import ALL_RULES, Case
from meshwright.describe.legality.case import RULES
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.plan_fields import AXES, ORDERS, PlanArrays, PlanFields, decode, encode, encoded
from meshwright.describe.plan_fields import FIELDS as ALL_FIELDS
from meshwright.describe.schedules import SCHEDULES
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.programs.pipelines import refusal

MODELS = [
    catalog.load("models", name) for name in ("llama3-8b", "mixtral-8x7b", "lecture-mlp", "resnet-50", "deepseek-v3")
]
MODELS += [
    Model(hidden=48, layers=6, heads=12, kv_heads=3, ffn=36, vocab=64, positions="learned", max_positions=64),
    Model(
        hidden=32,
        layers=4,
        heads=4,
        ffn=24,
        vocab=64,
        experts=6,
        top_k=2,
        expert_ffn=33,
        dense_layers=1,
        shared_experts=1,
    ),
]
DEGREE = st.sampled_from([1, 1, 1, 2, 2, 3, 4, 6, 8])
FIELDS = st.fixed_dictionaries(
    dict.fromkeys(("replicate", "shard", "tp", "cp", "pp", "ep", "microbatch"), DEGREE),
    optional={
        "virtual": st.integers(1, 4),
        "schedule": st.sampled_from(SCHEDULES.names),
        "zero": st.integers(0, 3),
        "sp": st.booleans(),
        "cp_kind": st.sampled_from(["ring", "ulysses", "all-gather"]),
        "expert_tp": st.sampled_from([0, 1, 2, 3]),
        "tp_form": st.sampled_from(["megatron", "all-gather"]),
        "gather_dtype": st.sampled_from(["same", "same", "fp8"]),
        "average_every": st.sampled_from([0, 4]),
        "recompute": st.sampled_from(["none", "selective", "full", "auto"]),
        "recompute_every": st.sampled_from([1, 2]),
        "recompute_budget": st.sampled_from([0, 1e9]),
        "compression": st.sampled_from(["none", "int8"]),
        "layers_per_stage": st.sampled_from([(), (2, 2), (3, 3), (2, 1, 1)]),
        "order": st.sampled_from([(), *ORDERS[:3], ("tp", "tp", "pp", "dp")]),
        "param_dtype": st.sampled_from(["bf16", "fp8", "fp32", "fp16"]),
        "master": st.booleans(),
    },
)


@st.composite
def cases(draw) -> Case:
    """Any plan on any model, with any subset of workload, cluster, stack and trainer."""
    plan = PlanFields(**draw(FIELDS))
    stack = Stack(interleaved_rounds=draw(st.booleans()))
    precision = draw(st.sampled_from(["bf16", "bf16", "fp8", "fp4", "tf32"]))
    workload = Workload(
        batch=draw(st.sampled_from([1, 7, 24, 64, 96])), seq=draw(st.sampled_from([12, 64, 250])), precision=precision
    )
    gpus = draw(st.sampled_from([plan.world, 8, 12, 24]))
    cluster = catalog.load("clusters", "dgx-a100").with_gpus(min(gpus, 10**6))
    known = draw(st.integers(0, 4))
    trainer = draw(st.booleans())
    return Case(
        plan,
        draw(st.sampled_from(MODELS)) if known > 0 else None,
        workload if known > 1 else None,
        cluster if known > 2 else None,
        stack if known > 3 else None,
        trainer=trainer,
        dtypes=trainer and draw(st.booleans()),
    )


def as_one_batch(several: list[Case]) -> Case:
    """Cases with the same model, workload, cluster and stack as one batch."""
    columns = {
        name: np.array([case.columns[name] for case in several]) for name in ALL_FIELDS if name != "layers_per_stage"
    }
    lengths = [case.columns["layers_per_stage"] for case in several]
    return several[0].with_columns(columns | {"layers_per_stage": np.fromiter(lengths, object, len(lengths))})


@settings(max_examples=75)
@given(cases(), st.lists(FIELDS, min_size=1, max_size=6))
def test_a_batch_is_legal_where_its_plans_are(case, others) -> None:
    given = (case.model, case.workload, case.cluster, case.stack, case.trainer, case.dtypes)
    several = [case, *(Case(PlanFields(**fields), *given) for fields in others)]
    answers = [bool(legality.legal(one)) for one in several]
    assert np.broadcast_to(legality.legal(as_one_batch(several)), len(several)).tolist() == answers


def applied(case: Case, fix: str) -> Case:
    """The case after the options of a fix, parsed as the command line parses them."""
    from meshwright.describe.draft import parse_value

    words = shlex.split(fix)
    assert words[::2] == ["--set"] * (len(words) // 2)
    settings = {}
    for word in words[1::2]:
        path, _, text = word.partition("=")
        value = parse_value(text, path)
        settings[path] = tuple(value) if isinstance(value, list) else value
    return case.with_settings(settings)


@settings(max_examples=150)
@given(cases())
def test_an_offered_fix_is_legal(case) -> None:
    error = legality.problem(case)
    assert (error is None) == bool(legality.legal(case))
    if error is not None and error.fix:
        assert bool(legality.legal(applied(case, error.fix))), f"{error}"


LLAMA, MIXTRAL, MLP, COUNTS, _, LEARNED, ODD = MODELS
TOTALS = Model(name="totals", kind="counts", given_parameters=1e6, given_flops=1e9)
PLAIN_MOE = ODD.but(shared_experts=0)
COMPRESSED = LLAMA.but(
    attention="compressed", q_rank=16, head_dim=16, kv_heads=1, window=8, compressed={"out_groups": 4, "out_rank": 8}, pattern="W-W-",
)  # fmt: skip
LINEAR = LLAMA.but(pattern="M-M*-", linear={"kind": "mamba2", "heads": 4, "head_dim": 16, "groups": 4, "state": 16})
# The plan, model, workload and devices with which each rule is the first to break.
EXAMPLES = {
    "shard_needs_zero": ({"shard": 2}, None, {}),
    "order_names_each_axis": ({"order": ("tp", "tp", "pp", "dp")}, None, {}),
    "sequence_parallel_needs_megatron_form": ({"sp": True, "tp_form": "all-gather"}, None, {}),
    "chosen_layers_need_full": ({"recompute_every": 2}, None, {}),
    "offloaded_layers_need_activations": ({"offload": "states", "offload_layers": 2}, None, {}),
    "budget_needs_auto": ({"recompute_budget": 1e9}, None, {}),
    "local_sgd_needs_whole_replicas": ({"average_every": 4}, None, {}),
    "stages_per_rank": ({"pp": 2, "schedule": "zbv"}, None, {}),
    "one_entry_per_stage": ({"pp": 2, "layers_per_stage": (4,)}, None, {}),
    "device_has_precision": ({"tp": 8}, LLAMA, {"precision": "fp8"}),
    "degrees_multiply_to_devices": ({"tp": 4}, LLAMA, {}),
    "counts_take_data_parallelism": ({"pp": 8}, COUNTS, {}),
    "counts_are_recomputed": ({"replicate": 8, "recompute": "selective"}, COUNTS, {}),
    "stages_have_layers": ({"pp": 8}, PLAIN_MOE, {}),
    "stages_sum_to_layers": ({"pp": 2, "replicate": 4, "layers_per_stage": (4, 4)}, LLAMA, {}),
    "tensor_divides_heads": ({"tp": 8}, PLAIN_MOE, {}),
    "mlp_has_no_sequence": ({"cp": 8}, MLP, {}),
    "tensor_fits_kv_heads": ({"tp": 2, "replicate": 4}, LEARNED, {}),
    "local_sgd_needs_dense_model": ({"replicate": 8, "average_every": 4}, PLAIN_MOE, {}),
    "tensor_divides_ffn": ({"tp": 2, "replicate": 4}, ODD, {}),
    "adapters_need_row_splits": ({"tp": 8, "tp_form": "all-gather"}, LLAMA.but(adapter=Adapter(rank=4)), {}),
    "adapters_in_fp8": ({"replicate": 8}, LLAMA.but(adapter=Adapter(rank=4)), {"precision": "fp8"}),
    "experts_drop_no_inputs": (
        {"replicate": 8},
        MIXTRAL.but(adapter=Adapter(rank=4, targets=("all-linear",), dropout=0.1)),
        {},
    ),
    "stages_train": ({"pp": 8}, LLAMA.but(adapter=Adapter(trains=("lm_head",))), {}),
    "tensor_divides_output_groups": ({"tp": 8}, COMPRESSED, {}),
    "tensor_divides_linear": ({"tp": 8}, LINEAR, {}),
    "context_divides_linear": ({"cp": 8}, LINEAR, {}),
    "sequence_parallel_divides_sequence": ({"tp": 8, "sp": True}, LLAMA, {"seq": 100}),
    "context_divides_sequence": ({"cp": 8}, LLAMA, {"seq": 8}),
    "ulysses_divides_heads": ({"tp": 1, "cp": 8, "cp_kind": "ulysses"}, LEARNED, {}),
    "experts_exist": ({"ep": 2, "replicate": 8}, LLAMA, {}),
    "loads_are_of_the_experts": ({"replicate": 8}, MIXTRAL, {"loads": (1.0, 2.0)}),
    "experts_divide": ({"ep": 4, "replicate": 8}, PLAIN_MOE, {}),
    "expert_tensor_divides_tensor": ({"tp": 2, "replicate": 4, "expert_tp": 3}, PLAIN_MOE, {}),
    "expert_tensor_divides_width": ({"tp": 2, "replicate": 4}, PLAIN_MOE, {}),
    "expert_ranks_divide": ({"ep": 3, "replicate": 8}, PLAIN_MOE, {}),
    "batch_divides": ({"replicate": 8}, LLAMA, {"batch": 12}),
    "schedule_has_microbatches": ({"pp": 8, "virtual": 2, "schedule": "dualpipev"}, LLAMA, {"batch": 15}),
    "program_is_bounded": ({"pp": 8}, LLAMA, {"batch": 10**7}),
    "interleaved_rounds": ({"pp": 8, "virtual": 2, "schedule": "interleaved"}, LLAMA, {"batch": 12}),
    "muon_needs_matrices": ({"replicate": 8}, COUNTS, {"optimizer": "muon"}),
    "model_has_shape": ({"replicate": 8}, TOTALS, {}),
    "convolutions_are_wide": ({"replicate": 8}, COUNTS, {"precision": "fp8", "scaling": "tensor"}),
    "transformer_has_parts": ({"tp": 8}, LLAMA.but(positions="alibi"), {}),
    "model_is_computed": ({"tp": 8}, LLAMA.but(not_run=("jitter: noise",)), {}),
    "positions_are_learned": ({"replicate": 8}, LEARNED, {"seq": 65}),
    "gathered_columns_divide": ({"tp": 8, "tp_form": "all-gather"}, LLAMA.but(hidden=4100, head_dim=128), {}),
    "sequence_gathers_are_trained": ({"tp": 8, "sp": True, "gather_dtype": "fp8"}, None, {}),
    "absolute_threshold_needs_unscaled_gradients": (
        {"replicate": 8, "param_dtype": "fp16", "compression": "absolute-threshold"},
        LLAMA,
        {"precision": "fp16"},
    ),
    "adam_needs_range": ({"tp": 8, "param_dtype": "fp16", "master": False}, LLAMA, {"precision": "fp16"}),
    "row_scaling_needs_fp8": ({"replicate": 8}, LLAMA, {"scaling": "row"}),
    "row_scaling_needs_whole_rows": ({"tp": 8}, LLAMA, {"scaling": "row", "precision": "fp8"}),
    "row_scaling_gathers_experts": (
        {"shard": 8, "zero": 3, "gather_dtype": "fp8"},
        LLAMA,
        {"scaling": "row", "precision": "fp8"},
    ),
    "gathers_need_fp8_products": ({"tp": 8, "sp": True, "gather_dtype": "fp8"}, LLAMA, {}),
    "tokens_divide_over_tensor_ranks": ({"tp": 8}, MIXTRAL, {"seq": 100}),
    "parameters_are_trained": ({"tp": 8, "param_dtype": "fp8"}, LLAMA, {}),
    "products_are_trained": ({"tp": 8, "param_dtype": "fp32"}, LLAMA, {}),
    "stack_has_axis": ({"cp": 8}, LLAMA, {}),
    "stack_has_schedule": ({"pp": 8, "virtual": 2, "schedule": "dualpipev"}, LLAMA, {}),
    "stack_has_zero": ({"shard": 8, "zero": 2}, LLAMA, {}),
    "stack_has_context_kind": ({"cp": 8, "cp_kind": "ring"}, LLAMA, {}),
    "stack_has_recompute": ({"replicate": 8, "recompute": "selective"}, LLAMA, {}),
    "stack_divides_kv_heads": ({"tp": 8, "sp": True}, LLAMA.but(kv_heads=2), {}),
    "stack_has_even_stages": ({"pp": 8}, LLAMA.but(layers=30), {}),
    "stack_states_stages": ({"pp": 4, "virtual": 5, "schedule": "interleaved", "replicate": 2}, LLAMA, {}),
    "stack_shards_over_context": ({"cp": 8, "cp_kind": "all-gather"}, LLAMA, {}),
}
# What a framework can run, where it decides: each rule of a stack is broken by its example and by no other limit.
LIMITS = {
    "stack_has_axis": {"without": ["cp"]},
    "stack_has_schedule": {"schedules": ["1f1b"]},
    "stack_has_zero": {"zero": [0, 3]},
    "stack_has_context_kind": {"cp_kinds": ["all-gather"]},
    "stack_has_recompute": {"recomputes": ["none", "full"]},
    "stack_divides_kv_heads": {"tensor_divides_kv": True},
    "stack_has_even_stages": {"even_stages": True},
    "stack_states_stages": {"stages_by_size": True},
    "stack_shards_over_context": {"shards_context": True},
}


def test_no_rule_is_left_out() -> None:
    assert set(ALL_RULES) == set(RULES)


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.read.__name__)
def test_each_rule_is_broken_and_explained(rule) -> None:
    plan, model, workload = EXAMPLES[rule.read.__name__]
    cluster = (
        "dgx-h100"
        if workload.get("precision") == "fp8" and ({"gather_dtype", "scaling"} & {*plan, *workload} or model.adapter.on)
        else "dgx-a100"
    )
    surroundings = (
        (model, Workload(**{"batch": 64, "seq": 64, **workload}), catalog.load("clusters", cluster).with_gpus(8))
        if model is not None
        else ()
    )
    trains = "trainer" in rule.needs or "dtypes" in rule.needs
    limits = LIMITS.get(rule.read.__name__, {})
    stack = (Stack(interleaved_rounds=True, can=limits),) if model is not None else ()
    case = Case(PlanFields(**plan), *surroundings, *stack, trainer=trains, dtypes=trains, framework=bool(limits))
    first = next(r for r in ALL_RULES if set(r.needs) <= case.given and r.broken(case))
    assert first is rule
    error = legality.problem(case)
    assert error is not None
    assert error.code == rule.code
    if error.fix:
        assert bool(legality.legal(applied(case, error.fix)))


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "auto"])
def test_schedule_rules_match_the_builders(name) -> None:
    """The predicate and the builder of the schedule accept the same values."""
    for pp, virtual, microbatches in itertools.product((2, 3, 4), (1, 2, 3, 2000), (1, 3, 8)):
        plan = PlanFields(pp=pp, virtual=virtual, schedule=name)
        legal = bool(legality.legal(Case(plan, workload=Workload(batch=microbatches))))
        assert legal == (refusal(name, pp, microbatches, virtual) is None)


@given(FIELDS)
def test_a_plan_and_its_columns_are_the_same_plan(fields) -> None:
    plan = PlanFields(**fields)
    columns = PlanArrays.of_plans([PlanFields(), plan]).columns
    assert set(columns) == set(PlanFields.model_fields) == {*encoded(plan)}
    values = {name: decode(name, column[1]) for name, column in columns.items()}
    legal_order = not plan.order or sorted(plan.order) == sorted(AXES)
    assert {name: values[name] for name in columns if name != "order" or legal_order} == {
        name: getattr(plan, name) for name in columns if name != "order" or legal_order
    }


def test_every_way_to_say_a_field_has_a_number() -> None:
    for name, value in [("overlap", None), ("overlap", ()), ("overlap", ("tp", "ep")), ("order", ())]:
        assert decode(name, encode(name, value)) == value
    for name, value in [("comm_dtype", None), ("prefetch", "forward"), ("prefetch", False), ("offload", "both")]:
        assert decode(name, encode(name, value)) == value


# The defects of issue 14


def config(model="llama3-8b", cluster="dgx-h100", stack="default", gpus=8, workload=None, **plan) -> Config:
    made = Config.from_parts(model, cluster, stack, {"batch": 64, "seq": 4096, **(workload or {})}, plan)
    return Config(made.model, made.cluster.with_gpus(gpus), made.plan, made.workload, made.stack)


def test_one_stage_per_rank_is_not_interleaved() -> None:
    with pytest.raises(
        MeshwrightError, match=r"MW-PLAN-003: schedule interleaved takes virtual=2 to 1024.*schedule=1f1b"
    ):
        Plan(pp=2, schedule="interleaved")
    Plan(pp=1, schedule="interleaved")  # without a pipeline the schedule has no effect


def test_expert_width_must_divide_by_expert_tp() -> None:
    """`verify` accepted expert_ffn=33 with tp=2 and `train` refused it: both now read this rule."""
    with pytest.raises(MeshwrightError, match="MW-PLAN-010: tp=2 does not divide the experts' width 33") as refused:
        Plan(tp=2).check(PLAIN_MOE, Workload(batch=8, seq=64))
    assert refused.value.fix == "--set plan.expert_tp=1"
    Plan(tp=2, expert_tp=1).check(PLAIN_MOE, Workload(batch=8, seq=64))
    with pytest.raises(MeshwrightError, match="MW-PLAN-004: tp=2 does not divide the shared experts' width 33"):
        Plan(tp=2, expert_tp=1).check(ODD, Workload(batch=8, seq=64))


def test_rounds_of_micro_batches_are_a_rule_of_megatron_only() -> None:
    odd = {"pp": 2, "virtual": 2, "schedule": "interleaved", "replicate": 4, "workload": {"batch": 12}}
    config(**odd).check()
    for stack in ("megatron-lm", "megatron-core", "nemo-megatron", "megatron-deepspeed"):
        with pytest.raises(MeshwrightError, match="MW-PLAN-012: 3 micro-batches are not a multiple of pp=2") as refused:
            config(stack=stack, **odd).check()
        assert stack in refused.value.why


@pytest.mark.parametrize(
    ("cluster", "precision", "fix"),
    [
        ("dgx-a100", "fp8", "bf16"),
        ("dgx-h100", "fp4", "fp8"),
        ("dgx-h100", "mxfp8", "fp8"),
        ("dgx-v100", "bf16", "fp16"),
    ],
)
def test_a_precision_that_the_chip_lacks_is_refused(cluster, precision, fix) -> None:
    with pytest.raises(MeshwrightError, match=f"MW-CLUS-003: workload.precision={precision}") as refused:
        config(cluster=cluster, replicate=8, workload={"precision": precision}).check()
    assert refused.value.fix == f"--set workload.precision={fix}"
    config(cluster=cluster, replicate=8, workload={"precision": fix}).check()


@pytest.mark.parametrize(
    ("cluster", "workload", "plan", "expected"),
    [
        ("dgx-v100", {}, {}, ("fp16", "fp16")),
        ("dgx-v100", {"precision": "fp32"}, {}, ("fp32", "bf16")),
        ("dgx-v100", {}, {"param_dtype": "fp32"}, ("bf16", "fp32")),
        ("dgx-a100", {}, {}, ("bf16", "bf16")),
    ],
)
def test_a_precision_that_nobody_chose_is_one_that_the_chip_has(cluster, workload, plan, expected) -> None:
    chosen = Config.from_parts("llama3-8b", cluster, workload={"batch": 64, **workload}, plan={"replicate": 8, **plan})
    assert (chosen.workload.precision, chosen.plan.param_dtype) == expected
    assert bool(chosen.precision_note) == (expected[0] == "fp16")
    assert chosen.in_precision("fp32").workload.precision == ("fp32" if not workload and not plan else expected[0])


def test_the_planner_refuses_a_precision_that_the_chip_lacks() -> None:
    from meshwright import planner

    with pytest.raises(MeshwrightError, match="MW-CLUS-003"):
        planner.plan("llama3-8b", "dgx-a100", nodes=1, set=["workload.precision=fp8"])


def test_a_plan_file_is_planned_on_the_given_cluster(tmp_path) -> None:
    from meshwright import planner

    path = tmp_path / "x.toml"
    path.write_text(config(replicate=8).to_toml(), "utf-8")
    for cluster in ("dgx-a100", catalog.load("clusters", "dgx-a100")):
        result = planner.plan(str(path), cluster=cluster, gpus=8, batch=64, seq=512, without=["pp,cp"])
        assert result.config.cluster.name == "dgx-a100"


def test_a_fix_of_one_degree_adjusts_the_other_degrees() -> None:
    with pytest.raises(MeshwrightError, match="MW-PLAN-004") as refused:
        config(tp=6, gpus=48, replicate=8, model="llama3-70b", workload={"batch": 96}).check()
    assert refused.value.fix == "--set plan.tp=8 --set plan.replicate=6"


def test_adam_in_fp16_without_masters_is_refused() -> None:
    """Its first update is NaN: epsilon and the squares of small gradients are zero in fp16."""
    fp16 = {"replicate": 8, "param_dtype": "fp16", "master": False}
    for optimizer in ("adamw", "adam"):
        with pytest.raises(MeshwrightError, match=r"MW-PLAN-019: .*fp16 without master weights") as refused:
            config(workload={"precision": "fp16", "optimizer": optimizer}, **fp16).check_trainable()
        assert refused.value.fix == "--set plan.master=true"
    for optimizer in ("momentum", "sgd"):  # they train
        config(workload={"precision": "fp16", "optimizer": optimizer}, **fp16).check_trainable()
    config(replicate=8, param_dtype="bf16", master=False).check_trainable()
    config(workload={"precision": "fp16", "optimizer": "adam"}, **fp16).check()  # other frameworks keep fp32 moments


def test_an_absolute_threshold_needs_gradients_without_a_scale() -> None:
    """fp16 training multiplies the loss, and a fixed threshold would change its meaning with it; any other dtype is trained."""
    from meshwright.api import load

    def trained(**plan):
        workload = {"precision": plan.get("param_dtype", "bf16")}
        c = load("gpt2-xl", cluster="dgx-h100", plan={"replicate": 8, **plan}, workload=workload, batch=8, seq=128)
        return legality.not_trained(c.plan, c.model, c.workload, c.stack)

    fixed = {"compression": "absolute-threshold", "compression_threshold": 1e-3}
    assert trained(**fixed, param_dtype="fp16").code == "MW-COMP-004"
    assert trained(**fixed) is None
    assert trained(compression="threshold", param_dtype="fp16") is None
