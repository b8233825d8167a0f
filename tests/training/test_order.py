"""The order of samples: a pure function of seed, step and index, whatever the layout and the number of restarts."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.training.data.samples import Loader, Sequences, TokenSamples, ValidationSamples, batch_of
from meshwright.training.data.sources import Documents, Order, is_validation, permuted
from meshwright.training.data.token_file import TokenFile


def token_file(lengths, first=0, name="tokens"):
    """Documents of these lengths; every token is its own number, from `first` on."""
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    return TokenFile(name, np.arange(first, first + offsets[-1], dtype=np.uint16), offsets)


def sequences(file, seq=8, pack=True, masked=False, share=0.0, validation=False):
    return Sequences(Documents(file, share, validation), seq, pack, masked, 65536)


@given(st.integers(1, 400), st.integers(0, 2**63), st.integers(0, 3))
def test_a_permutation_reaches_every_index_once(size, seed, epoch):
    assert sorted(permuted(i, size, seed, epoch) for i in range(size)) == list(range(size))


def test_a_permutation_of_a_trillion_needs_no_memory_and_depends_on_its_key():
    size = 10**12
    images = [permuted(i, size, 7) for i in range(200)]
    assert len(set(images)) == 200
    assert max(images) < size
    assert abs(np.mean(images) / size - 0.5) < 0.1
    assert images != [permuted(i, size, 8) for i in range(200)]


@given(st.lists(st.floats(0.05, 10), min_size=1, max_size=5), st.integers(1, 300))
def test_any_run_of_samples_is_mixed_by_the_weights(weights, samples):
    order = Order([50] * len(weights), weights, 0)
    drawn = [order.locate(g) for g in range(samples)]
    counts = Counter(source for source, _ in drawn)
    for source, weight in enumerate(weights):
        assert abs(counts[source] - samples * weight / sum(weights)) <= len(weights)
        assert [n for s, n in drawn if s == source] == list(range(counts[source]))  # each draw once, in order


def test_an_epoch_reads_every_sequence_once_and_the_next_in_another_order():
    order = Order([30], [1], seed=3)
    first, second = ([order.draw(g)[1] for g in range(start, start + 30)] for start in (0, 30))
    assert sorted(first) == sorted(second) == list(range(30))
    assert first != second
    assert first != [Order([30], [1], seed=4).draw(g)[1] for g in range(30)]


@given(st.integers(0, 2**31), st.integers(0, 500), st.sampled_from([1, 2, 3, 4, 6, 12]), st.sampled_from([1, 2, 4]))
def test_the_batch_of_a_step_is_the_same_for_every_layout_and_after_a_restart(seed, step, dp, cp):
    files = [token_file([5, 9, 30, 4]), token_file([80, 3], first=1000)]
    batch, seq = 12, 8

    def rank(d, c):  # a new object for each rank, as after a restart
        samples = TokenSamples([sequences(f, seq, masked=True) for f in files], [2.0, 1.0], batch, seed)
        indices = range(d * batch // dp, (d + 1) * batch // dp)
        positions = torch.arange(c * seq // cp, (c + 1) * seq // cp)
        return batch_of(samples, step, indices, "cpu", torch.float32, positions)

    one = TokenSamples([sequences(f, seq, masked=True) for f in files], [2.0, 1.0], batch, seed)
    for earlier in range(max(0, step - 2), step):
        one.sample(earlier, 0)
    whole = batch_of(one, step, range(batch), "cpu", torch.float32)
    parts = [[rank(d, c) for c in range(cp)] for d in range(dp)]
    joined = torch.cat([torch.cat([part.inputs for part in row], dim=1) for row in parts])
    assert torch.equal(joined, whole.inputs)
    assert torch.equal(torch.cat([row[0].documents_BS for row in parts]), whole.documents_BS)


def test_packed_sequences_contain_every_token_once_and_targets_are_the_next_tokens():
    packed = sequences(token_file([5, 1, 9, 0, 11]), seq=4)
    assert packed.count == 6
    assert np.concatenate([packed[i][0] for i in range(6)]).tolist() == list(range(24))
    assert all((packed[i][1] == packed[i][0] + 1).all() for i in range(6))


def test_a_document_mask_numbers_documents_and_drops_the_target_across_them():
    inputs, targets, documents = sequences(token_file([3, 4, 10]), seq=8, masked=True)[0]
    assert documents.tolist() == [0, 0, 0, 1, 1, 1, 1, 2]
    assert targets.tolist() == [1, 2, -100, 4, 5, 6, -100, 8]
    assert inputs.tolist() == list(range(8))


def test_unpacked_sequences_are_documents_cut_and_padded():
    single = sequences(token_file([3, 1, 10]), seq=4, pack=False, masked=True)
    rows = [[side.tolist() for side in single[i]] for i in range(single.count)]
    assert rows == [
        [[0, 1, 0, 0], [1, 2, -100, -100], [0, 0, 1, 1]],
        [[4, 5, 6, 7], [5, 6, 7, 8], [0, 0, 0, 0]],
        [[8, 9, 10, 11], [9, 10, 11, 12], [0, 0, 0, 0]],
        [[12, 0, 0, 0], [13, -100, -100, -100], [0, 1, 1, 1]],
    ]


def test_the_validation_split_is_a_function_of_the_document_number():
    numbers = np.arange(20_000)
    chosen = is_validation(numbers, 0.1)
    assert abs(chosen.mean() - 0.1) < 0.01
    assert (is_validation(numbers[5000:], 0.1) == chosen[5000:]).all()
    assert (is_validation(numbers, 0.2) >= chosen).all()  # a larger share keeps the documents of a smaller one
    file = token_file([7] * 200)
    parts = [Documents(file, 0.3, validation) for validation in (False, True)]
    tokens = [part.window(0, part.tokens)[0] for part in parts]
    assert sorted(np.concatenate(tokens)) == list(range(1400))
    assert {int(t) // 7 for t in tokens[1]} == set(np.flatnonzero(is_validation(np.arange(200), 0.3)))
    for part, all_tokens in zip(parts, tokens, strict=True):
        for start, stop in ((0, 5), (6, 8), (13, 40)):
            assert part.window(start, stop)[0].tolist() == all_tokens[start:stop].tolist()


def test_validation_samples_are_fixed_and_padded_at_the_end():
    sources = [sequences(token_file([41])), sequences(token_file([25], first=500))]
    samples = ValidationSamples(sources, batch=3, batches=100)
    assert (samples.count, samples.batches) == (8, 3)
    drawn = [samples.sample(step, i) for step in range(3) for i in range(3)]
    assert len({int(inputs[0]) for inputs, _ in drawn[:8]}) == 8
    assert (drawn[8][1] == -100).all()
    assert ValidationSamples(sources, 3, 1).batches == 1


def test_the_loader_prepares_the_following_steps_and_gives_the_same_batches():
    samples = TokenSamples([sequences(token_file([100]))], [], batch=4, seed=0)
    plain, ahead = (Loader(samples, "cpu", torch.float32, None, ahead) for ahead in (0, 2))
    for step in (0, 1, 2, 9, 10, 3):  # a jump is read at once
        for a, b in zip(plain.batch(step, range(4))[:2], ahead.batch(step, range(4))[:2], strict=True):
            assert torch.equal(a, b)
    assert torch.equal(ahead.batch(4, [3, 1]).inputs, plain.batch(4, [3, 1]).inputs)
    ahead.close()


def test_the_loader_raises_what_reading_raised():
    class Broken:
        def sample(self, step, index):
            raise OSError("the disk is gone")

    loader = Loader(Broken(), "cpu", torch.float32, None, ahead=2)
    with pytest.raises(OSError, match="disk"):
        loader.batch(0, range(2))
    loader.close()
