"""ZeRO-3 with weights gathered in fp8: half the bytes of 16 bits, and the same numbers as with gathers in the parameters' dtype, bit by bit."""

import pytest
import torch

import ranks
from meshwright.describe.config import Config
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.proof.prove import prove

# 16 and 40 rows over three ranks: shards are padded. No norm or bias is large, so most bytes are those of matrices.
MODEL = Model(hidden=16, layers=2, heads=2, ffn=40, vocab=8, ffn_bias=True)
WORKLOAD = Workload(batch=6, seq=8, precision="fp8", optimizer="adamw")
Z3 = {"zero": 3, "param_dtype": "bf16", "microbatch": 1}
# Three experts over two ranks are padded to four.
EXPERTS = MODEL.but(experts=3, top_k=2, expert_ffn=24)
EIGHT, BY_ROW = WORKLOAD.but(batch=8), WORKLOAD.but(batch=8, scaling="row")
FOUR = [work.but(batch=4) for work in (EIGHT, BY_ROW)]  # two micro-batches on two ranks


def trained(context, cases):
    """Of each case, a model, a plan and a workload: losses, an evaluation between the steps, shards, and bytes gathered and maximised; and
    the memory of gathered weights."""
    from meshwright.parallel.apply import apply
    from meshwright.parallel.data.fp8_gather import GatheredWeight
    from meshwright.training.data.samples import RandomSamples
    from meshwright.training.loop import Trainer
    from meshwright.training.measure.observe import Observer

    seen = []
    after = GatheredWeight.after_gather

    def spied(self, gathered, metadata, dtype, *, out=None):
        if out is not None:
            seen.append((out.dtype, out.untyped_storage().nbytes()))
        return after(self, gathered, metadata, dtype, out=out)

    GatheredWeight.after_gather = spied
    found = []
    for model, plan, workload in cases:
        parallel = apply(model, plan, workload, context.rank, dtype=torch.bfloat16)
        trainer = Trainer(parallel, RandomSamples(model, workload.seq, 0))
        losses = [trainer.train_step().loss]
        first = 2 * parallel.mesh.index("shard_cp")
        tokens = torch.arange(8 * 8).view(8, 8)[first : first + 2] % model.vocab
        losses.append(float(parallel.evaluate(tokens, tokens)))
        with Observer(trainer) as observer:
            losses.append(trainer.train_step().loss)
        sent = observer.observed().collectives
        pieces = {p.name: p.local.detach() for p in parallel.pieces}
        assert all(type(local) is torch.Tensor and local.dtype == torch.float32 for local in pieces.values())
        found.append((losses, {name: local.numpy().copy() for name, local in pieces.items()}, sent))
    return found, seen


def both(model, workload, **fields):
    """The same layout with gathers in 16 bits and in fp8."""
    return [(model, Plan(**Z3, **fields, gather_dtype=dtype), workload) for dtype in ("same", "fp8")]


@pytest.fixture(scope="module")
def three_ranks():
    return ranks.run(3, trained, both(MODEL, WORKLOAD, shard=3))


@pytest.fixture(scope="module")
def four_ranks():
    """Two shards of each half of a layer, and sequence parallelism."""
    return ranks.run(4, trained, both(MODEL, WORKLOAD, shard=2, tp=2, sp=True))


@pytest.fixture(scope="module")
def experts_on_two_ranks():
    """Whole experts on each rank, with one scale per tensor and with one per row; dense weights by row are gathered in 16 bits."""
    return ranks.run(2, trained, [case for work in FOUR for case in both(EXPERTS, work, shard=2)])


@pytest.fixture(scope="module")
def experts_on_four_ranks():
    """Parts of each expert on the two ranks that hold it with ep, by row, and of experts that are split over tp too."""
    four = EXPERTS.but(experts=2, expert_ffn=32)
    return ranks.run(4, trained, both(four, BY_ROW, shard=4, ep=2) + both(four, EIGHT, shard=2, tp=2))


@pytest.mark.parametrize(
    "layout", ["three_ranks", "experts_on_two_ranks", *ranks.soak(["four_ranks", "experts_on_four_ranks"])]
)
def test_training_and_evaluation_do_not_change(layout, request):
    for found, _ in request.getfixturevalue(layout):
        for same, fp8 in zip(found[::2], found[1::2], strict=True):
            assert same[0] == fp8[0]
            assert same[1].keys() == fp8[1].keys()
            assert all((same[1][name] == fp8[1][name]).all() for name in same[1])


