"""Where the values of each of our parameters are in Hugging Face's tensors, from the table of a family (`tables`) and the shapes of a model.

A place is one tensor of theirs, or one per expert, and a map of rows: row i of our output dimension is row offset + i·step of theirs, or
with blocks of b rows, which repeat after `period` rows, row offset + ⌊i/b⌋·period + i mod b. With it any box of ours is a slice of theirs,
or a few slices, which is all that reading and writing need:

    GPT-2's keys          attn.c_attn [h, 3h]              rows h + i, transposed
    GPT-NeoX's keys       attention.query_key_value        rows D + i mod D of each head's 3·D
    gpt-oss's gate        mlp.experts.gate_up_proj         rows 2i, transposed; the up projection has rows 2i + 1
    Mixtral's gate        …experts.5.w1 [f, h]             rows i, of expert 5
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from meshwright.describe.model import Model
from meshwright.describe.sharding import Parameter, parameters
from meshwright.errors import MeshwrightError
from meshwright.models.hf.tables import EXPERT, GROUPED, INTERLEAVED, TABLES, TRANSPOSED, Family, TensorRow, table_of

Box = tuple[slice, ...]
PADDED = ("vocabulary", "logits")  # styles whose rows are padded on our side: theirs have the true vocabulary


@dataclass(frozen=True)
class HfPlace:
    """Locates the values of one of our parameters in Hugging Face's tensors."""

    theirs: str  # a name; contains {expert} if each expert has a separate tensor
    shape: tuple[int, ...]  # of such a tensor
    rows: int  # of our output dimension; further rows of ours are padding
    experts: int = 0  # 0: not a parameter of experts
    offset: int = 0
    step: int = 1
    transposed: bool = False
    block: int = 0  # rows of each group of heads, where the groups of several parameters alternate; 0: no such groups
    period: int = 0

    @property
    def names(self) -> list[str]:
        """Their tensors: one, or one per expert."""
        return [self.name_of(expert) for expert in range(self.experts)] if EXPERT in self.theirs else [self.theirs]

    def name_of(self, expert: int) -> str:
        return self.theirs.replace(EXPERT, str(expert))

    def slices(self, start: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[str, Box]]:
        """The slices of their tensors that make up a box of ours: one, or one per expert."""
        inner = 1 if self.experts else 0
        columns = [slice(a, a + n) for a, n in zip(start[inner + 1 :], shape[inner + 1 :], strict=True)]
        for first, rows in self.runs(start[inner], shape[inner]):
            last = first + (rows - 1) * self.step + 1 if rows else first
            box = [slice(first, last, self.step), *columns]
            if self.transposed:
                box.reverse()
            if not self.experts:
                yield self.theirs, tuple(box)
            elif EXPERT in self.theirs:
                for expert in range(start[0], start[0] + shape[0]):
                    yield self.name_of(expert), tuple(box)
            else:
                yield self.theirs, (slice(start[0], start[0] + shape[0]), *box)

    def runs(self, start: int, rows: int) -> Iterator[tuple[int, int]]:
        """The first row of theirs and the number of rows of each run that makes up these rows of ours: one run, or one per block."""
        if not self.block:
            yield self.offset + start * self.step, rows
            return
        for block in range(start // self.block, -(-(start + rows) // self.block)):
            first, stop = max(start, block * self.block), min(start + rows, (block + 1) * self.block)
            yield self.offset + block * self.period + first - block * self.block, stop - first


def places(model: Model, family: str, exists: Callable[[str], bool] | None = None) -> dict[str, HfPlace]:
    """The place of each parameter of a model by our name, without adapters. `exists`: whether a folder has a tensor, to decide between two layouts;
    by default the first layout of the table."""
    table = table_of(family)
    prefix = prefix_of(table, exists)
    every = {p.name: p for p in parameters(model, range(model.layers)) if not p.is_adapter}
    out: dict[str, HfPlace] = {}
    for p in every.values():
        found = [_place(model, p, row, table, prefix, every) for row in _rows_of(table, p)]
        if not found:
            raise MeshwrightError(
                "MW-HF-016",
                f"the family {family} has no tensor for '{p.name}'",
                why="Transformers could not load it",
                valid=sorted(TABLES),
            )
        present = [place for place in found if exists is None or exists(place.names[0])]
        out[p.name] = (present or found)[0]
    return out


def prefix_of(table: Family, exists: Callable[[str], bool] | None) -> str:
    """The prefix of all names but the head's: empty if the base class was saved, without the head."""
    first = f"{table.ends[0].theirs}.weight"
    return "" if exists is not None and exists(first) and not exists(table.prefix + first) else table.prefix


def _rows_of(table: Family, p: Parameter) -> list[TensorRow]:
    """The rows that name a parameter: by its name, or by its module if it is a weight or a bias."""
    names = {_local(p.name)} | ({_local(p.module)} if p.name.endswith((".weight", ".bias")) else set())
    return [row for row in (table.ends if p.layer < 0 else table.layer) if names & set(row.ours.split(" + "))]


def _local(name: str) -> str:
    """A name without `layers.7.`"""
    return name.split(".", 2)[2] if name.startswith("layers.") else name


def _place(
    model: Model, p: Parameter, row: TensorRow, table: Family, prefix: str, every: dict[str, Parameter]
) -> HfPlace:
    joined, layout = row.ours.split(" + "), row.layout.split()
    by_module = _local(p.name) not in joined
    field = p.name.rpartition(".")[2]
    before = "" if p.layer < 0 else f"layers.{p.layer}."
    parts = [every[f"{before}{name}.{field}" if by_module else before + name] for name in joined]
    index = [part.name for part in parts].index(p.name)
    inner = 1 if p.expert else 0
    lengths = [model.vocab if part.style in PADDED else part.shape[inner] for part in parts]
    shape = (sum(lengths), *p.shape[inner + 1 :])
    matrix = len(shape) == 2
    transposed = TRANSPOSED in layout and matrix
    shape = shape[::-1] if transposed else shape
    theirs = row.theirs + (f".{field}" if by_module else "")
    if p.layer >= 0:
        theirs = f"{table.layers}.{p.layer}.{theirs}"
    stacked = (p.shape[0],) if p.expert and EXPERT not in theirs else ()
    interleaved, groups = INTERLEAVED in layout, model.kv_groups if GROUPED in layout else 1
    return HfPlace(
        theirs if row.theirs == table.head else prefix + theirs,
        (*stacked, *shape),
        rows=lengths[index],
        experts=p.shape[0] if p.expert else 0,
        offset=index if interleaved else sum(lengths[:index]) // groups,
        step=len(joined) if interleaved else 1,
        transposed=transposed,
        block=lengths[index] // groups if groups > 1 else 0,
        period=sum(lengths) // groups,
    )
