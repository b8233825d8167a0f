"""Near misses: a close size with a faster plan is offered, with a true gain and a legal plan."""

import pytest

from meshwright import planner
from meshwright.describe import catalog
from meshwright.errors import MeshwrightError
from meshwright.planner.advice.near_misses import rounder

FEW = {
    "fix": {"cp": 1},
    "without": ["recompute", "reorder"],
}  # what is offered does not depend on them; a small space is searched sooner


def asked(model="llama3-8b", cluster="dgx-h100", **question):
    return planner.plan(model, cluster, **question)


def test_a_batch_of_250_on_32_gpus_misses_256():
    r = asked(gpus=32, batch=250, seq=4096, **FEW)
    (offer,) = (m for m in r.near_misses if m.what == "batch")
    assert offer.offered == 256
    assert offer.setting == "--batch 256"
    taken = asked(gpus=32, batch=256, seq=4096, **FEW)
    gain = taken.prediction.tokens_per_s / r.prediction.tokens_per_s - 1
    assert 0.15 < offer.gain <= gain + 0.005  # common plans: the gain is at least this
    assert not [m for m in taken.near_misses if m.what in ("batch", "GPUs")]
    workload = r.space.workload.but(batch=256)
    offer.plan.check(r.space.model, workload, r.space.cluster)


def test_a_few_more_gpus_are_offered_if_each_is_then_faster():
    r = asked(gpus=56, batch=256, seq=4096, **FEW)
    (offer,) = (m for m in r.near_misses if m.what == "GPUs")
    assert offer.offered == 64
    assert offer.gain > 0.05
    offer.plan.check(r.space.model, r.space.workload, r.space.cluster.with_gpus(64))


def test_a_sequence_that_cannot_be_divided():
    r = asked("llama3.1-8b", gpus=16, batch=4, seq=32767, without=["recompute", "reorder"])
    (offer,) = (m for m in r.near_misses if m.what == "sequence")
    assert offer.offered == 32768
    assert offer.gain > 0.02


def test_a_vocabulary_of_odd_width():
    r = asked("gpt2-xl", "dgx-a100", gpus=8, batch=64, seq=1024)
    (offer,) = (m for m in r.near_misses if m.what == "vocabulary")
    assert (offer.given, offer.offered) == (50257, 50304)
    assert offer.setting == "--set model.vocab_multiple=128"
    padded = planner.plan("gpt2-xl", "dgx-a100", gpus=8, batch=64, seq=1024, set=["model.vocab_multiple=128"])
    assert not padded.near_misses


def test_offered_sizes_keep_the_constraints():
    r = asked(gpus=32, batch=250, seq=4096, fix={"pp": 2})
    assert all(m.plan.pp == 2 for m in r.near_misses)


@pytest.mark.parametrize(
    ("value", "found"),
    [(250, [256, 224]), (256, []), (1024, []), (1000, [1024, 896]), (63, [64, 56]), (1, []), (7, [6])],
)
def test_offered_numbers_are_close_and_divisible(value, found):
    assert rounder(value, 0.125) == found


@pytest.mark.slow
def test_offered_numbers_are_within_the_limits_of_a_cluster():
    """As many GPUs as a cluster may have: neither more GPUs nor twice as many are tried."""
    assert rounder(10**9, 0.15)[0] == 2**30
    assert rounder(10**9, 0.15, 10**9) == [7 * 2**27, 29 * 2**25]
    with pytest.raises(MeshwrightError, match="MW-PLANNER") as none:  # with more GPUs than a batch of 64 can use
        asked("gpt2-xl", gpus=10**9, batch=64, seq=1024)
    assert "1000000008" not in str(none.value)
    assert asked("gpt2-xl", gpus=10**9, batch=10**9, seq=1024, fix={"tp": 1, "pp": 1, "cp": 1}).plan.world == 10**9


def test_models_without_tokens_have_no_near_misses():
    assert not planner.plan(catalog.load("models", "resnet-50"), "dgx-a100", gpus=8, batch=248).near_misses
