"""All-gathers in fp8: which bytes halve, the cost of the scales, and unchanged messages."""

import numpy as np
import pytest

from lower.cases import GPT, GQA, MLA, MODELS, MOE, WORK, lowered, one, traffic
from meshwright.describe.plan import Plan
from meshwright.lower.program import StepProgram
from meshwright.lower.rank import OURS, traffic_of_rank
from meshwright.lower.step import step_program

FP8 = WORK.but(precision="fp8")
MX = WORK.but(precision="mxfp8")
TENSOR = {"tp": 4, "sp": True}
ZERO = {"shard": 4, "zero": 3}
LAYER_GATHERS = ("-in", "-in-again", "-in-again-again", "-out-grad")  # of the parts below; recompute repeats forward's
PARTS = ("attention", "ffn", "shared")


def messages(program: StepProgram) -> dict[tuple[str, str, str, int], tuple[str, float, float]]:
    """(block, phase, operation, position) → (collective, count, bytes of the message)."""
    return {
        (block, phase, op.name, k): (op.collective, one(op.count), one(op.message_bytes))
        for block in program.kinds()
        for k, (phase, op) in enumerate(program.ops(block))
        if op.collective
    } | {
        (name, "", op.name, k): (op.collective, one(op.count), one(op.message_bytes))
        for name, ops in program.sync.items()
        for k, op in enumerate(ops)
    }


def gathers_fp8_operand(block: str, name: str, collective: str) -> bool:
    """Whether this operation gathers an operand of an fp8 product."""
    tensor = any(name == part + gather for part in PARTS for gather in LAYER_GATHERS)
    return collective == "all_gather" and block in ("dense", "moe") and (tensor or name == "gather-weights")


@pytest.mark.parametrize("more", [{}, {"recompute": "full"}, {"pp": 2, "schedule": "zb-h1"}, {"pp": 2}, {"cp": 2}])
@pytest.mark.parametrize("name", ["gpt", "gqa", "moe"])
def test_activation_gathers_have_one_byte_per_element_and_other_messages_are_unchanged(name, more) -> None:
    model = MODELS[name]
    before, after = (messages(lowered(model, FP8, **TENSOR, **more, gather_dtype=d)) for d in ("same", "fp8"))
    assert before.keys() == after.keys()
    halved = 0
    for key, (collective, count, size) in before.items():
        expected = (
            size / 2 + 4 * 4 if gathers_fp8_operand(key[0], key[2], collective) else size
        )  # four ranks, a float32 each
        assert after[key] == (collective, count, pytest.approx(expected, rel=1e-12))
        halved += expected != size
    # Of attention and of a dense FFN each: the input, the same again, the gradient of the output.
    assert halved >= 3 * sum(bool(part) and part != "experts" for kind in model.kinds for part in model.parts_of(kind))


def test_our_trainer_gathers_activations_in_16_bits() -> None:
    plan = {"shard": 2, "zero": 3, **TENSOR}
    before, after = (messages(lowered(GQA, FP8, OURS, **plan, gather_dtype=d)) for d in ("same", "fp8"))
    assert before.keys() == after.keys()
    changed = {key[2] for key in before if before[key] != after[key]}
    assert changed == {"gather-weights", "fp8-operands"}


def test_three_tenths_of_a_layers_bytes_are_saved() -> None:
    """The figure of docs/planner.md: six of ten messages of T·h are gathers."""

    def total(dtype: str) -> float:
        found = messages(lowered(GQA, FP8, **TENSOR, gather_dtype=dtype)).items()
        return sum(count * size for (block, *_), (_, count, size) in found if block == "dense")

    assert total("fp8") / total("same") == pytest.approx(0.7, abs=1e-3)


def test_mx_scales_cost_one_byte_per_32_elements() -> None:
    before, after = (messages(lowered(GPT, MX, **TENSOR, gather_dtype=d)) for d in ("same", "fp8"))
    key = next(key for key in before if key[2] == "attention-in")
    assert after[key][2] == before[key][2] / 2 * (1 + 1 / 32)


def test_the_rotary_key_of_latent_attention_stays_in_16_bits() -> None:
    before, after = (messages(lowered(MLA, FP8, **TENSOR, gather_dtype=d)) for d in ("same", "fp8"))
    key = next(key for key in before if key[2] == "attention-in")
    assert before[key][2] - after[key][2] == FP8.seq * (MLA.q_rank + MLA.kv_rank) - 4 * 4


