"""The styles of a sharding table: what each does to one module, in place. `tables` lists them.

A style is a function of the `Split` that records the changes, the module's name and the module. How it cuts parameters, and which
gradients are partial sums, is the rule of the same name in `describe.sharding.rules`, which `shard_parameters` reads for our models
and for yours alike; the function then wraps `forward` with the collectives of `exchange`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from meshwright.describe.sharding import KV_COPIES, RULES, Degrees, even_range, partial_over, rule_of
from meshwright.errors import MeshwrightError
from meshwright.parallel import exchange
from meshwright.parallel.tensor.attention import split_attention
from meshwright.parallel.tensor.cuts import Cut, Split, cut_out, fused_cuts
from meshwright.parallel.tensor.plain import check_plain, is_transposed, output_dim, product
from meshwright.parallel.tensor.regather import gather_again
from meshwright.parallel.tensor.vocabulary import embed

FEATURES = -1


def shard_parameters(done: Split, name: str, part: Any, style: str, copies: int = 1) -> None:
    """Replace a module's parameters by this rank's part, by the rule of its style; `copies` neighbours hold the same KV head."""
    degrees = Degrees(done.group.size(), kv_copies=copies, sp=done.sequence, all_gather=done.form == "all-gather")
    for field_name, parameter in list(part.named_parameters(recurse=False)):
        own = f"{style}-bias" if field_name == "bias" and f"{style}-bias" in RULES else style
        rule, flipped = rule_of(own, degrees.all_gather), parameter.ndim == 2 and is_transposed(part)
        for dim, _ in rule.cuts:
            cut_parameter(done, part, name, field_name, 1 - dim if flipped else dim, rule.even, copies)
        for axis, partial in partial_over(own, degrees).items():
            if partial:
                (done.copied if axis == KV_COPIES else done.partial).add(f"{name}.{field_name}")


def cut_parameter(
    done: Split, owner: Any, prefix: str, name: str, dim: int, even: bool = True, copies: int = 1
) -> tuple[int, int]:
    """Replace a parameter by this rank's range of dimension `dim`, of which `copies` neighbours keep the same."""
    parameter = getattr(owner, name)
    full, parts = parameter.shape[dim], done.group.size() // copies
    if even and full % parts:
        raise MeshwrightError(
            "MW-TP-002",
            f"dimension {dim} of '{prefix}.{name}', {full}, does not divide over tp={done.group.size()}",
            why="Each rank holds whole heads or columns",
        )
    start, stop = even_range(full, parts, done.group.rank() // copies)
    done.cuts[f"{prefix}.{name}"] = cut = Cut(dim, start, stop - start, full, copies)
    replace_parameter(done, owner, name, (cut,))
    return start, stop


def replace_parameter(done: Split, owner: Any, name: str, cuts: tuple[Cut, ...]) -> None:
    parameter = getattr(owner, name)
    if parameter not in done.made:
        part = cut_out(cuts, parameter.detach()).clone(memory_format=torch.contiguous_format)
        done.made[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
    setattr(owner, name, done.made[parameter])


def input_of(forward: Callable[..., Any]) -> Callable[..., Any]:
    """(args, kwargs) → the first argument, however it was passed, and how to call `forward` with another in its place."""
    first = next(iter(inspect.signature(forward).parameters))

    def taken(args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Callable[[Any], Any]]:
        if args:
            return args[0], lambda x: forward(x, *args[1:], **kwargs)
        return kwargs[first], lambda x: forward(**{**kwargs, first: x})

    return taken


def _region(done: Split, name: str, part: Any) -> None:
    taken = input_of(part.forward)

    def copied(*args: Any, **kwargs: Any) -> Any:
        x, call = taken(args, kwargs)
        return call(done.enter(x))

    def gathered(*args: Any, **kwargs: Any) -> Any:
        x, call = taken(args, kwargs)
        whole = done.enter(x)
        with gather_again(whole, x, done.group, done.sequence_dim):
            return call(whole)

    part.forward = gathered if done.sequence else copied


def _enter(done: Split, name: str, part: Any) -> None:
    forward = part.forward
    part.forward = lambda x: done.enter(forward(x))


def _column(done: Split, name: str, part: Any) -> None:
    shard_parameters(done, name, part, "column")
    _set_width(part)


def _set_width(part: Any) -> None:
    setattr(part, "nf" if is_transposed(part) else "out_features", part.weight.shape[output_dim(part)])


def _fused(done: Split, name: str, part: Any, kind: str, said: str) -> None:
    """Columns of several parts, each cut by itself."""
    for field_name, dim in (("weight", output_dim(part)), ("bias", 0)):
        parameter = getattr(part, field_name)
        if parameter is None:
            continue
        full = f"{name}.{field_name}"
        cuts = fused_cuts(full, dim, parameter.shape[dim], kind, said, done.group.size(), done.group.rank())
        done.fused[full] = cuts
        replace_parameter(done, part, field_name, cuts)
        copies = max(cut.copies for cut in cuts)
        if copies > 1:
            done.copies = done.copies or neighbours(done.group, copies)
            done.copied.add(full)
    _set_width(part)


def _counts(done: Split, name: str, part: Any, kind: str, said: str) -> None:
    """What a module counts by itself, such as its heads, becomes what it has of them here; `config.` before it: in a
    config of its own."""
    ranks = done.group.size()
    for path in said.split(","):
        owner, field_name = part, path
        if path.startswith("config."):
            if not any(part.config is made for made in done.configs):
                part.config = copy(part.config)
                done.configs.append(part.config)
            owner, field_name = part.config, path.removeprefix("config.")
        count = getattr(owner, field_name, None)
        if not isinstance(count, int) or (count % ranks and ranks % count):
            raise MeshwrightError(
                "MW-TP-005",
                f"'{name}' counts {field_name} = {count!r}, which does not divide over tp={ranks}",
                why="What is counted must be a whole number, and so must each rank's share",
            )
        setattr(owner, field_name, max(1, count // ranks))


def _logits(done: Split, name: str, part: Any) -> None:
    """The vocabulary may be cut unevenly: only the loss looks across its ranks, and it knows where each begins."""
    shard_parameters(done, name, part, "logits")
    _set_width(part)


def _keys(done: Split, name: str, part: Any, kind: str = "keys", said: str = "") -> None:
    """Columns by whole heads; with more ranks than heads, each head is on as many neighbours as share it."""
    width, ranks = part.weight.shape[0], done.group.size()
    head = int(said) if said.isdecimal() else 0 if said else done.head
    if not head or width % head:
        raise MeshwrightError(
            "MW-TP-002",
            f"'{name}' has {width} columns in heads of {said or head}",
            why="Keys and values are split by whole heads",
            fix="write the width of a head into the table: keys:128",
        )
    heads = width // head
    if heads % ranks and ranks % heads:
        raise MeshwrightError(
            "MW-TP-002",
            f"{heads} KV heads of '{name}' and tp={ranks}: one must divide the other",
            why="A head is never cut",
        )
    copies = max(1, ranks // heads)
    shard_parameters(done, name, part, "keys", copies)
    _set_width(part)
    if copies > 1:
        done.copies = done.copies or neighbours(done.group, copies)


def neighbours(group: ProcessGroup, count: int) -> ProcessGroup:
    """This rank's run of `count` ranks of a group: itself, or a group its members make by themselves."""
    if count == group.size():
        return group
    ranks, first = distributed.get_process_group_ranks(group), group.rank() // count * count
    made = distributed.new_group(ranks[first : first + count], use_local_synchronization=True)
    assert isinstance(made, ProcessGroup)
    return made


def _row(done: Split, name: str, part: Any) -> None:
    check_plain(name, part)
    shard_parameters(done, name, part, "row")
    if done.form == "all-gather":
        _row_by_columns(done, part)
        return
    setattr(part, "nx" if is_transposed(part) else "in_features", part.weight.shape[1 - output_dim(part)])

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = done.leave(product(part, x))
        return y if part.bias is None else y + part.bias

    part.forward = forward


def _row_by_columns(done: Split, part: Any) -> None:
    """The all-gather form of a product that Megatron splits by rows: the input is gathered, each rank computes columns of the output,
    and these are gathered. All ranks continue with the same output, so each takes its own slice of the gradient."""
    _set_width(part)
    group = done.group

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = product(part, exchange.gather_in(x, group, FEATURES), part.bias)
        return exchange.join(y, group, FEATURES)

    part.forward = forward


def _vocabulary(done: Split, name: str, part: Any) -> None:
    part.forward = _rows_of_table(done, name, part, done.leave)


def _embedding(done: Split, name: str, part: Any) -> None:
    """Its output stays whole under sequence parallelism: a model that reads the length of the sequence off it (for positions, for
    a mask) goes on as it is. "split_sequence" divides later."""
    group = done.group
    part.forward = _rows_of_table(done, name, part, lambda own: exchange.reduce_out(own, group))


def _rows_of_table(done: Split, name: str, part: Any, leave: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if part.max_norm is not None or part.scale_grad_by_freq or part.sparse:
        raise MeshwrightError(
            "MW-TP-004",
            f"'{name}' has max_norm, scale_grad_by_freq or sparse gradients",
            why="They look at rows that other ranks hold",
        )
    check_plain(name, part)
    shard_parameters(done, name, part, "vocabulary")
    cut, padding = done.cuts[f"{name}.weight"], part.padding_idx
    held = padding is not None and cut.start <= padding < cut.start + cut.length
    part.num_embeddings, part.padding_idx = cut.length, padding - cut.start if held else None

    return lambda ids: leave(embed(ids, part.weight, cut.start, cut.full, part.padding_idx))


def _between(done: Split, name: str, part: Any) -> None:
    shard_parameters(done, name, part, "between")


def _inside(done: Split, name: str, part: Any) -> None:
    shard_parameters(done, name, part, "inside")


def _replicated(done: Split, name: str, part: Any) -> None:
    """Whole, and every rank gives it the same input: its gradient is complete on each of them."""


def _divided(done: Split, name: str, part: Any) -> None:
    """The caller gives it this rank's share of the sequence: nothing to do."""


def _split_sequence(done: Split, name: str, part: Any) -> None:
    """Under sequence parallelism its first argument, whole on every rank, is divided along the sequence."""
    taken = input_of(part.forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        x, call = taken(args, kwargs)
        return call(exchange.divide(x, done.group, done.sequence_dim))

    if done.sequence:
        part.forward = forward


def _join_sequence(done: Split, name: str, part: Any) -> None:
    """Under sequence parallelism its output is gathered, and every rank goes on with the whole."""
    forward = part.forward
    if done.sequence:
        part.forward = lambda *args, **kwargs: exchange.join(forward(*args, **kwargs), done.group, done.sequence_dim)


def _reduce(done: Split, name: str, part: Any) -> None:
    """Its output is a partial sum: its parameters are cut so, row by row of the table ("cut")."""
    forward = part.forward
    part.forward = lambda *args, **kwargs: done.leave(forward(*args, **kwargs).clone())


def cut_row(done: Split, owner: Any, prefix: str, name: str, said: str) -> None:
    """A row for one parameter: "cut:1", or "cut:1:1,1" where dimension 1 holds two parts, each cut by itself."""
    dim, _, parts = said.partition(":")
    parameter, full = getattr(owner, name), f"{prefix}.{name}"
    if not dim.isdecimal() or int(dim) >= parameter.ndim:
        raise MeshwrightError(
            "MW-TP-005",
            f"'{full}' of {parameter.ndim} dimensions is said to be 'cut:{said}'",
            why="A cut names a dimension, and the parts in it where they are several",
            valid=["cut:0", "cut:1:1,1"],
        )
    if not parts:
        cut_parameter(done, owner, prefix, name, int(dim))
        return
    length, group = parameter.shape[int(dim)], done.group
    done.fused[full] = cuts = fused_cuts(full, int(dim), length, "column", parts, group.size(), group.rank())
    replace_parameter(done, owner, name, cuts)


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
    most, ranges = -(-cut.full // group.size()), [even_range(cut.full, group.size(), r) for r in range(group.size())]

    def joined(x: torch.Tensor) -> torch.Tensor:  # columns of unequal number are sent as the most of them
        y = exchange.join(F.pad(forward(x), (0, most - cut.length)), group, FEATURES)
        runs = y.split(most, dim=FEATURES)
        return torch.cat([run[..., : stop - start] for run, (start, stop) in zip(runs, ranges, strict=True)], FEATURES)

    part.forward = joined


def _gathered(done: Split, name: str, part: Any) -> None:
    """The next layer's input gradients are partial sums over the ranks, hence the reduce-scatter backward; after the
    last layer every rank computes the same loss, and its own slice of that gradient is all there is to it."""
    forward, group = part.forward, done.group
    leave = exchange.join if part.last else exchange.gather_in
    part.forward = lambda x: leave(forward(x), group, FEATURES)


STYLES: dict[str, Callable[[Split, str, Any], None]] = {
    "region": _region, "enter": _enter, "column": _column, "keys": _keys, "logits": _logits, "row": _row,
    "vocabulary": _vocabulary, "embedding": _embedding, "between": _between, "inside": _inside, "positions": _positions,
    "dropout": _dropout, "probabilities": _probabilities, "join": _join, "gathered": _gathered, "replicated": _replicated,
    "divided": _divided, "split_sequence": _split_sequence, "join_sequence": _join_sequence, "reduce": _reduce, "attention": split_attention,
    "experts": lambda done, name, part: None, "experts-row": lambda done, name, part: None,
}  # fmt: skip
FUSED: dict[str, Callable[[Split, str, Any, str, str], None]] = {
    "column": _fused, "heads": _fused, "keys": _keys, "counts": _counts
}  # fmt: skip
KINDS: dict[str, type[nn.Module]] = {
    "column": nn.Linear, "heads": nn.Linear, "keys": nn.Linear, "logits": nn.Linear, "row": nn.Linear,
    "vocabulary": nn.Embedding, "embedding": nn.Embedding, "attention": nn.MultiheadAttention,
}  # fmt: skip
# Styles that say nothing of a module's own parameters.
HOLD_NOTHING = {
    "region", "enter", "gathered", "join", "dropout", "probabilities", "counts", "divided", "split_sequence", "join_sequence", "reduce",
}  # fmt: skip
# Styles that divide the sequence: without one of them every rank has all of it.
DIVIDE_SEQUENCE = {"vocabulary", "split_sequence", "divided"}
CUT = "cut:"  # a row for a parameter, not for a module
