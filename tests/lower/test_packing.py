"""Documents of different lengths: the work of attention, and the slowest rank."""

import numpy as np
import pytest

from meshwright import api
from meshwright.describe.packing import packed, slowest


def test_documents_of_one_length():
    """Much shorter than a sequence: each attends to itself; longer: cut into pieces, whose ends are short. Millions in a sequence take no time."""
    assert packed((), 4096) == (4096.0, 0.0)
    assert packed((8,), 4096).attended == pytest.approx(8, rel=1e-3)
    assert packed((1_000_000,), 4096).attended == pytest.approx(4096, rel=2e-3)
    assert packed((2,), 2**40) == (pytest.approx(2.0), 0.0)
    assert packed((1, 30_000), 2**24).deviation < 0.1


def test_the_slowest_rank_is_the_largest_of_random_ones():
    """Against ranks that draw many sequences from a long shuffled file: their sum is nearly normal."""
    lengths, s, ranks, sequences = (100, 6000), 2048, 16, 64
    generator = np.random.default_rng(1)
    total = 100 * ranks * sequences * s
    ends = np.cumsum(generator.choice(lengths, 2 * total // 3050))
    edges = np.union1d(ends[ends < total], np.arange(s, total + 1, s))
    work = np.bincount((edges - 1) // s, np.diff(edges, prepend=0).astype(float) ** 2)
    steps = generator.permutation(work).reshape(100, ranks, sequences).sum(2)
    assert packed(lengths, s).attended == pytest.approx(work.mean() / s, rel=0.01)
    ratios = steps.max(1) / steps.mean(1)
    found = slowest(packed(lengths, s).deviation, [ranks], np.array([sequences]))[0]
    assert found - 1 == pytest.approx(np.mean(ratios) - 1, rel=0.1)
    assert slowest(0.5, [1, 64], np.array([8, 8])).tolist()[0] == 1.0


def test_short_documents_take_time_off_attention_only():
    def parts(*words):
        e = api.estimate(
            "llama3-8b",
            "dgx-h100",
            gpus=8,
            batch=64,
            seq=32768,
            set=["plan.shard=8", "plan.zero=3", "plan.recompute=full", *words],
        )
        return e.prediction, e

    whole, _ = parts()
    short, _ = parts("workload.lengths=[512]")
    mixed, e = parts("workload.lengths=128,128,128,65536")
    assert short.exposed_s["attention"] < 0.6 * whole.exposed_s["attention"]
    assert short.exposed_s["ffn"] == pytest.approx(whole.exposed_s["ffn"])
    assert short.memory_gib == pytest.approx(whole.memory_gib)
    assert short.exposed_s["attention"] < mixed.exposed_s["attention"]
    assert any("slowest of 8 data-parallel ranks" in words for words in e.prediction.assumed)
