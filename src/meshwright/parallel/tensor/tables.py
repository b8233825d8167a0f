"""Sharding tables: how tensor parallelism divides a model, as rows (pattern of names, style), read by `tensor.split`.

    region      its input enters column-split products: `copy_in`, or `gather_in` with sequence parallelism
    enter       its output enters such products
    column      a linear layer whose weight and bias are split by output; no communication
    column:1,1  the same for several parts in one weight, in this proportion, each split separately (`cutting`)
    heads:4,2,2 several parts counted in heads, which are never cut; with fewer heads than ranks a head is on several ranks
    per-head    one number per head: each rank has those of its heads
    keys:64     column by whole heads of this width; with fewer heads than ranks a head is on several ranks
    counts:a,b  attributes by which the module counts (its heads, for example) become this rank's; `config.a`: in its own copy of a config
    row         a linear layer whose weight is split by input; outputs are partial sums: `reduce_out` or `scatter_out`, then the whole
                bias, once. In the all-gather form split by output, input and output gathered
    attention   `nn.MultiheadAttention` by heads; its `out_proj` is "row"
    vocabulary  an embedding split by rows: absent tokens look up zero, the sum over ranks is the embedding. With sequence parallelism
                each rank keeps its share of the sequence
    embedding   the same, and the output stays whole
    logits      column over the vocabulary, which need not divide: for a loss that knows where each rank begins
    join        its output, columns of this rank, is gathered, and all ranks continue with the whole
    reduce      its output is a partial sum, since rows of the table cut its parameters so
    replicated  whole, and every rank gives it the same input
    between     whole, and outside the regions: with sequence parallelism it sees a share of the tokens, so its gradient is a partial sum
                over the tp ranks
    inside      whole, and inside a region: it sees this rank's heads or columns only, so its gradient is always a partial sum
    split_sequence  with sequence parallelism its first argument is divided along the sequence
    join_sequence   with sequence parallelism its output is gathered along the sequence, and all ranks continue with the whole
    divided     with sequence parallelism its input is this rank's share already: the caller divides it
    positions   whole; with sequence parallelism a rank keeps its share of the output
    dropout     holds nothing; with sequence parallelism it drops of its share of the tokens
    probabilities   holds nothing; drops of this rank's heads
    gathered    its output, columns of this rank, is gathered from all: the deep MLP's layers
    experts     divided over ep and expert_tp (`expert`); in a module that is not ours, "cut" rows give how tensor parallelism divides it

A row may also name a parameter: "cut:1" splits dimension 1, "cut:1:1,1" a dimension of two parts, each separately.
`*` matches one part of a dotted name. Rows of one module apply in their order; what wraps it later is outside.

A module that holds parameters and matches no row raises, and so does a row that matches nothing: either would silently train
something else. Tables of known classes of other libraries are in `families`.
"""

from meshwright.describe.model import Model
from meshwright.describe.sharding import module_styles
from meshwright.describe.variants import ATTENTIONS

Table = tuple[tuple[str, str], ...]

# The modules of our models that communicate or drop, besides those with parameters (`describe.sharding.module_styles`).
COMMON: Table = (
    ("embedding.drop", "dropout"),
    ("layers.*.*_drop", "dropout"),
    ("layers.*.ffn", "region"),
    ("layers.*.moe.shared", "region"),
    ("head.project", "region"),
)


def table_of(model: Model) -> Table:
    """The table of one of our models: the style of every parameter as `describe.sharding` has it, and where regions begin."""
    styles = module_styles(model)
    if model.kind == "mlp":
        return (*styles, ("layers.*", "gathered"))
    heads = f"layers.*.{ATTENTIONS[model.attention].heads_in}"
    return (*styles, *COMMON, (heads, "region"), (f"{heads}.probabilities", "probabilities"))
