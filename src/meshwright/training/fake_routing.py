"""Routing to experts in a step with fake tensors: which expert a token chooses depends on values, which fake tensors do not have.

Every expert gets an equal share of the copies. The numbers of copies are then plain integers (`Counts`), and the buffers that are sent to
experts and back have the sizes of a balanced step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from meshwright.models.router import Router, Routing
from meshwright.parallel.expert.dispatch import ExpertDispatch, ParallelPlacement


class Counts(np.ndarray):
    """Numbers of copies, with the methods of a tensor that a dispatch calls."""

    @classmethod
    def balanced(cls, rows: int, experts: int) -> Counts:
        """`rows` copies over `experts`: equal numbers, the first ones get one more where they do not divide."""
        return (rows // experts + (np.arange(experts) < rows % experts)).view(cls)

    def view(self, *shape: Any) -> Any:  # type: ignore[override]
        return super().view(*shape) if isinstance(shape[0], type) else self.reshape(shape)


@contextmanager
def balanced_routing() -> Iterator[None]:
    """While active, routers choose every expert equally often."""
    route, exchange, by_expert = Router.forward, ParallelPlacement.exchange_counts, ExpertDispatch._by_expert

    def forward(router: Router, x_TH: torch.Tensor, tokens: Any) -> Routing:
        routing = route(router, x_TH, tokens)
        counts: Any = Counts.balanced(len(routing.token_R), router.experts)
        return replace(routing, counts_E=counts)

    def exchange_counts(placement: ParallelPlacement, outgoing: Any) -> Any:
        """Every rank sends what this one sends to its own place in the group."""
        ranks, mine = placement.mesh.size("expert_tp"), placement.mesh.index("ep")
        return np.broadcast_to(outgoing[mine], (ranks, placement.ep_size, outgoing.shape[1])).view(Counts)

    def rows_by_expert(dispatch: ExpertDispatch, device: torch.device) -> torch.Tensor:
        return torch.arange(int(dispatch.incoming.sum()), device=device)

    replaced: tuple[tuple[Any, str, Any, Any], ...] = (
        (Router, "forward", route, forward),
        (ParallelPlacement, "exchange_counts", exchange, exchange_counts),
        (ExpertDispatch, "_by_expert", by_expert, rows_by_expert),
    )
    for owner, name, _, new in replaced:
        setattr(owner, name, new)
    try:
        yield
    finally:
        for owner, name, plain, _ in replaced:
            setattr(owner, name, plain)