@pytest.mark.parametrize("more", [{}, {"reshard": False}, {"wrap": 0}, {"wrap": 3}, {"replicate": 2}, {"tp": 2}])
@pytest.mark.parametrize("model", [GPT, MOE], ids=["gpt", "moe"])
def test_zero_3_gathers_matrices_of_layers_in_fp8(model, more) -> None:
    before, after = (lowered(model, FP8, **ZERO, **more, gather_dtype=d) for d in ("same", "fp8"))
    for key, (collective, count, size) in messages(before).items():
        now = messages(after)[key]
        if more.get("wrap") != 0 and not gathers_fp8_operand(key[0], key[2], collective):
            assert now == (collective, count, size)
        elif key[2] == "gather-weights":
            assert now[2] < 0.75 * size if key[0] in ("dense", "moe") else now[2] <= size
    if not more and model is GPT:
        h, f, gathers = GPT.hidden, GPT.ffn, [m for key, m in messages(after).items() if key[:2] == ("dense", "F")]
        matrices, vectors = 4 * h * h + 2 * h * f, one(before.parameters["dense"]["dense"]) - 4 * h * h - 2 * h * f
        assert gathers[0][2] == matrices + 2 * vectors


@pytest.mark.parametrize("more", [{}, {"ep": 2}, {"ep": 4}], ids=str)
def test_matrices_of_experts_take_one_byte_where_zero_3_shards_them(more) -> None:
    """A scale per row leaves dense weights in 16 bits; experts have one scale each. With ep = 4 each rank has the only copy of its experts."""

    def gathers(dtype: str, scaling: str = "tensor") -> dict[str, float]:
        program = lowered(MOE, FP8.but(scaling=scaling), OURS, **ZERO, **more, gather_dtype=dtype)
        found = [
            (op.part, one(op.count) * one(op.message_bytes))
            for _, op in program.ops("moe")
            if op.name == "gather-weights"
        ]
        return {part: sum(n for p, n in found if p == part) for part in ("dense", "expert")}

    same, fp8, by_row = (
        gathers("same"),
        gathers("fp8"),
        gathers("fp8", "row") if more.get("ep") != 4 else gathers("same"),
    )
    matrices = 2 * 3 * MOE.experts // more.get("ep", 1) * MOE.hidden * MOE.expert_width * (more.get("ep") != 4)
    assert same["expert"] - fp8["expert"] == matrices  # no biases: 2 bytes become 1, forward and backward
    assert same["expert"] == 2 * matrices
    assert by_row == {"dense": same["dense"], "expert": fp8["expert"] if matrices else same["expert"]}
    assert fp8["dense"] < 0.75 * same["dense"]


@pytest.mark.parametrize("plan", [{**ZERO}, {**ZERO, "wrap": 3}, {**ZERO, "tp": 2, "sp": True}, {**ZERO, "wrap": 0}])
@pytest.mark.parametrize("model", [GPT, GQA, MOE], ids=["gpt", "gqa", "moe"])
def test_both_evaluations_of_a_program_agree(model, plan) -> None:
    chosen = Plan(**plan, gather_dtype="fp8").check(model, FP8)
    program = lowered(model, FP8, OURS, **plan, gather_dtype="fp8")
    mine = {(r.axis, r.collective): r.bytes for r in traffic(program)}
    exact = {(r.axis, r.collective): r.bytes for r in traffic_of_rank(program, chosen, 0)}
    compared = ("all_gather", "all_reduce")  # weights, and their scales
    assert {k: v for k, v in mine.items() if k[1] in compared} == {
        k: pytest.approx(v, rel=1e-9) for k, v in exact.items() if k[1] in compared
    }


def test_zero_1_gathers_updated_parameters_unchanged() -> None:
    before, after = (lowered(GPT, FP8, shard=4, zero=1, gather_dtype=d) for d in ("same", "fp8"))
    assert traffic(before) == traffic(after)


def test_a_batch_may_mix_plans_with_and_without_it() -> None:
    plans = [Plan(**TENSOR, gather_dtype=d) for d in ("same", "fp8", "same")]
    program = step_program(GPT, plans, FP8)
    n = next(op for _, op in program.ops("dense") if op.name == "attention-in").message_bytes
    assert np.array_equal(n, [one(n[:1]), one(n[:1]) / 2 + 16, one(n[:1])])
