"""Experts of another library, spread over the ranks of expert parallelism.

The module holds its experts stacked, [E, …] in every parameter, and is called as Hugging Face's are:

    forward(hidden [T, H], expert of each copy [T, K], weight of each copy [T, K]) → [T, H]

Each of ep ranks keeps E/ep experts. A token is sent to the ranks of its K experts and back (`dispatch.all_to_all`); the module's own `forward`
computes the experts held here, each row for one expert with weight 1, and the weights are applied where the tokens come back.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup

from meshwright.errors import MeshwrightError
from meshwright.parallel.expert.dispatch import all_to_all

COUNT = "num_experts"  # the attribute by which such modules count their experts


def spread_stacked(name: str, part: Any, group: ProcessGroup) -> list[str]:
    """Keep this rank's experts of a module, and send tokens to the others. Returns the names of the parameters cut."""
    held = dict(part.named_parameters(recurse=False))
    counts = {p.shape[0] for p in held.values() if p.ndim}
    experts, ranks = next(iter(counts), 0), group.size()
    if len(counts) != 1 or (any(part.children()) and any(p.numel() for c in part.children() for p in c.parameters())):
        raise MeshwrightError(
            "MW-EP-002",
            f"'{name}', a {type(part).__name__}, does not hold its experts stacked",
            why="Dimension 0 of each of its parameters must count the experts: spread over ep, a rank keeps some of them",
            fix="set plan.ep=1 (the experts are still split over tp), or stack the weights: [experts, out, in]",
        )
    if experts % ranks:
        raise MeshwrightError(
            "MW-EP-002",
            f"{experts} experts of '{name}' do not divide over ep={ranks}",
            why="Each rank holds whole experts",
            valid=[d for d in range(1, experts + 1) if experts % d == 0],
        )
    for field_name, parameter in held.items():
        kept = parameter.detach().chunk(ranks)[group.rank()].clone()
        setattr(part, field_name, nn.Parameter(kept, requires_grad=parameter.requires_grad))
    if hasattr(part, COUNT):
        setattr(part, COUNT, experts // ranks)
    part.forward = partial(_dispatched, part.forward, group, experts)
    return [f"{name}.{field_name}" for field_name in held]


def _dispatched(
    own: Any, group: ProcessGroup, experts: int, hidden_TH: Tensor, index_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    ranks, here = group.size(), experts // group.size()
    chosen = index_TK.flatten()
    order = chosen.argsort(stable=True)
    tokens = order // index_TK.shape[1]
    leaving = chosen.bincount(minlength=experts).view(ranks, here)
    arriving = torch.empty_like(leaving)
    distributed.all_to_all_single(arriving, leaving.contiguous(), group=group)
    out, into = leaving.sum(1).tolist(), arriving.sum(1).tolist()
    rows = all_to_all(hidden_TH[tokens], group, out, into)
    expert = torch.arange(here, device=rows.device).repeat(ranks).repeat_interleave(arriving.flatten())
    made = own(rows, expert[:, None], torch.ones_like(rows[:, :1]))
    if not made.requires_grad:  # no row came: backward must still take part in the exchange
        made = made + rows * 0
    weighted = all_to_all(made, group, into, out) * weights_TK.flatten()[order, None]
    return torch.zeros_like(hidden_TH).index_add(0, tokens, weighted.to(hidden_TH.dtype))
