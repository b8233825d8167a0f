"""What one device would have, from the parts that the ranks of a split module hold: sums, norm and whole tensors."""

import torch

from meshwright.parallel import exchange
from meshwright.parallel.tensor.cutting import Split


def parts(done: Split, name, local):
    """Views of this rank's part, one for each cut; of a parameter that is not cut, the whole."""
    cuts = done.cuts_of(name)
    return list(local.split([cut.length for cut in cuts], dim=cuts[0].dim)) if cuts else [local]


def sum_gradients(done: Split, module):
    """Complete the gradients that are partial sums, after the last backward."""
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    copied = [
        part
        for n in gradients
        if n in done.copied
        for cut, part in zip(done.cuts_of(n), parts(done, n, gradients[n]), strict=True)
        if cut.copies > 1
    ]
    for tensors, group in (([gradients[n] for n in gradients if n in done.partial], done.group), (copied, done.copies)):
        if tensors and group is not None:
            exchange.sum_together(tensors, group)


def norm(done: Split, module):
    """The norm of the whole model's gradient: each rank counts its own part, and one rank of several that hold copies."""
    squares = torch.zeros((), dtype=torch.float64)
    for name, p in module.named_parameters():
        copies = [cut.copies for cut in done.cuts_of(name)] or [done.group.size()]
        for local, count in zip(parts(done, name, p.grad), copies, strict=True) if p.grad is not None else ():
            if done.group.rank() % count == 0:
                squares += local.double().square().sum()
    return exchange.all_reduce(squares, done.group).sqrt()


@torch.no_grad()
def whole(done: Split, name, part):
    """The full tensor, on every rank, of which `part` is this rank's part: a parameter, its gradient or a moment."""
    cuts = done.cuts_of(name)
    if not cuts:
        return part.detach().clone()
    full = part.new_zeros([cuts[0].full if dim == cuts[0].dim else n for dim, n in enumerate(part.shape)])
    for cut, local in zip(cuts, parts(done, name, part), strict=True):
        if done.group.rank() % cut.copies == 0:
            full.narrow(cut.dim, cut.start, cut.length).copy_(local)
    return exchange.all_reduce(full, done.group)
