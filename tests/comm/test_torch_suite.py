"""PyTorch's own process-group tests on the backend: a sample every day, all of them in `make soak`."""

import pytest

from comm import torch_suite

SAMPLE = [
    "test_all_reduce_coalesced_full_group_sum",
    "test_all_gather_into_cat_tensor_cpu",
    "test_all_gather_coalesced_full_group",
    "test_all_to_all_single_unequal_split",
    "test_barrier",
    "test_broadcast_group",
    "test_gather",
    "test_reduce_scatter_tensor_cpu",
    "test_scatter",
    "test_send_recv_any_source",
    "test_DistributedDataParallelCPU",
]


def run(names):
    found = torch_suite.run(names)
    return {name: text for name, (state, text) in found.items() if state == "failed"}


@pytest.mark.slow
def test_a_sample_of_pytorchs_process_group_tests():
    known = set(torch_suite.names())
    assert run([name for name in SAMPLE if name in known]) == {}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pytorchs_process_group_tests():
    failed = run(torch_suite.names())
    assert sorted(set(failed) - set(torch_suite.CANNOT_PASS)) == []
