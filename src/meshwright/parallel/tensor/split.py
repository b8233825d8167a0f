"""Tensor parallelism: Megatron's column and row splits, with no more than four all-reduces a layer.

A pair of products Y = σ(X A), Z = Y B is split by giving each of the P ranks a block of A's columns and of B's rows:

    Z = Σ_p σ(X A_p) B_p        one all-reduce forward (of Z), one backward (of X's gradient)

Attention is the same pair, with whole heads as the blocks. The bias of B is added **after** the sum, on **every** rank:
before the sum it would count P times; on one rank only, the ranks would continue with different outputs. A bias of A is
split with A's columns. With fewer KV heads K than ranks, each head is on P/K neighbours: every copy sees only the queries
of its rank, so its gradient is a partial sum, completed once per step by a sum over the copies (`copied`); the global
norm counts one of them.

Sequence parallelism shards the layers between the pairs (norms, residuals) along the sequence: the all-reduce becomes a
reduce-scatter after a pair and an all-gather before the next, the same bytes. The gathered input is *not* kept for
backward: only this rank's share is, and it is gathered again for the gradient of the weights (`regather`).

The all-gather form splits B by columns as well: Y is gathered, then Z. Forward has one kind of collective, but sends more
bytes: of Y's width too, and backward still sums, Y's gradient by a reduce-scatter and X's by an all-reduce.

Splitting each product separately (DTensor's default) would sum the gradients of q, k and v separately.

On a module of another library (`mw.parallelize` builds on this) attention must read the number of heads off its tensors
(`view(…, -1, head_dim)`), as Hugging Face's does, or from attributes that the table names ("counts"). Of projections fused into one
weight the table gives the parts (`cutting`).
"""

from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshwright.errors import MeshwrightError
from meshwright.models.moe import GroupedLinear
from meshwright.models.parts import ProjectionNorm
from meshwright.parallel import exchange
from meshwright.parallel.tensor.attention import switch_off_fast_paths
from meshwright.parallel.tensor.cutting import Split, check_dropout_seeds, cut_row, is_transposed
from meshwright.parallel.tensor.styles import CUT, DIVIDE_SEQUENCE, FUSED, HOLD_NOTHING, KINDS, STYLES
from meshwright.parallel.tensor.tables import Table

GROUPS = "num_key_value_groups"  # where Hugging Face keeps how many query heads share a KV head


def matches(name: str, pattern: str) -> bool:
    """Whether a dotted name matches a pattern, part by part."""
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
    sequence_dim: int = 1,
) -> Split:
    """Split a module in place, by its table; parameters keep their values, on the meta device or not.

    `head` is the width of a head that "keys" never cut. `copies` is the group of ranks that hold the same KV head,
    created here if None. With `strict` every pattern must match something; on a pipeline stage it need not.
    """
    done = Split(group, sequence, form, head, copies, sequence_dim)
    parts = [(name, part, _styles_of(name, part, table)) for name, part in module.named_modules()]
    if strict:
        check_rows(module, table)
    check_sequence(table, sequence)
    check_dropout_seeds(module, group)
    for name, part, styles in parts:
        for field_name, argument in _cuts_of(name, part, table).items():
            cut_row(done, part, name, field_name, argument)
        for style, _, argument in (style.partition(":") for style in styles):
            if argument:
                FUSED[style](done, name, part, style, argument)
            else:
                STYLES[style](done, name, part)
    _set_query_groups(module, done)
    _average_norms(module, done)
    switch_off_fast_paths(module)
    return done


def check_rows(module: nn.Module, table: Table) -> None:
    """Raise for a row that matches nothing: it would silently split nothing."""
    for pattern, style in table:
        kind, members = (
            ("parameter", module.named_parameters()) if style.startswith(CUT) else ("module", module.named_modules())
        )
        names = [name for name, _ in members]
        if not any(matches(name, pattern) for name in names):
            raise MeshwrightError(
                "MW-TP-003",
                f"pattern '{pattern}' of the table matches no {kind}",
                why="The row would split nothing",
                valid=[name for name in names if name][:20],
            )


