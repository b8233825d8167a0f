"""The styles of a sharding table: what each does to one module, in place. `tables` lists them.

A style is a function of the `Split` that records the changes, the module's name and the module. How it cuts parameters, and which
gradients are partial sums, is the rule of the same name in `describe.sharding.rules`, which `shard_parameters` reads for our models
and for a user's module; the function then wraps `forward` with the collectives of `exchange`.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshwright.describe.sharding import even_range
from meshwright.errors import MeshwrightError
from meshwright.models.step_context import current
from meshwright.parallel import exchange
from meshwright.parallel.tensor.attention import split_attention
from meshwright.parallel.tensor.cutting import (
    Split,
    check_plain,
    cut_fused,
    divide_counts,
    is_transposed,
    neighbours,
    output_dim,
    product,
    set_width,
    shard_parameters,
)
from meshwright.parallel.tensor.regather import regather
from meshwright.parallel.tensor.vocabulary import embed

FEATURES = -1


def input_of(forward: Callable[..., Any]) -> Callable[..., Any]:
    """(args, kwargs) → the first argument, however it was passed, and how to call `forward` with another in its place."""
    first = next(iter(inspect.signature(forward).parameters))

    def taken(args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Callable[[Any], Any]]:
        if args:
            return args[0], lambda x: forward(x, *args[1:], **kwargs)
        return kwargs[first], lambda x: forward(**{**kwargs, first: x})

    return taken


def _region(done: Split, name: str, part: Any) -> None:
    """Every tensor that enters and needs a gradient (queries, and what they attend to) has it summed over the ranks. A sequence is gathered for the
    first argument only: it is not known whether another one is divided."""
    taken, forward = input_of(part.forward), part.forward

    def enter(value: Any) -> Any:
        if isinstance(value, Tensor):
            return done.enter(value) if value.requires_grad else value
        if isinstance(value, dict):
            return {key: enter(item) for key, item in value.items()}
        return type(value)(map(enter, value)) if type(value) in (tuple, list) else value

    def copied(*args: Any, **kwargs: Any) -> Any:
        return forward(*enter(args), **enter(kwargs))

    def gathered(*args: Any, **kwargs: Any) -> Any:
        x, call = taken(args, kwargs)
        if any(t is not x and t.requires_grad for t in [*args, *kwargs.values()] if isinstance(t, Tensor)):
            raise MeshwrightError(
                "MW-TP-004",
                f"the region '{name}' takes two tensors that need gradients, under sequence parallelism",
                why="It is not known whether the second one is divided along the sequence",
                fix="sp=false",
            )
        if torch.compiler.is_compiling():
            return call(done.enter(x) if current().keeps_gathered else checkpoint(done.enter, x, use_reentrant=False))
        whole = done.enter(x)
        with regather(whole, x, done.group, done.sequence_dim):
            return call(whole)

    part.forward = gathered if done.sequence else copied


def _cuts(style: str) -> Callable[[Split, str, Any], None]:
    """A style that only cuts parameters, or only names a sum of their gradients."""

    def apply(done: Split, name: str, part: Any) -> None:
        shard_parameters(done, name, part, style)
        if style in ("column", "logits"):
            set_width(part)

    return apply


def _unchanged(done: Split, name: str, part: Any) -> None:
    """Nothing to do to the module."""


def _enter(done: Split, name: str, part: Any) -> None:
    forward = part.forward
    part.forward = lambda x: done.enter(forward(x))


def _keys(done: Split, name: str, part: Any, kind: str = "keys", argument: str = "") -> None:
    """Columns by whole heads; with more ranks than heads, each head is on as many neighbours as share it."""
    width, ranks = part.weight.shape[0], done.group.size()
    head = int(argument) if argument.isdecimal() else 0 if argument else done.head
    if not head or width % head:
        raise MeshwrightError(
            "MW-TP-002",
            f"'{name}' has {width} columns in heads of {argument or head}",
            why="Keys and values are split by whole heads",
            fix="write the width of a head into the table: keys:128",
        )
    heads = width // head
    if heads % ranks and ranks % heads:
        what = f"{heads} KV heads of '{name}' and tp={ranks}: one must divide the other"
        raise MeshwrightError("MW-TP-002", what, why="A head is never cut")
    copies = max(1, ranks // heads)
    shard_parameters(done, name, part, "keys", copies)
    set_width(part)
    if copies > 1:
        done.copies = done.copies or neighbours(done.group, copies)


def _row(done: Split, name: str, part: Any) -> None:
    """In the all-gather form the input is gathered, each rank computes columns of the output, and these are gathered. All ranks continue with
    the same output, so each takes its own slice of the gradient."""
    check_plain(name, part)
    shard_parameters(done, name, part, "row")

    def summed(x: Tensor) -> Tensor:
        y = done.leave(product(part, x))
        return y if part.bias is None else y + part.bias

    def gathered(x: Tensor) -> Tensor:
        y = product(part, exchange.gather_in(x, done.group, FEATURES), part.bias)
        return exchange.join(y, done.group, FEATURES)

    if done.form == "all-gather":
        set_width(part)
        part.forward = gathered
    else:
        setattr(part, "nx" if is_transposed(part) else "in_features", part.weight.shape[1 - output_dim(part)])
        part.forward = summed


def _vocabulary(done: Split, name: str, part: Any) -> None:
    _rows_of_table(done, name, part, done.leave)


def _embedding(done: Split, name: str, part: Any) -> None:
    """Its output stays whole under sequence parallelism, so that a model can read the length of the sequence from it (for positions, for
    a mask). "split_sequence" divides it later."""
    _rows_of_table(done, name, part, lambda own: exchange.reduce_out(own, done.group))


def _rows_of_table(done: Split, name: str, part: Any, leave: Callable[[Tensor], Tensor]) -> None:
    if part.max_norm is not None or part.scale_grad_by_freq or part.sparse:
        what = f"'{name}' has max_norm, scale_grad_by_freq or sparse gradients"
        raise MeshwrightError("MW-TP-004", what, why="They need rows that other ranks hold")
    check_plain(name, part)
    shard_parameters(done, name, part, "vocabulary")
    cut, padding = done.cuts[f"{name}.weight"], part.padding_idx
    held = padding is not None and cut.start <= padding < cut.start + cut.length
    part.num_embeddings, part.padding_idx = cut.length, padding - cut.start if held else None
    part.forward = lambda ids: leave(embed(ids, part.weight, cut.start, cut.full, part.padding_idx))


def _split_sequence(done: Split, name: str, part: Any) -> None:
    """Under sequence parallelism its first argument, whole on every rank, is divided along the sequence."""
    taken = input_of(part.forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        x, call = taken(args, kwargs)
        return call(exchange.divide(x, done.group, done.sequence_dim))

    if done.sequence:
        part.forward = forward


def _join_sequence(done: Split, name: str, part: Any) -> None:
    """Under sequence parallelism its output is gathered, and every rank continues with the whole."""
    forward = part.forward
    if done.sequence:
        part.forward = lambda *args, **kwargs: exchange.join(forward(*args, **kwargs), done.group, done.sequence_dim)


def _reduce(done: Split, name: str, part: Any) -> None:
    """Its output is a partial sum, since rows of the table cut its parameters ("cut")."""
    forward = part.forward
    part.forward = lambda *args, **kwargs: done.leave(forward(*args, **kwargs).clone())


def _positions(done: Split, name: str, part: Any) -> None:
    shard_parameters(done, name, part, "positions")
    if done.sequence:
        forward, group = part.forward, done.group
        part.forward = lambda n: forward(n).chunk(group.size(), dim=-2)[group.rank()]  # [1, S, H] or [S, H]


def _dropout(done: Split, name: str, part: Any) -> None:
    if done.sequence:
        part.share = (done.group.rank(), done.group.size())


def _probabilities(done: Split, name: str, part: Any) -> None:
    part.share = (done.group.rank(), done.group.size())


def _join(done: Split, name: str, part: Any) -> None:
    forward, group = part.forward, done.group
    cut = done.cuts.get(f"{name}.weight")
    if cut is None or cut.full % group.size() == 0:
        part.forward = lambda x: exchange.join(forward(x), group, FEATURES)
        return
    widest, ranges = -(-cut.full // group.size()), [even_range(cut.full, group.size(), r) for r in range(group.size())]

    def joined(x: Tensor) -> Tensor:  # unequal numbers of columns are padded to the largest
        y = exchange.join(F.pad(forward(x), (0, widest - cut.length)), group, FEATURES)
        runs = y.split(widest, dim=FEATURES)
        return torch.cat([run[..., : stop - start] for run, (start, stop) in zip(runs, ranges, strict=True)], FEATURES)

    part.forward = joined


def _gathered(done: Split, name: str, part: Any) -> None:
    """The gradients of the next layer's input are partial sums over the ranks, hence the reduce-scatter in backward; after the
    last layer every rank computes the same loss, so each takes its own slice of the gradient."""
    forward, group = part.forward, done.group
    leave = exchange.join if part.last else exchange.gather_in
    part.forward = lambda x: leave(forward(x), group, FEATURES)


STYLES: dict[str, Callable[[Split, str, Any], None]] = {
    **{style: _cuts(style) for style in ("column", "per-head", "logits", "between", "inside")},
    # "replicated": every rank has the same input. "divided": the caller divides the sequence. Experts are cut over ep and expert_tp, by
    # the sharding table (`expert`) or by rows for their parameters ("cut").
    **dict.fromkeys(("replicated", "divided", "experts", "experts-row", "experts-inside"), _unchanged),
    "region": _region,
    "enter": _enter,
    "keys": _keys,
    "row": _row,
    "vocabulary": _vocabulary,
    "embedding": _embedding,
    "positions": _positions,
    "dropout": _dropout,
    "probabilities": _probabilities,
    "join": _join,
    "gathered": _gathered,
    "split_sequence": _split_sequence,
    "join_sequence": _join_sequence,
    "reduce": _reduce,
    "attention": split_attention,
}
FUSED: dict[str, Callable[[Split, str, Any, str, str], None]] = {
    "column": cut_fused,
    "heads": cut_fused,
    "keys": _keys,
    "counts": divide_counts,
}
KINDS: dict[str, type[nn.Module]] = {
    **dict.fromkeys(("column", "heads", "keys", "logits", "row"), nn.Linear),
    **dict.fromkeys(("vocabulary", "embedding"), nn.Embedding),
    "attention": nn.MultiheadAttention,
}
# Styles that do not determine how a module's own parameters are cut.
HOLD_NOTHING = {
    *("region", "enter", "gathered", "join", "dropout", "probabilities", "counts", "divided"),
    *("split_sequence", "join_sequence", "reduce"),
}
# Styles that divide the sequence: without one of them every rank has all of it.
DIVIDE_SEQUENCE = {"vocabulary", "split_sequence", "divided"}
CUT = "cut:"  # a row for a parameter, not for a module
