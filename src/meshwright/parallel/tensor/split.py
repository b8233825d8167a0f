"""Tensor parallelism: Megatron's column and row splits, with four all-reduces a layer and no more.

A pair of products Y = σ(X A), Z = Y B is divided by giving each of the P ranks a block of A's columns and of B's rows:

    Z = Σ_p σ(X A_p) B_p        one all-reduce forward (of Z), one backward (of X's gradient)

Attention is the same pair, with whole heads as the blocks. The bias of B is added **after** the sum, on **every** rank:
before it, it would count P times; on one rank only, as the lecture's code has it, ranks would go on with different
outputs. A bias of A is split with A's columns. With K KV heads for more than K ranks
each of them is on P/K neighbours: every copy sees the queries of its own rank only, so its gradient is a part, and the
sum over the copies, once a step, is the head's (`copied`); the global norm counts one of them.

Sequence parallelism shards what stands between the pairs (norms, residuals) along the sequence: the all-reduce
becomes a reduce-scatter after a pair and an all-gather before the next, the same bytes. The gathered input is *not*
kept for backward: only this rank's share is, and the gradient of the weights gathers it again, as saved-tensor hooks
ask for it.

The lecture's all-gather form splits B by columns as well: Y is gathered whole, then Z. One kind of collective forward,
and more bytes: of Y's width too, and backward still sums, Y's gradient by a reduce-scatter and X's by an all-reduce.

Compared with splitting each product by itself (DTensor's default), which also sums the gradients of q, k and v apart.

On a module of your own, or of Hugging Face, on every rank of `group` alike:

    model = LlamaForCausalLM(config)                                     # the same weights on every rank
    done = tensor.split(model, tables.LLAMA, group, head=config.head_dim)
    model(input_ids=ids, labels=ids).loss.backward()
    done.sum_gradients(model)                                            # once a step: copies, and norms under sp
    norm = done.norm(model)                                              # of the whole model: each element once
    state = {n: done.whole(n, p) for n, p in model.named_parameters()}   # as one device would save it

Its attention must read the number of heads off its tensors (`view(…, -1, head_dim)`), as Hugging Face's does, or from
numbers that the table names ("counts"). Projections fused into one weight are told part by part (`cuts`). Under
sequence parallelism its embedding returns a share of the sequence: pass `position_ids`, which it would count off that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from meshwright.errors import MeshwrightError
from meshwright.parallel import exchange
from meshwright.parallel.tensor.cuts import Cut, Split, cut_out, fused_cuts
from meshwright.parallel.tensor.cuts import boundaries as boundaries
from meshwright.parallel.tensor.plain import check_drawn_alike, check_plain, is_transposed, output_dim, product
from meshwright.parallel.tensor.regather import gather_again
from meshwright.parallel.tensor.tables import Table
from meshwright.parallel.tensor.vocabulary import embed

SEQUENCE = 1  # dimension of the sequence in [B, S, H]
FEATURES = -1
# Styles that say nothing of a module's parameters.
HOLD_NOTHING = {"region", "enter", "gathered", "join", "dropout", "probabilities", "counts"}
GROUPS = "num_key_value_groups"  # where Hugging Face keeps how many query heads share a KV head


def matches(name: str, pattern: str) -> bool:
    """Part by part of the dotted name."""
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def split(
    module: nn.Module,
    table: Table,
    group: ProcessGroup,
    sequence: bool = False,
    *,
    form: str = "megatron",
    head: int = 0,
    copies: ProcessGroup | None = None,
    strict: bool = True,
) -> Split:
    """Divide a module in place, as its table says; parameters keep their values, on the meta device or not.

    `head` is the width of a head that "keys" never cut. `copies` is the group of this rank's copies of a KV head, made
    here where none is given. `strict`: each pattern must match something, as it need not on one stage of a pipeline.
    """
    done = Split(group, sequence, form, head, copies)
    parts = [(name, part, _styles_of(name, part, table)) for name, part in module.named_modules()]
    idle = [p for p, _ in table if not any(matches(name, p) for name, *_ in parts)]
    if idle and strict:
        raise MeshwrightError(
            "MW-TP-003",
            f"no module matches '{idle[0]}' of the table",
            why="A pattern that names nothing divides nothing, in silence",
            valid=[name for name, *_ in parts if name][:20],
        )
    check_drawn_alike(module, group)
    for name, part, styles in parts:
        for style, _, said in (style.partition(":") for style in styles):
            if said:
                FUSED[style](done, name, part, style, said)
            else:
                STYLES[style](done, name, part)
    _tell_groups(module, done)
    return done


def _tell_groups(module: nn.Module, done: Split) -> None:
    """Attention that was told how many of its query heads share a KV head: a copy serves those of its own rank only."""
    copies = {
        name.rpartition(".")[0].rpartition(".")[0]: max(cut.copies for cut in done.cuts_of(name))
        for name in done.copied
    }
    for owner, count in copies.items():
        attention = module.get_submodule(owner)
        if hasattr(attention, GROUPS):
            setattr(attention, GROUPS, getattr(attention, GROUPS) // count)


def _styles_of(name: str, part: nn.Module, table: Table) -> list[str]:
    styles = [style for pattern, style in table if matches(name, pattern)]
    _check(name, part, styles, table)
    return styles


def _check(name: str, part: nn.Module, styles: list[str], table: Table) -> None:
    holds, words = [n for n, _ in part.named_parameters(recurse=False)], [style.partition(":") for style in styles]
    if holds and not {word for word, *_ in words} - HOLD_NOTHING:
        raise MeshwrightError(
            "MW-TP-001",
            f"'{name}' holds {', '.join(holds)} and no pattern of the table matches it",
            why="Every parameter must be said to be split or whole",
            valid=sorted({pattern for pattern, _ in table}),
        )
    unknown = next(
        (
            style
            for style, (word, _, said) in zip(styles, words, strict=True)
            if word not in (FUSED if said else STYLES)
        ),
        "",
    )
    if unknown:
        raise MeshwrightError(
            "MW-TP-004",
            f"'{name}' is said to be '{unknown}'",
            valid=sorted([*STYLES, *(f"{style}:…" for style in FUSED)]),
        )
    wanted = KINDS.get(next((word for word, *_ in words if word in KINDS), ""), nn.Module)
    if not isinstance(part, wanted) and not (wanted is nn.Linear and is_transposed(part)):
        raise MeshwrightError(
            "MW-TP-004",
            f"'{name}' is a {type(part).__name__}, not a {wanted.__name__}",
            why="How its weight lies is not known; another layout would be cut along the wrong side",
        )


def _cut(
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
    start, stop = boundaries(full, parts, done.group.rank() // copies)
    done.cuts[f"{prefix}.{name}"] = cut = Cut(dim, start, stop - start, full, copies)
    _keep(done, owner, name, (cut,))
    return start, stop


def _keep(done: Split, owner: Any, name: str, cuts: tuple[Cut, ...]) -> None:
    parameter = getattr(owner, name)
    if parameter not in done.made:
        part = cut_out(cuts, parameter.detach()).clone(memory_format=torch.contiguous_format)
        done.made[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
    setattr(owner, name, done.made[parameter])


def _partial(done: Split, name: str, part: Any) -> None:
    done.partial.update(f"{name}.{n}" for n, _ in part.named_parameters(recurse=False))


def _input_of(forward: Callable[..., Any]) -> Callable[..., Any]:
    """(args, kwargs) → the first argument, however it was passed, and how to call `forward` with another in its place."""
    first = next(iter(inspect.signature(forward).parameters))

    def taken(args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Callable[[Any], Any]]:
        if args:
            return args[0], lambda x: forward(x, *args[1:], **kwargs)
        return kwargs[first], lambda x: forward(**{**kwargs, first: x})

    return taken


def _region(done: Split, name: str, part: Any) -> None:
    taken, group = _input_of(part.forward), done.group

    def copied(*args: Any, **kwargs: Any) -> Any:
        x, call = taken(args, kwargs)
        return call(exchange.copy_in(x, group))

    def gathered(*args: Any, **kwargs: Any) -> Any:
        x, call = taken(args, kwargs)
        whole = exchange.gather_in(x, group, SEQUENCE)
        with gather_again(whole, x, group):
            return call(whole)

    part.forward = gathered if done.sequence else copied


def _enter(done: Split, name: str, part: Any) -> None:
    forward, group = part.forward, done.group
    if done.sequence:
        part.forward = lambda x: exchange.gather_in(forward(x), group, SEQUENCE)
    else:
        part.forward = lambda x: exchange.copy_in(forward(x), group)


def _column(done: Split, name: str, part: Any, even: bool = True, copies: int = 1) -> None:
    _cut(done, part, name, "weight", output_dim(part), even, copies)
    if part.bias is not None:
        _cut(done, part, name, "bias", 0, even, copies)
    _tell_width(part)


def _tell_width(part: Any) -> None:
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
        _keep(done, part, field_name, cuts)
        copies = max(cut.copies for cut in cuts)
        if copies > 1:
            done.copies = done.copies or neighbours(done.group, copies)
            done.copied.add(full)
    _tell_width(part)


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
    _column(done, name, part, even=False)


def _keys(done: Split, name: str, part: Any) -> None:
    """Columns by whole heads; with more ranks than heads, each head is on as many neighbours as share it."""
    width, ranks = part.weight.shape[0], done.group.size()
    if not done.head or width % done.head:
        raise MeshwrightError(
            "MW-TP-002",
            f"'{name}' has {width} columns in heads of {done.head}",
            why="Keys and values are split by whole heads",
            fix="split(…, head=config.head_dim)",
        )
    heads = width // done.head
    if heads % ranks and ranks % heads:
        raise MeshwrightError(
            "MW-TP-002",
            f"{heads} KV heads of '{name}' and tp={ranks}: one must divide the other",
            why="A head is never cut",
        )
    copies = max(1, ranks // heads)
    _column(done, name, part, copies=copies)
    if copies > 1:
        done.copies = done.copies or neighbours(done.group, copies)
        done.copied.update(f"{name}.{n}" for n, _ in part.named_parameters(recurse=False))


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
    if done.form == "all-gather":
        _row_by_columns(done, name, part)
        return
    inner = 1 - output_dim(part)
    _cut(done, part, name, "weight", inner)
    setattr(part, "nx" if is_transposed(part) else "in_features", part.weight.shape[inner])
    group, sequence = done.group, done.sequence
    if sequence and part.bias is not None:
        done.partial.add(f"{name}.bias")

    def forward(x: torch.Tensor) -> torch.Tensor:
        partial_sum = product(part, x)
        y = exchange.scatter_out(partial_sum, group, SEQUENCE) if sequence else exchange.reduce_out(partial_sum, group)
        return y if part.bias is None else y + part.bias

    part.forward = forward


def _row_by_columns(done: Split, name: str, part: Any) -> None:
    """The all-gather form of a product that Megatron splits by rows: whole input, columns of the output, gathered. All
    ranks go on with the same output, so that each takes its own slice of the gradient."""
    _column(done, name, part)
    group = done.group

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = product(part, exchange.gather_in(x, group, FEATURES), part.bias)
        return exchange.join(y, group, FEATURES)

    part.forward = forward


def _vocabulary(done: Split, name: str, part: Any) -> None:
    if part.max_norm is not None or part.scale_grad_by_freq or part.sparse:
        raise MeshwrightError(
            "MW-TP-004",
            f"'{name}' has max_norm, scale_grad_by_freq or sparse gradients",
            why="They look at rows that other ranks hold",
        )
    check_plain(name, part)
    start, stop = _cut(done, part, name, "weight", 0, even=False)
    group, sequence, padding = done.group, done.sequence, part.padding_idx
    padding = padding - start if padding is not None and start <= padding < stop else None
    part.num_embeddings, part.padding_idx = stop - start, padding

    def forward(ids: torch.Tensor) -> torch.Tensor:
        own = embed(ids, part.weight, start, padding)
        return exchange.scatter_out(own, group, SEQUENCE) if sequence else exchange.reduce_out(own, group)

    part.forward = forward


def _between(done: Split, name: str, part: Any) -> None:
    if done.sequence:
        _partial(done, name, part)


def _inside(done: Split, name: str, part: Any) -> None:
    _partial(done, name, part)


def _positions(done: Split, name: str, part: Any) -> None:
    if done.sequence:
        _partial(done, name, part)
        forward, group = part.forward, done.group
        part.forward = lambda n: forward(n).chunk(group.size(), dim=-2)[group.rank()]


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
    most, ranges = -(-cut.full // group.size()), [boundaries(cut.full, group.size(), r) for r in range(group.size())]

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
    "vocabulary": _vocabulary, "between": _between, "inside": _inside, "positions": _positions, "dropout": _dropout,
    "probabilities": _probabilities, "join": _join, "gathered": _gathered, "experts": lambda done, name, part: None,
}  # fmt: skip
FUSED: dict[str, Callable[[Split, str, Any, str, str], None]] = {"column": _fused, "heads": _fused, "counts": _counts}
KINDS: dict[str, type[nn.Module]] = {
    "column": nn.Linear, "heads": nn.Linear, "keys": nn.Linear, "logits": nn.Linear, "row": nn.Linear, "vocabulary": nn.Embedding,
}  # fmt: skip
