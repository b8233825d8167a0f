"""What adapters cost: FLOPs as torch counts them for a PEFT model, bytes of a frozen base, messages of trained parts only."""

import math

import numpy as np
import pytest

from meshwright.cost.memory import state_memory
from meshwright.describe import catalog
from meshwright.describe.adapter import Adapter
from meshwright.describe.layout import Layout
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.sharding import boxes
from meshwright.describe.workload import Workload
from meshwright.lower.program import StepProgram, scalar
from meshwright.lower.rank import messages_of_rank, traffic_of_rank
from meshwright.lower.step import step_program

SHAPE = {"hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4, "ffn": 512, "vocab": 640}
TOKENS, ORDER = 2 * 128, ("tp", "cp", "pp", "dp")
Q, KV, CORE = (
    256 * 256,
    256 * 128,
    2 * 8 * 128 * 128 * 32,
)  # multiply-adds of a product per token, and of one product of the core


def model(**fields: object) -> Model:
    return Model(name="tiny", **SHAPE, adapter=Adapter(**fields))


def program(m: Model, plan: Plan, workload: Workload, **stack: object) -> StepProgram:
    return step_program(m, plan, workload, catalog.load("stacks", "default").but(**stack))


# `FlopCounterMode` over forward and backward of `LlamaForCausalLM` with `peft` 0.21.2, on torch's meta device: forward, both. In backward the first
# core of q and v's adapters multiplies once more than autograd asks for: our backward of attention computes all its gradients together.
@pytest.mark.parametrize(
    ("fields", "forward", "both", "together"),
    [
        ({"rank": 16}, 1_455_423_488, 2_986_344_448, CORE),
        ({"rank": 16, "targets": ("all-linear",)}, 1_560_281_088, 3_315_597_312, 0),
        ({"rank": 4, "targets": ("o_proj", "down_proj")}, 1_436_549_120, 2_849_505_280, 0),
        ({"rank": 8, "trains": ("lm_head",)}, 1_440_743_424, 3_028_287_488, CORE),
        ({}, 1_426_063_360, 4_278_190_080, 0),
    ],
)
def test_flops_are_those_that_torch_counts_for_a_peft_model(
    fields: dict[str, object], forward: int, both: int, together: int
) -> None:
    step = program(model(**fields), Plan(microbatch=2), Workload(batch=2, seq=128), attention="stored")
    flops = dict.fromkeys("FIEW", 0.0)
    for (block, phase), ops in step.blocks.items():
        for op in ops:
            if phase in flops and op.kind == "gemm":
                flops[phase] += scalar(step.ranks[0].times(block, phase) * op.count * op.flops)
    assert flops["F"] == forward
    assert sum(flops.values()) == both + 2 * together


def test_matrices_that_are_one_module_have_one_adapter() -> None:
    """Megatron's linear_qkv: one A for queries, keys and values, and one B with the rows of all three."""
    adapted, plan, work = model(rank=16, targets=("linear_qkv",)), Plan(microbatch=2), Workload(batch=2, seq=128)
    found = {}
    for joined in (False, True):
        step = program(adapted, plan, work, joined_adapters=joined)
        ops = [op for op in step.blocks["dense", "F"] if "-lora-" in op.name]
        found[joined] = {x: [scalar(op.flops) for op in ops if op.name.endswith(f"-lora-{x}")] for x in "ab"}
        backward = {op.name for op in step.blocks["dense", "E"]}
        assert ("qkv-lora-b-dgrad" in backward) == joined == ("q-lora-b-dgrad" not in backward)
    assert found[True]["a"] == found[False]["a"][:1]
    assert found[True]["b"] == [sum(found[False]["b"])]


PARTS: list[dict[str, object]] = [
    {"rank": 4},
    {"rank": 4, "targets": ("down_proj",)},
    {"rank": 4, "trains": ("lm_head",), "targets": ("up_proj",)},
    {"trains": ("embed_tokens",)},
    {"trains": ("*norm",)},
    {"trains": ("lm_head",)},
]
PLANS: list[dict[str, object]] = [
    {"tp": 2},
    {"tp": 2, "sp": True},
    {"tp": 2, "sp": True, "recompute": "full"},
    {"tp": 2, "pp": 2, "virtual": 2, "schedule": "interleaved", "sp": True},
    {"cp": 2},
]
SHARDED: list[dict[str, object]] = [{"shard": 2, "zero": 3}, {"shard": 2, "zero": 3, "prefetch": False}]
EXPERTS = {"experts": 4, "top_k": 2, "expert_ffn": 64}


# Under ZeRO-3 one rank knows the order of units, of which a batch has the number: it gathers the experts of the first layer, and the layer that is
# asked for ahead of the head, as in every layer.
@pytest.mark.parametrize(
    ("fields", "plan", "changes"),
    [
        *((fields, plan, changes) for fields in PARTS for plan in PLANS for changes in ({}, EXPERTS)),
        *((fields, plan, {}) for fields in PARTS[:-1] for plan in SHARDED),
    ],
)
def test_a_batch_of_plans_sends_what_one_rank_does(
    fields: dict[str, object], plan: dict[str, object], changes: dict[str, object]
) -> None:
    m, one = model(**fields).but(**changes), Plan(**plan)
    step = step_program(m, one, Workload(batch=8, seq=128), every_rank=True)
    for at, rank in enumerate(step.ranks):
        counted: dict[tuple[str, str], float] = {}
        often = [(step.batch.rounds * rank.times(*key), ops) for key, ops in step.blocks.items()]
        for times, ops in [*often, (1.0, step.closing if one.zero == 3 else [])]:
            for op in ops:
                key = op.axis, op.collective
                counted[key] = counted.get(key, 0.0) + scalar(times * op.count * op.message_bytes)
        issued = messages_of_rank(step, one, at * one.tp, ORDER)
        for key in {(s.axis, s.collective) for s in issued if s.phase or one.zero == 3} - {("pp", "send")}:
            of_rank = sum(s.bytes for s in issued if (s.axis, s.collective) == key and (s.phase or one.zero == 3))
            assert counted.get(key, 0.0) == pytest.approx(of_rank, rel=1e-12), key


def states(m: Model, plan: Plan) -> dict[str, float]:
    step = program(m, plan, Workload(batch=8, seq=128))
    return {part: float(np.max(size)) for part, size in state_memory(step, step.ranks[0]).items()}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_states_are_those_of_the_trained_parts_and_the_base_is_kept_as_it_is(zero: int) -> None:
    m = model(rank=16, base="nf4", targets=("all-linear",))
    plan = Plan(zero=zero, shard=4) if zero else Plan(replicate=4)
    table = boxes(m, plan, Layout(plan), 0, range(4))
    trained = sum(b.size if b.zero is None else math.ceil(b.size / 4) for b in table if b.learns)
    own = {
        packed: sum(math.prod(b.local_shape) for b in table if not b.learns and b.parameter.packed == packed)
        for packed in (True, False)
    }
    base = own[True] * (0.5 + 4 / 64) + own[False] * 2
    out = states(m, plan)
    whole = sum(b.size for b in table if b.learns)
    assert out["parameters"] == pytest.approx(base + 2 * (trained if zero == 3 else whole), rel=1e-9)
    assert out["gradients"] == pytest.approx(4 * (trained if zero >= 2 else whole), rel=1e-9)
    assert out["optimizer"] == pytest.approx(12 * trained, rel=1e-9)


def messages(m: Model, plan: Plan, workload: Workload) -> dict[tuple[str, str], float]:
    step = program(m, plan, workload)
    return {(r.axis, r.collective): r.bytes for r in traffic_of_rank(step, plan, 0)}


def test_only_trained_parts_are_reduced_and_a_packed_base_is_gathered_as_it_is() -> None:
    workload, m = Workload(batch=8, seq=128), model(rank=16)
    reduced = messages(m, Plan(replicate=4), workload)
    assert reduced["dp_cp", "all_reduce"] == pytest.approx(4 * m.trained, abs=200)  # and a few scalars
    updated = messages(m, Plan(shard=4, zero=1), workload)
    assert updated["shard_cp", "all_gather"] == 2 * m.trained
    whole, packed = (
        messages(model(rank=16, base=base), Plan(shard=4, zero=3, microbatch=2), workload)["shard_cp", "all_gather"]
        for base in ("plain", "nf4")
    )
    matrices = 4 * (2 * Q + 2 * KV + 3 * 256 * 512)
    assert whole - packed == 2 * matrices * (2 - 0.5625)  # forward and backward


def test_a_batch_of_plans_gathers_and_updates_trained_parts_only() -> None:
    step = program(model(rank=16), Plan(shard=4, zero=1), Workload(batch=8, seq=128))
    gathers = [op for op in step.closing if op.name == "gather-parameters"]
    assert sum(scalar(op.count * op.message_bytes) for op in gathers) == 2 * model(rank=16).trained
    weights = {op.name for op in step.blocks["dense", "W"] if op.kind == "gemm"}
    assert weights == {f"{name}-lora-{x}-wgrad" for name in "qv" for x in "ab"}


def test_a_region_without_trained_matrices_gathers_its_input_once() -> None:
    def gathers(**fields: object) -> float:
        return messages(model(**fields), Plan(tp=2, sp=True), Workload(batch=1, seq=128))["tp", "all_gather"]

    region = TOKENS // 2 * 256 * 2  # bytes of a gathered input
    everything, attention_only = gathers(), gathers(rank=4)
    # not gathered again: the inputs of four FFNs and of the head; nor the gradient of the embedding. The first layer's o and FFN stay.
    assert everything - attention_only == 6 * region


def test_a_frozen_product_saves_no_input() -> None:
    def saved(**fields: object) -> float:
        step = program(model(**fields), Plan(), Workload(batch=1, seq=128))
        return float(sum(np.max(x) for x in step.saved["dense"].values()))

    inputs = (
        128 * (256 + 512) * 2
    )  # of gate and up, and of down; attention reads the norm's output for q and v, and o's for its core
    assert saved() - saved(rank=4) == inputs - 128 * 2 * 4 * 2  # A·x of q and of v
    assert saved(rank=4, targets=("k_proj",)) == saved(rank=4) - 128 * 4 * 2
