"""Load balancing of routed experts: once per step, over all tokens of the step.

A router counts how many copies each expert got and how many were dropped. After backward the counts of all layers are
summed over the ranks of a stage in one small all-reduce; after the update balancing biases move by the load, and its metrics are reported.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn

from meshwright.models.moe import MixtureOfExperts
from meshwright.models.router import load_metrics
from meshwright.parallel.expert.dispatch import ParallelPlacement
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.on_host import OnHost
from meshwright.parallel.pieces import Piece


@dataclass
class Loads:
    """The load of every layer of this stage with experts, over all tokens of the step."""

    layers: dict[str, MixtureOfExperts]
    loads_L2E: Tensor | tuple[()] = ()
    on_host: OnHost | None = None

    def metrics(self) -> list[dict[str, float]]:
        return [] if self.on_host is None else [load_metrics(load_2E) for load_2E in self.on_host.values()]


@torch.no_grad()
def loads(modules: Iterable[nn.Module], mesh: Mesh) -> Loads:
    """Sum the load of every layer over all tokens, in one small all-reduce."""
    named = [(name, part) for module in modules for name, part in module.named_modules()]
    mixtures = {name: part for name, part in named if isinstance(part, MixtureOfExperts)}
    counted = {name: part.router.load for name, part in mixtures.items() if part.router.load is not None}
    layers = {name: mixtures[name] for name in counted}
    if not layers:
        return Loads(layers)
    found = torch.stack(list(counted.values()))
    group = mesh.group("stage")
    if group is not None:
        distributed.all_reduce(found, group=group)
    return Loads(layers, found, OnHost(found))


@torch.no_grad()
def balance(found: Loads, pieces: list[Piece], mesh: Mesh, masters: Sequence[Piece] = ()) -> dict[str, float]:
    """Move the balancing biases by the loads: first their wide `masters` where there are any. Returns the metrics of the worst layer of all
    stages."""
    by_name = {piece.name: piece for piece in pieces}
    wide = {piece.name: piece for piece in masters}
    for (name, part), load_2E in zip(found.layers.items(), found.loads_L2E, strict=True):
        bias = by_name.get(f"{name}.router.balance_bias")
        if bias is not None:
            master = wide.get(bias.name, bias)
            master.local.add_(bias.part_of(part.router.balance(load_2E[0])).to(master.local.device))
            bias.local.copy_(master.local)
        part.router.load = None
        if isinstance(part.placement, ParallelPlacement):
            part.placement.end_step()
    return worst(found.metrics(), mesh)


def mixtures_in(modules: Iterable[nn.Module]) -> list[tuple[MixtureOfExperts, ParallelPlacement]]:
    """The mixtures of experts of stages under a plan, with their placement."""
    parts = (part for module in modules for part in module.modules() if isinstance(part, MixtureOfExperts))
    return [(part, part.placement) for part in parts if isinstance(part.placement, ParallelPlacement)]


def worst(metrics: list[dict[str, float]], mesh: Mesh) -> dict[str, float]:
    """The metrics of the worst layer, over all pipeline stages: the smallest entropy, and the largest of the others."""
    rows = [[-m["entropy"], m["peak"], m["idle"], m["dropped"]] for m in metrics]
    most = torch.tensor(rows or [[-1.0, 0.0, 0.0, 0.0]], dtype=torch.float64).amax(0)
    group = mesh.group("pp")
    if group is not None:
        most = most.to(mesh.device)
        distributed.all_reduce(most, distributed.ReduceOp.MAX, group)
    entropy, *largest = most.tolist()
    return dict(zip(("entropy", "peak", "idle", "dropped"), (-entropy, *largest), strict=True))


def copies_sent(modules: Iterable[nn.Module], copies: float) -> tuple[float, float] | None:
    """The share of this rank's token copies that were sent to experts in the last step, and to experts of other ranks, if each layer and
    micro-batch routes `copies` of them; None without routed experts on this rank."""
    placements = {placement for _, placement in mixtures_in(modules)}
    first = [d for p in placements for d in p.last_dispatches if not d.recomputed]
    total = len(first) * copies
    return (sum(d.rows.sent for d in first) / total, sum(d.crossing for d in first) / total) if first else None


def reset_load(modules: Iterable[nn.Module]) -> None:
    """Drop the load counted in a step that was aborted."""
    for part, placement in mixtures_in(modules):
        part.router.load = None
        placement.dispatches.clear()


def scale_losses(modules: Iterable[nn.Module], scale: float) -> None:
    """Scale the losses that routers add like the loss of the step."""
    for _, placement in mixtures_in(modules):
        placement.share = scale * placement.microbatch_share
