"""ZeRO-3 with weights gathered in fp8: half the bytes of 16 bits, and the same numbers as with gathers in the parameters' dtype, bit by bit."""

import pytest
import torch

import ranks
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload

# 16 and 40 rows over three ranks: shards are padded. No norm or bias is large, so most bytes are those of matrices.
MODEL = Model(hidden=16, layers=2, heads=2, ffn=40, vocab=8, ffn_bias=True)
WORKLOAD = Workload(batch=6, seq=8, precision="fp8", optimizer="adamw")
Z3 = {"zero": 3, "param_dtype": "bf16", "microbatch": 1}


def trained(context, plans):
    """Of each plan: losses, an evaluation between the steps, shards, bytes gathered and maximised, and memory of a gathered weight."""
    from meshwright.parallel.apply import apply
    from meshwright.parallel.data.fp8_gather import GatheredWeight
    from meshwright.training.data.random_tokens import RandomSamples
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
    for plan in plans:
        parallel = apply(MODEL, plan, WORKLOAD, context.rank, dtype=torch.bfloat16)
        trainer = Trainer(parallel, RandomSamples(MODEL, WORKLOAD.seq, 0))
        losses = [trainer.train_step().loss]
        first = 2 * parallel.mesh.index("shard_cp")
        rows = slice(first, first + 2)
        tokens = torch.arange(6 * 8).view(6, 8)[rows] % MODEL.vocab
        losses.append(float(parallel.evaluate(tokens, tokens)))
        with Observer(trainer) as observer:
            losses.append(trainer.train_step().loss)
        sent = observer.observed().collectives
        pieces = {p.name: p.local.detach() for p in parallel.pieces}
        assert all(type(local) is torch.Tensor and local.dtype == torch.float32 for local in pieces.values())
        found.append((losses, {name: local.numpy().copy() for name, local in pieces.items()}, sent))
    return found, seen


@pytest.fixture(scope="module")
def three_ranks():
    plans = [Plan(shard=3, **Z3, **fields) for fields in ({}, {"gather_dtype": "fp8"})]
    return ranks.run(3, trained, plans)


@pytest.fixture(scope="module")
def four_ranks():
    """Two shards of each half of a layer, and sequence parallelism."""
    plans = [Plan(shard=2, tp=2, sp=True, **Z3, **fields) for fields in ({}, {"gather_dtype": "fp8"})]
    return ranks.run(4, trained, plans)


@pytest.mark.parametrize("layout", ["three_ranks", "four_ranks"])
def test_training_and_evaluation_do_not_change(layout, request):
    for (same, fp8), _ in request.getfixturevalue(layout):
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


def test_activations_of_sequence_parallelism_are_gathered_as_before(four_ranks):
    for (same, fp8), _ in four_ranks:
        assert same[2]["tp", "all_gather"] == fp8[2]["tp", "all_gather"]
        assert same[2]["shard", "all_gather"][1] > fp8[2]["shard", "all_gather"][1]


def test_gathered_parameters_have_the_dtype_of_gradients_and_no_memory(three_ranks):
    for _, seen in three_ranks:
        assert {dtype for dtype, _ in seen} == {torch.bfloat16}
        assert {size for _, size in seen[1:]} == {0}  # the memory of the last placeholder is freed by the next gather
