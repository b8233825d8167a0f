"""Bucket and prefetch timelines on numbers small enough to check by hand."""

from itertools import pairwise

import pytest

from meshwright.cost.overlap import BackwardLayer, bucket_timeline, prefetch_timeline

LAYERS = [BackwardLayer(f"layer {k}", 1.0, 30.0) for k in (3, 2, 1, 0)]


def spans(timeline, stream):
    return [(span.start, span.end) for span in timeline if span.stream == stream]


def test_buckets_leave_when_they_are_full():
    found = bucket_timeline(LAYERS, 40.0, lambda n: n / 40.0)
    assert spans(found, "compute") == [(0, 1), (1, 2), (2, 3), (3, 4)]
    # 30, 60 → one bucket at 2 s (20 left), 50 → one at 3 s (10 left), 40 → one at 4 s
    assert spans(found, "communication") == [(2, 3), (3, 4), (4, 5)]


def test_without_overlap_all_buckets_follow_backward():
    found = bucket_timeline(LAYERS, 40.0, lambda n: n / 40.0, overlap=False)
    assert spans(found, "communication") == [(4, 5), (5, 6), (6, 7)]


def test_a_last_bucket_may_be_smaller():
    found = bucket_timeline(LAYERS, 100.0, lambda n: n / 40.0)
    assert spans(found, "communication") == [(4, 6.5), (6.5, pytest.approx(7.0))]


@pytest.mark.parametrize(
    ("gather", "ahead", "end"),
    [(0.5, False, 4.5), (0.5, True, 3.5), (2.0, False, 9.0), (2.0, True, 7.0)],
)
def test_prefetching_hides_the_next_gather(gather, ahead, end):
    found = prefetch_timeline(["a", "b", "c"], 1.0, gather, ahead)
    assert max(span.end for span in found) == end
    for stream in ("compute", "communication"):
        mine = spans(found, stream)
        assert all(a[1] <= b[0] for a, b in pairwise(mine))