def check_regions(module: nn.Module, table: Table) -> None:
    """Raise for a region inside another, and for a product split by columns outside all of them: the gradient of its input would stay a partial
    sum. With "enter" rows a table says in another way where activations enter: the gradients of the first step show whether they cover all."""
    words = {n: {style.partition(":")[0] for style in _styles_of(n, part, table)} for n, part in module.named_modules()}
    for name, styles in words.items():
        around = [name, *(name.rsplit(".", i)[0] for i in range(1, name.count(".") + 1)), ""]
        outer = next((n for n in around[1:] if "region" in words[n] and n != name), None)
        if outer is not None and "region" in styles:
            raise MeshwrightError(
                "MW-TP-011",
                f"the region '{name}' is inside the region '{outer}'",
                why="The gradient of its input would be summed over the ranks twice",
                fix=f'remove the row ("{name}", "region"), or that of "{outer}"',
            )
        inside = any({"region", "gathered"} & words[n] for n in around) or any("enter" in w for w in words.values())
        if styles & {"column", "heads", "keys", "logits"} and not inside:
            raise MeshwrightError(
                "MW-TP-011",
                f"'{name}' is split by columns, and neither it nor a module around it is a region",
                why="Each rank would compute the gradient of its input for its columns only: parameters before it would get a part of their gradient",
                fix=f'a row ("{around[1]}", "region") before the others',
            )


def check_sequence(table: Table, sequence: bool) -> None:
    """Raise for sequence parallelism where no row splits the sequence: each rank would keep all tokens, and gradients that are summed
    over the ranks would count every token once per rank."""
    styles = {style for _, style in table}
    if sequence and not styles & DIVIDE_SEQUENCE:
        raise MeshwrightError(
            "MW-TP-008",
            "sp=true, and no row of the table divides the sequence",
            why="Every rank would keep the whole sequence, and gradients summed over the ranks would be too large",
            valid=sorted(DIVIDE_SEQUENCE),
            fix='add a row such as ("layers.0", "split_sequence"), or set sp=false',
        )


def _set_query_groups(module: nn.Module, done: Split) -> None:
    """Adjust attention that stores how many query heads share a KV head: a copy serves only those of its rank."""
    copies = {
        name.rpartition(".")[0].rpartition(".")[0]: max(cut.copies for cut in done.cuts_of(name))
        for name in done.copied
    }
    for owner, count in copies.items():
        attention = module.get_submodule(owner)
        if hasattr(attention, GROUPS):
            setattr(attention, GROUPS, getattr(attention, GROUPS) // count)


def _average_norms(module: nn.Module, done: Split) -> None:
    """Norms over the whole projection average their squares over the ranks. Every rank uses the mean for other heads, so backward sums
    its gradient over the ranks too."""
    group = done.group

    def mean(local: Tensor) -> Tensor:
        return exchange.copy_in(exchange.reduce_out(local / group.size(), group), group)

    for part in module.modules():
        if isinstance(part, ProjectionNorm):
            part.mean = mean


def _styles_of(name: str, part: nn.Module, table: Table) -> list[str]:
    styles = [style for pattern, style in table if matches(name, pattern) and not style.startswith(CUT)]
    _check(name, part, styles, table)
    return styles


def _cuts_of(name: str, part: nn.Module, table: Table) -> dict[str, str]:
    """The rows for a module's own parameters: by parameter, what follows "cut:"."""
    held = [n for n, _ in part.named_parameters(recurse=False)]
    return {
        n: style.removeprefix(CUT)
        for n in held
        for pattern, style in table
        if style.startswith(CUT) and matches(f"{name}.{n}", pattern)
    }


def _check(name: str, part: nn.Module, styles: list[str], table: Table) -> None:
    words = {style: style.partition(":") for style in styles}
    holds = [n for n, _ in part.named_parameters(recurse=False) if n not in _cuts_of(name, part, table)]
    # `expert` divides our own experts; of another's the table says how tensor parallelism cuts each parameter.
    without_parameters = HOLD_NOTHING if isinstance(part, GroupedLinear) else HOLD_NOTHING | {"experts"}
    if holds and not {word for word, *_ in words.values()} - without_parameters:
        raise MeshwrightError(
            "MW-TP-001",
            f"'{name}' holds {', '.join(holds)} and no pattern of the table matches it",
            why="A table says of every parameter whether it is split or whole",
            valid=sorted({pattern for pattern, _ in table}),
            fix=f'("{name}", "replicated") where every rank computes the same, ("{name}.{holds[0]}", "cut:0") to split it',
        )
    for style, (word, _, argument) in words.items():
        if word not in (FUSED if argument else STYLES):
            raise MeshwrightError(
                "MW-TP-004",
                f"the table gives '{name}' the style '{style}', which does not exist",
                valid=sorted([*STYLES, *(f"{style}:…" for style in FUSED), f"{CUT}…"]),
            )
    expected = KINDS.get(next((word for word, *_ in words.values() if word in KINDS), ""), nn.Module)
    by_rows = is_transposed(part) or isinstance(part, ProjectionNorm)
    if not isinstance(part, expected) and not (expected is nn.Linear and by_rows):
        raise MeshwrightError(
            "MW-TP-004",
            f"'{name}' is a {type(part).__name__}, not a {expected.__name__}",
            why="The layout of its weight is unknown: it might be cut along the wrong dimension",
        )