def test_a_byte_per_element_of_a_matrix_is_gathered(three_ranks):
    """Shards of three ranks are padded to 6 and 14 rows; each unit is gathered in forward and in backward of two micro-batches."""
    matrices = MODEL.layers * (4 * 18 * 16 + 2 * 42 * 16 + 18 * 40)
    for (same, fp8), _ in three_ranks:
        key = ("shard", "all_gather")
        assert same[2][key][0] == fp8[2][key][0]
        assert same[2][key][1] - fp8[2][key][1] == 4 * matrices
        assert fp8[2]["shard", "all_reduce"][1] - same[2]["shard", "all_reduce"][1] == 4 * 7 * MODEL.layers


@pytest.mark.slow
def test_activations_of_sequence_parallelism_are_gathered_as_before(four_ranks):
    for (same, fp8), _ in four_ranks:
        assert same[2]["tp", "all_gather"] == fp8[2]["tp", "all_gather"]
        assert same[2]["shard", "all_gather"][1] > fp8[2]["shard", "all_gather"][1]


def test_gathered_parameters_have_the_dtype_of_gradients_and_no_memory(three_ranks):
    for _, seen in three_ranks:
        assert {dtype for dtype, _ in seen} == {torch.bfloat16}
        assert {size for _, size in seen[1:]} == {0}  # the memory of the last placeholder is freed by the next gather


def differences(found, collective):
    """Messages and bytes of a collective, over all axes, that gathers in fp8 have more than those in 16 bits, for each layout."""
    totals = [[sum(x[i] for key, x in run[2].items() if key[1] == collective) for i in (0, 1)] for run in found]
    return [(fp8[0] - same[0], fp8[1] - same[1]) for same, fp8 in zip(totals[::2], totals[1::2], strict=True)]


def test_a_byte_per_element_of_an_expert_is_gathered(experts_on_two_ranks):
    """Gate, up and down of a rank's experts and, with a scale per tensor, four matrices of attention, forward and backward."""
    attention = 4 * 16 * 16
    for found, _ in experts_on_two_ranks:  # two micro-batches
        experts = 4 * 3 * 24 * 16
        by_tensor, by_row = 8 * (attention + experts), 8 * experts
        assert differences(found, "all_gather") == [(0, -by_tensor), (0, -by_row)]


@pytest.mark.slow
def test_a_byte_per_element_of_a_part_of_an_expert_is_gathered(experts_on_four_ranks):
    attention, expert = 4 * 16 * 16, 3 * 32 * 16
    for found, _ in experts_on_four_ranks:  # two micro-batches; with tp four, of half of everything
        saved = [8 * expert, 16 * (attention + 2 * expert) // 2]
        assert differences(found, "all_gather") == [(0, -n) for n in saved]
        same, fp8 = (run[2]["expert_dp", "all_gather"][1] for run in found[:2])
        biases = 8 * 2 * (32 + 32 + 16)
        assert same - biases == 2 * (fp8 - biases)


def test_the_scales_of_experts_are_reduced_once_per_step(experts_on_two_ranks):
    """One message for dense weights and one for experts, of a float32 for each matrix of a rank."""
    for found, _ in experts_on_two_ranks:
        assert differences(found, "all_reduce") == [(2, 4 * 2 * (4 + 3 * 3)), (1, 4 * 2 * 3 * 3)]


@pytest.mark.slow
def test_the_scales_of_parts_of_experts_are_reduced_once_per_step(experts_on_four_ranks):
    for found, _ in experts_on_four_ranks:
        by_row, split = differences(found, "all_reduce")
        assert by_row == (1, 4 * 2 * 3)
        # Over shards and over tp; no longer in forward of four micro-batches: with the inputs of four products and of `down`, alone for gate and up.
        per_step, forward = 2 * 4 * 2 * (4 + 3 * 2), 4 * 4 * 2 * (4 + 3 * 2)
        assert split == (2 * 2 - 4 * 2 * 2, per_step - forward)


def test_experts_train_what_one_device_trains_with_a_scale_per_row():
    work = {"batch": 4, "seq": 8, "precision": "fp8", "scaling": "row"}
    plan = {"zero": 3, "param_dtype": "fp32", "gather_dtype": "fp8", "shard": 2, "recompute": "full"}
    proof = prove(Config.from_parts(EXPERTS, "laptop", plan=plan, workload=work), ranks=2, steps=2)
    assert proof.small.workload.scaling == "row"
    assert proof.small.plan.gather_dtype == "fp8"
    assert proof.passed, proof.agreements[0].breaks[:2]
    assert proof.agreements[0].errors["gradient"] < 1e-9
