"""`meshwright show column-parallel` and `row-parallel`: one matrix product on two GPUs, with all values.

Y = X·W with X of 2×4 and W of 4×8. **Columns**: W = [W₀ | W₁], each GPU has all of X and computes its half of Y's
columns. Forward needs no communication unless the full Y is required (an all-gather). In backward each GPU has a partial
sum of dX (an all-reduce). **Rows**: W₀ is above W₁, each GPU has half of X's columns and a *partial sum* of all of Y; an
all-reduce adds the two. The output of a column-parallel product is the input of a row-parallel one: the pair needs one
all-reduce in forward and one in backward. The collectives here are the programs of `meshwright show`, run on arrays.
"""

from typing import Any

import numpy as np
from rich.columns import Columns
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from meshwright.programs.collectives import build
from meshwright.programs.collectives.arrays import run_on_arrays
from meshwright.units import Json
from meshwright.view.tables import heading

GPUS = 2
TINTS = ("cyan", "magenta")


def operands() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """X, W and the gradient of Y: small whole numbers, so every equality is exact."""
    x = np.arange(1, 9).reshape(2, 4)
    w = (np.arange(32).reshape(4, 8) * 5) % 7 - 3
    return x, w, np.array([[1, 0, -1, 2, 1, 1, 0, -2], [0, 2, 1, -1, 0, 1, -1, 1]])


def column_parallel() -> Json:
    """Split W by columns: each GPU has all of X, and computes half of the columns of Y."""
    x, w, dy = operands()
    parts = np.split(w, GPUS, axis=1)
    outputs = [x @ part for part in parts]
    gathered = run_collective([y.T.ravel() for y in outputs], "all-gather", w.shape[1] * 2)
    partial = [g @ part.T for g, part in zip(np.split(dy, GPUS, axis=1), parts, strict=True)]
    dx = run_collective([p.ravel() for p in partial], "all-reduce", x.size).reshape(x.shape)
    return example(x, parts, outputs, gathered.reshape(w.shape[1], 2).T, partial, dx)


def row_parallel() -> Json:
    """Split W by rows, and X by columns: each GPU computes a part of every sum."""
    x, w, dy = operands()
    inputs, parts = np.split(x, GPUS, axis=1), np.split(w, GPUS, axis=0)
    partial = [a @ b for a, b in zip(inputs, parts, strict=True)]
    y = run_collective([p.ravel() for p in partial], "all-reduce", partial[0].size).reshape(partial[0].shape)
    grads = [dy @ part.T for part in parts]
    return example(inputs, parts, partial, y, grads, np.hstack(grads))


def example(inputs: Any, weights: Any, outputs: Any, y: np.ndarray, grads: Any, dx: np.ndarray) -> Json:
    """The matrices on each GPU, the combined ones, and those of one device."""
    x, w, dy = operands()
    names = ("X", "W", "Y", "whole Y", "X·W", "dX", "whole dX", "dY·Wᵀ")
    return dict(zip(names, (inputs, weights, outputs, y, x @ w, grads, dx, dy @ w.T), strict=True))


def run_collective(inputs: list[np.ndarray], operation: str, elements: int) -> np.ndarray:
    """Return the result that both GPUs have after the collective, which is run as a program."""
    first, second = run_on_arrays(build(operation, "ring", GPUS, elements), inputs)
    assert np.array_equal(first, second)
    return first


def example_of(topic: str) -> tuple[Json, bool]:
    """The matrices of a topic, and whether both GPUs together have the product of one device."""
    example = column_parallel() if topic == "column-parallel" else row_parallel()
    equal = np.array_equal(example["whole Y"], example["X·W"]) and np.array_equal(example["whole dX"], example["dY·Wᵀ"])
    return example, bool(equal)


def data(topic: str) -> Json:
    """Return what `--json` prints."""
    example, equal = example_of(topic)
    plain = {k: [m.tolist() for m in v] if isinstance(v, list) else v.tolist() for k, v in example.items()}
    return {"topic": topic, "equal": equal, **plain}


