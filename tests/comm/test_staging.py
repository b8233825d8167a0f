"""Tensors of a device move through host memory: here tensors of the CPU are treated as such, so that every copy is tested without a GPU."""

import pytest
import torch
from torch import distributed

import ranks


def move(context):
    from meshwright.comm.backend import messages
    from meshwright.parallel import operators

    copied = []
    to_host = messages.to_host
    messages.is_staged = lambda tensor: True
    messages.to_host = lambda tensor: copied.append(tensor.shape) or to_host(tensor)
    r, mine = context.rank, torch.arange(4.0) + 10 * context.rank
    out = {}
    out["all_reduce"] = mine.clone()
    work = distributed.all_reduce(out["all_reduce"], async_op=True)
    work.wait()
    out["strided"] = torch.arange(8.0).view(4, 2)[:, 0]
    distributed.all_reduce(out["strided"])
    out["broadcast"] = mine.clone()
    distributed.broadcast(out["broadcast"], 1)
    out["all_gather"] = torch.empty(8)
    operators.gather_into(out["all_gather"], mine)
    parts = [torch.empty(4), torch.empty(4)]
    distributed.all_gather(parts, mine)
    out["list"] = torch.cat(parts)
    out["reduce_scatter"] = torch.empty(2)
    operators.scatter_into(out["reduce_scatter"], mine)
    out["all_to_all"] = torch.empty(4)
    distributed.all_to_all_single(out["all_to_all"], mine, [3, 1] if r else [1, 3], [3, 1] if r else [1, 3])
    for size in (3, 3000):  # in the envelope, and behind it
        received = torch.empty(2, size).t().requires_grad_()  # as the input of a pipeline stage
        sends = [distributed.isend(torch.full((size, 2), float(r)), 1 - r), distributed.irecv(received, 1 - r)]
        for sent in sends:
            sent.wait()
        out[f"message {size}"] = received.unique()
    distributed.barrier()
    return {name: tensor.tolist() for name, tensor in out.items()}, len(copied)


@pytest.mark.timeout(60)
def test_every_kind_of_message_returns_to_the_tensor_of_the_device():
    (first, count), (second, _) = ranks.run(2, move, backend="meshwright")
    both = {
        "all_reduce": [10.0, 12, 14, 16],
        "strided": [0.0, 4, 8, 12],
        "broadcast": [10.0, 11, 12, 13],
        "all_gather": [0.0, 1, 2, 3, 10, 11, 12, 13],
        "list": [0.0, 1, 2, 3, 10, 11, 12, 13],
    }
    assert {name: first[name] for name in both} == {name: second[name] for name in both} == both
    assert (first["reduce_scatter"], second["reduce_scatter"]) == ([10.0, 12], [14.0, 16])
    assert (first["all_to_all"], second["all_to_all"]) == ([0.0, 10, 11, 12], [1.0, 2, 3, 13])
    assert all((first[name], second[name]) == ([1.0], [0.0]) for name in ("message 3", "message 3000"))
    assert count >= 9
