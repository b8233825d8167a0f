"""A process group of one process, which is one rank of a world of any size: torch's backend "fake".

Its collectives return at once. Tensors that would be received are filled (`filled_receives`), so that a step on real tensors computes with
numbers of the usual size and not with NaN, which a GPU multiplies faster:

    all-gather      every rank's part is this rank's
    reduce-scatter  this rank's part of its own input
    all-to-all      the rows that this rank sends, as many as it receives
    receive         normal random numbers; whole numbers are 1

These copies are no work of the rank: `Fills.times` repeats them, so that a measurement can tell what they take.

torch 2.13 takes the backend by name. Before, the module that registers it is private: `torch.testing._internal.distributed.fake_pg`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import distributed_c10d

from meshwright.host import replaced
from meshwright.models.router import Router, Routing
from meshwright.parallel import operators
from meshwright.parallel.expert.dispatch import ParallelPlacement

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
def balanced_routing(
    counts: Callable[[Routing, int], Any], spread: Callable[[Any, tuple[int, ...]], Any], *changes: tuple[Any, str, Any]
) -> Iterator[None]:
    """Inside the `with` block routers report equal numbers of tokens for all experts, `counts(routing, experts)`, and every rank sends what this one
    sends to its own place in the group, a row that `spread` repeats to a shape."""
    route = Router.forward

    def forward(router: Router, x_TH: Tensor, tokens: Any) -> Routing:
        routing = route(router, x_TH, tokens)
        return replace(routing, counts_E=counts(routing, router.experts))

    def exchange_counts(placement: ParallelPlacement, outgoing: Any) -> Any:
        shape = placement.mesh.size("expert_tp"), placement.ep_size, outgoing.shape[1]
        return spread(outgoing[placement.mesh.index("ep")], shape)

    with replaced((Router, "forward", forward), (ParallelPlacement, "exchange_counts", exchange_counts), *changes):
        yield


@dataclass
class Fills:
    """How often each collective of a fake group fills what it would receive."""

    times: int = 1

    def by(self, fill: Callable[..., None], always_work: bool = False) -> Callable[..., Any]:
        """A collective that fills its output, the first tensor of its arguments, in one kernel; the second is its input. torch's backend would copy
        the part of each rank in a kernel of its own, which takes the host milliseconds in a large group."""

        def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            with torch.no_grad():
                for _ in range(self.times):
                    fill(*[x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)])
            # A finished work of the fake group.
            return distributed.all_reduce(torch.empty(0), async_op=True) if async_op or always_work else None

        return call


@contextmanager
def filled_receives() -> Iterator[Fills]:
    """Inside the `with` block, collectives of a fake group fill what they would receive."""
    fills = Fills()
    gathers, scatters = (
        ("all_gather_into_tensor", "all_gather_single"),
        ("reduce_scatter_tensor", "reduce_scatter_single"),
    )
    changes = [(distributed, name, fills.by(all_parts)) for name in gathers if hasattr(distributed, name)]
    changes += [(distributed, name, fills.by(own_part)) for name in scatters if hasattr(distributed, name)]
    changes += [(operators, "gather_into", fills.by(all_parts)), (operators, "scatter_into", fills.by(own_part))]
    changes += [
        (distributed, "all_to_all_single", fills.by(own_part)),
        (distributed, "recv", fills.by(random_values)),
    ]
    receive = fills.by(random_values, always_work=True)
    changes += [(module, "irecv", receive) for module in (distributed, distributed_c10d)]  # torch compares the two
    with replaced(*changes):
        yield fills


def all_parts(out: Tensor, source: Tensor) -> None:
    """Copy what was sent to the place of every rank."""
    sent = source.reshape(-1)
    if len(sent):
        out.view(-1, len(sent)).copy_(sent.expand(out.numel() // len(sent), -1))


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