# Of each topic: title, what is split, what a GPU has (name, and the key of its matrix), how the parts become Y and dX, and what is sent.
PAGES: dict[str, Json] = {
    "column-parallel": {
        "split": "Y = X·W, the columns of W split over two GPUs: each has all of X and half of the output features",
        "cards": (("X: all of it", "X"), ("W{g}: columns {first}–{last}", "W"), ("Y{g} = X·W{g}", "Y")),
        "wide": 4,
        "Y": ("Y = [Y0 | Y1] by all-gather", "beside"),
        "forward": (
            "forward    no communication: the halves can be the input of a row-parallel product; the all-gather is needed only for the full Y"
        ),
        "backward": "backward   each GPU has the partial dX of its columns of W; an all-reduce adds them:",
        "dX": ("dX = dX0 + dX1 by all-reduce", "sum"),
    },
    "row-parallel": {
        "split": "Y = X·W, the rows of W split over two GPUs: each has half of the input features and a part of every sum",
        "cards": (
            ("X{g}: columns {first}–{last}", "X"),
            ("W{g}: rows {first}–{last}", "W"),
            ("partial Y{g} = X{g}·W{g}", "Y"),
        ),
        "wide": 2,
        "Y": ("Y = Y0 + Y1 by all-reduce", "sum"),
        "forward": "forward    one all-reduce of Y; a bias is added once, after it (or on one GPU), never by both",
        "backward": "backward   no communication: each GPU computes dX of its columns of X from all of dY",
        "dX": ("dX = [dX0 | dX1], as split", "beside"),
    },
}


def page(topic: str) -> list[Any]:
    """What each GPU has, how Y and dX follow from it, and whether they equal those of one device."""
    (matrices, equal), words = example_of(topic), PAGES[topic]
    out: list[Any] = [
        heading(topic.capitalize(), words["split"]),
        Columns([card(g, matrices, words) for g in range(GPUS)]),
    ]
    for what, notes in (("Y", (words["forward"], words["backward"])), ("dX", ())):
        title, how = words[what]
        out += [
            combined_panel(title, matrices[what], matrices[f"whole {what}"], how),
            verdict(what, equal),
            *map(Text, notes),
        ]
    return out


def card(gpu: int, matrices: Json, words: Json) -> Panel:
    """Return a panel with the matrices on one GPU; a matrix that is not split has no colour."""
    first = words["wide"] * gpu
    parts: list[Any] = []
    for name, key in words["cards"]:
        value, tint = matrices[key], TINTS[gpu]
        value, tint = (value[gpu], tint) if isinstance(value, list) else (value, "")
        parts += [Text(name.format(g=gpu, first=first, last=first + words["wide"] - 1), "dim"), grid(value, tint)]
    return Panel(Group(*parts), title=f"GPU {gpu}", border_style=TINTS[gpu], width=46)


def grid(matrix: np.ndarray, *styles: str) -> Table:
    """Return a matrix as a table with right-aligned columns; each style is for an equal group of columns."""
    out = Table.grid(padding=(0, 1))
    rows, columns = matrix.shape
    width = max(len(str(v)) for v in matrix.ravel())
    for _ in range(columns):
        out.add_column(justify="right", min_width=max(3, width))
    for row in range(rows):
        out.add_row(*(Text(str(matrix[row, c]), styles[c * len(styles) // columns]) for c in range(columns)))
    return out


def combined_panel(title: str, parts: list[np.ndarray], whole: np.ndarray, how: str) -> Panel:
    """Return a panel with the two parts and the combined matrix."""
    line = Table.grid(padding=(0, 2))
    sign = "│" if how == "beside" else "+"
    tinted = grid(whole, *TINTS) if how == "beside" else grid(whole, "bold")
    rows = [Text("\n".join([s] * whole.shape[0]), "dim") for s in (sign, "=")]
    line.add_row(grid(parts[0], TINTS[0]), rows[0], grid(parts[1], TINTS[1]), rows[1], tinted)
    return Panel(line, title=Text(title), title_align="left", border_style="dim", expand=False)


def verdict(what: str, equal: bool) -> Text:
    wanted = {"Y": "X·W on one GPU", "dX": "dY·Wᵀ on one GPU"}[what]
    sign, word, style = ("✓", "equals", "green") if equal else ("✗", "differs from", "red")
    return Text(f"{sign} {what} {word} {wanted}, number for number\n", style)
