"""The same global batch under any layout, from a corpus every machine has."""

import numpy as np
import pytest
import torch

from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError
from meshwright.models.loss import IGNORED
from meshwright.training.data.samples import RandomSamples, batch_of
from meshwright.training.data.sources import Corpus, standard_library

MODEL = Model(hidden=16, layers=1, heads=2, ffn=16, vocab=256)


def test_the_corpus_is_pythons_own_source():
    text = bytes(standard_library()).decode("utf-8", errors="replace")
    assert len(text) > 1_000_000
    assert "def " in text
    assert "import " in text
    assert np.array_equal(standard_library(), standard_library.__wrapped__())


@pytest.mark.parametrize("source", [Corpus, RandomSamples])
@pytest.mark.parametrize("kind", ["transformer", "mlp"])
def test_ranks_share_one_global_batch(source, kind):
    model = MODEL if kind == "transformer" else Model(kind="mlp", hidden=16, layers=1)
    samples = source(model, 12, seed=5)
    whole = batch_of(samples, 3, range(8), "cpu", torch.float32)
    halves = [batch_of(source(model, 12, seed=5), 3, r, "cpu", torch.float32) for r in (range(4), range(4, 8))]
    for side in ("inputs", "targets"):
        joined = torch.cat([getattr(h, side) for h in halves])
        torch.testing.assert_close(joined, getattr(whole, side), equal_nan=True)
    assert int(whole.valid) == sum(int(h.valid) for h in halves)
    other = batch_of(samples, 4, range(8), "cpu", torch.float32)
    assert not torch.equal(other.inputs, whole.inputs)
    assert not torch.equal(batch_of(source(model, 12, seed=6), 3, range(8), "cpu", torch.float32).inputs, whole.inputs)


def test_targets_are_the_next_bytes():
    text = np.arange(200, dtype=np.uint8)
    inputs, targets = Corpus(MODEL, 12, 0, text).sample(0, 0)
    assert np.array_equal(targets, inputs + 1)
    x, y = Corpus(Model(kind="mlp", hidden=16, layers=1), 12, 0, text).sample(0, 0)
    np.testing.assert_allclose((y - x) * 127.5, 16, atol=1e-4)


def test_padding_differs_from_sample_to_sample():
    samples = RandomSamples(MODEL, 12, 0)
    counts = [int((samples.sample(0, i)[1] == IGNORED).sum()) for i in range(8)]
    assert counts[0] == 0
    assert len(set(counts)) > 3
    assert max(counts) < 12


def test_tokens_of_any_width_become_what_tables_are_looked_up_with():
    class Narrow:
        def sample(self, step, index):
            return np.arange(4, dtype=np.uint16), np.arange(1, 5, dtype=np.int32)

    batch = batch_of(Narrow(), 0, range(2), "cpu", torch.float32)
    assert (batch.inputs.dtype, batch.targets.dtype) == (torch.int64, torch.int64)
    assert batch.inputs.tolist() == [[0, 1, 2, 3]] * 2


def test_a_vocabulary_too_small_for_bytes_is_refused():
    with pytest.raises(MeshwrightError, match="MW-DATA-001"):
        Corpus(MODEL.but(vocab=100), 12, 0)
    with pytest.raises(MeshwrightError, match="MW-DATA-002"):
        Corpus(MODEL, 12, 0, np.zeros(10, np.uint8))
