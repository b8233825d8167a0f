"""A process group of one process, which is one rank of a world of any size: torch's backend "fake".

Its collectives return at once. Tensors that would be received are filled, so that a step that runs on real tensors computes with numbers of the
usual size and not with NaN, which a GPU multiplies faster:

    all-gather      every rank's part is this rank's
    reduce-scatter  this rank's part of its own input
    all-to-all      the rows that this rank sends, as many as it receives
    receive         normal random numbers; whole numbers are 1

torch 2.13 takes the backend by name. Before, the module that registers it is private: `torch.testing._internal.distributed.fake_pg`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import distributed_c10d

from meshwright.parallel import operators

PUBLIC_SINCE = (2, 13)


@contextmanager
def fake_group(rank: int, world: int) -> Iterator[None]:
    """Inside the `with` block this process is one rank of the default group."""
    if tuple(map(int, torch.__version__.split(".")[:2])) >= PUBLIC_SINCE:
        distributed.init_process_group("fake", rank=rank, world_size=world)
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Inside the `with` block these attributes (owner, name, value) have other values."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for change in changes:
        setattr(*change)
    try:
        yield
    finally:
        for change in before:
            setattr(*change)


@contextmanager
def filled_receives() -> Iterator[None]:
    """Inside the `with` block, collectives of a fake group fill what they would receive."""
    scatters = [(distributed, "reduce_scatter_tensor"), (operators, "scatter_into")]
    if hasattr(distributed, "reduce_scatter_single"):
        scatters.append((distributed, "reduce_scatter_single"))
    changes = [(owner, name, filling(getattr(owner, name), own_part)) for owner, name in scatters]
    changes.append((distributed, "all_to_all_single", filling(distributed.all_to_all_single, own_part)))
    changes.append((distributed, "recv", filling(distributed.recv, random_values)))
    receive = filling(distributed.irecv, random_values)
    changes += [(module, "irecv", receive) for module in (distributed, distributed_c10d)]  # torch compares the two
    with replaced(*changes):
        yield


def filling(collective: Callable[..., Any], fill: Callable[..., None]) -> Callable[..., Any]:
    """The collective, which then fills its output: the first tensor of its arguments; the second is its input."""

    def call(*args: Any, **kwargs: Any) -> Any:
        work = collective(*args, **kwargs)
        with torch.no_grad():
            fill(*[x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)])
        return work

    return call


def own_part(out: Tensor, source: Tensor) -> None:
    """Copy the start of what was sent, as often as it fits."""
    sent, received = source.reshape(-1), out.view(-1)
    if len(sent):
        for part in received.split(len(sent)):
            part.copy_(sent[: len(part)])


def random_values(out: Tensor, *_: Any) -> None:
    with torch.no_grad():
        if out.is_floating_point():
            out.normal_()
        else:
            out.fill_(1)  # torch's stages vote on what they know: each says yes
