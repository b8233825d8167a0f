"""Weights of a Transformers folder under a plan: each rank reads its own part, and the loss is that of Transformers."""

from functools import cache

import pytest
import torch
from torch.nn import functional

import ranks
from hf_folders import IDS, logits, original, saved
from meshwright.describe import hf
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.models.hf.weights import FolderWeights
from meshwright.parallel.apply import apply

SAMPLES = IDS.repeat(2, 1)  # [4, 12]
PLANS = {
    "llama": {"tp": 2, "pp": 2, "microbatch": 2},
    "llama-tied": {"pp": 2, "shard": 2, "zero": 1},
    "qwen2": {"shard": 4, "zero": 3},
    "mixtral": {"tp": 2, "replicate": 2, "ep": 2},
}


def work(context, folders):
    return {case: imported(context.rank, folder, PLANS[case]) for case, folder in folders.items()}


def imported(rank, folder, plan):
    """The bytes that this rank read, the bytes of its pieces, pieces with wrong values, and its part of the loss."""
    model = hf.read(folder)
    weights, reference = FolderWeights(folder, model), FolderWeights(folder, model)
    workload = Workload(batch=4, seq=12)
    parallel = apply(model, Plan(**plan), workload, rank, weights=weights)
    wrong = []
    for piece in parallel.pieces:
        full = reference.read(piece.name, piece.full_shape, [0] * len(piece.full_shape), piece.full_shape)
        if not torch.equal(piece.local, piece.part_of(full)):
            wrong.append(piece.name)
    share = 4 // parallel.mesh.size("dp")
    rows = slice(parallel.mesh.index("dp") * share, (parallel.mesh.index("dp") + 1) * share)
    targets = SAMPLES.roll(-1, 1)
    loss = parallel.evaluate(SAMPLES[rows], targets[rows])
    counted = float(loss) if parallel.mesh.index("tp") == 0 else 0.0
    whole = sum(entry.nbytes for file in reference.folder.stored.files.values() for entry in file.entries.values())
    return weights.bytes_read, sum(p.local.numel() * 4 for p in parallel.pieces), whole, wrong, counted


@cache
def by_rank(folder):
    folders = {case: str(saved(case, folder / case)) for case in PLANS}
    return ranks.run(4, work, folders)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return by_rank(tmp_path_factory.mktemp("folders"))


@pytest.mark.parametrize("case", PLANS)
def test_each_rank_reads_its_part_and_no_more(case, results):
    for rank in results:
        read, local, whole, wrong, _ = rank[case]
        assert wrong == []
        assert read == local
        assert read < 0.75 * whole


@pytest.mark.parametrize("case", PLANS)
def test_the_loss_under_a_plan_is_that_of_transformers(case, results):
    got = sum(rank[case][4] for rank in results)
    scores = logits(original(case)).repeat(2, 1, 1).double()
    expected = functional.cross_entropy(scores.flatten(0, 1), SAMPLES.roll(-1, 1).flatten(), reduction="sum").item()
    assert got == pytest.approx(expected, rel=64 * 2**-24)
