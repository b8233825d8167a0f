"""A comparison as one HTML file: the network as a strip of modules with the first difference marked, above the page of the terminal.

Three lanes, each in the order in which it is computed: outputs (forward), gradients of outputs (backward) and gradients of parameters
(reduction). A cell is one module; its colour says how far it is from its bound, its title the numbers.
"""

from html import escape
from math import isnan, log10

from meshwright.check.compare import RunComparison
from meshwright.check.folder import Recording
from meshwright.check.page import page
from meshwright.check.pair import ErrorAndBound
from meshwright.view.html import as_html

CELL, LANE, LEFT, TOP = 14, 26, 220, 44
LETTER = 6.5  # width of a letter of a label
LANES = ("forward: outputs", "backward: gradients of outputs", "reduction: gradients of parameters")
EQUAL, OFF, UNSEEN = "#2f9e6e", "#d33c32", "#8884"
PHASE_LANES = {"forward": 0, "backward": 1, "reduction": 2}


def document(one: Recording, many: Recording, comparison: RunComparison) -> str:
    body = strip(comparison) + as_html(page(one, many, comparison))
    title = f"{comparison.verdict}: {many.folder.name} against {one.folder.name}"
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(title)}</title><style>
body {{ font: 14px/1.45 system-ui, "Segoe UI", Roboto, sans-serif; margin: 24px; background: #fff; color: #1d2127; }}
.strip {{ overflow-x: auto; margin: 0 0 16px; }} text {{ font-size: 11px; fill: currentColor; }} .first {{ font-weight: 650; fill: {OFF}; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #14171c; color: #e6e8eb; }} }}
</style></head><body><h1 style="font-size:18px">{escape(title)}</h1>{body}</body></html>
"""


def strip(comparison: RunComparison) -> str:
    """The modules as an SVG; empty if modules were not compared."""
    names = [name for name, *_ in comparison.modules]
    if not names:
        return ""
    lanes = [{name: row[0] for name, *row in comparison.modules}, {name: row[1] for name, *row in comparison.modules}]
    lanes.append({name: of_parameters(comparison, name) for name in names})
    width, bottom = max(LEFT + CELL * len(names) + 20, 1000), TOP + LANE * len(LANES)
    parts = [f'<text x="0" y="{TOP + LANE * i + 16}">{text}</text>' for i, text in enumerate(LANES)]
    for i, lane in enumerate(lanes):
        for j, name in enumerate(names):
            value = lane[name]
            label = f"{name or 'model'}, {LANES[i]}: " + (
                "not seen" if isnan(value.error) else f"{value.error:.1e}, bound {value.bound:.1e}"
            )
            parts.append(
                f'<rect x="{LEFT + CELL * j}" y="{TOP + LANE * i}" width="{CELL - 2}" height="{LANE - 6}" rx="2" '
                f'fill="{colour(value)}"><title>{escape(label)}</title></rect>'
            )
    parts += [f'<text x="{LEFT + CELL * at}" y="{bottom + 14}">{escape(text)}</text>' for at, text in blocks(names)]
    parts.append(marker(comparison, names))
    size = f'width="{width}" height="{bottom + 24}" viewBox="0 0 {width} {bottom + 24}"'
    return f'<div class="strip"><svg {size} role="img" aria-label="modules and their differences">{"".join(parts)}</svg></div>'


def of_parameters(comparison: RunComparison, module: str) -> ErrorAndBound:
    """The gradient of a module's own parameters that is furthest from its bound."""
    own = [value for name, value in comparison.gradients.items() if name.rpartition(".")[0] == module]
    return max(own, key=lambda value: value.error / value.bound, default=ErrorAndBound())


def colour(value: ErrorAndBound) -> str:
    """Green within its bound, red beyond it, the stronger the further."""
    if isnan(value.error):
        return UNSEEN
    if not value.is_off:
        return EQUAL
    strength = min(1.0, 0.45 + 0.1 * log10(max(value.error / value.bound, 1.0)))
    return f"color-mix(in srgb, {OFF} {strength:.0%}, #f3b7b2)"


def blocks(names: list[str]) -> list[tuple[int, str]]:
    """Where each block of the network begins, and its name, such as layers.3; only its number where there is no room."""
    out: list[tuple[int, str]] = []
    for at, name in enumerate(names):
        parts = name.split(".")
        numbers = [i for i, part in enumerate(parts) if part.isdigit()]
        block = ".".join(parts[max(numbers[0] - 1, 0) : numbers[0] + 1]) if numbers else ""
        if block and (not out or out[-1][1] != block):
            out.append((at, block))
    ends = [at for at, _ in out[1:]] + [len(names)]
    return [
        (at, block if LETTER * len(block) < CELL * (end - at) else block.rpartition(".")[2])
        for (at, block), end in zip(out, ends, strict=True)
    ]


def marker(comparison: RunComparison, names: list[str]) -> str:
    """A triangle over the module where the first difference is, and its phase and pattern."""
    found = comparison.diagnosis
    module = found and (found.tensor if found.tensor in names else found.tensor.rpartition(".")[0])
    if found is None or module not in names:
        return ""
    x = LEFT + CELL * names.index(module) + CELL // 2 - 1
    y = TOP + LANE * PHASE_LANES.get(found.phase, 2)
    line = f'<path d="M{x} {y - 2}V30" stroke="{OFF}"/>' if y > TOP else ""
    text = escape(
        f"first difference: {module or 'model'}, {found.phase}, {found.pattern.kind} {found.pattern.detail}".rstrip()
    )
    anchor = "end" if x > LEFT + 400 else "start"
    return f'{line}<path d="M{x - 5} 30h10l-5 9z" fill="{OFF}"/><text class="first" x="{x}" y="22" text-anchor="{anchor}">{text}</text>'
