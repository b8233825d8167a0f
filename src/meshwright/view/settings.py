"""Settings of another framework in the terminal: what was understood, what is ignored, what does not matter; and recipes, as a table."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.errors import printable
from meshwright.interop.keys import SettingsProblem
from meshwright.interop.migrated_keys import Migration
from meshwright.interop.reading import SettingsReading
from meshwright.interop.recipes import RecipeVerdict
from meshwright.units import Json, format_seconds
from meshwright.view.tables import titled

MOST = 12  # keys in a line of a kind that does not matter
SEVERITIES = {"error": ("✗", "bold red"), "warning": ("!", "bold yellow"), "note": ("·", "dim")}
HARMLESS = ("ignored", "no effect")
KINDS = {
    "left open": ("the script does not give it", "bold red"),
    "left out": (
        "its condition depends on a file, a program or a variable that is not assigned; taken as false",
        "yellow",
    ),
    "not read": ("files that the script sources; a variable that they set is open", "yellow"),
    "unknown": ("not known, and could matter", "bold red"),
    "not modelled": ("may change time or memory; the cost model does not have it", "yellow"),
    "ignored": ("not known; its name suggests that it does not matter", "dim"),
    "no effect": ("time and memory of a step do not depend on them", "dim"),
}


def page(reading: SettingsReading, name: str) -> RenderableType:
    """Return what was read of a settings file: facts with the keys they came from, and the other keys by kind."""
    used, sources = reading.understood.used, reading.understood.sources
    rows = [(fact, _shown(used.get(key)), Text(key, "dim")) for fact, key in sources.items()]
    facts = titled("", ("understood", "value", "key"), rows)
    lines: list[RenderableType] = [Text.assemble((f"{name}: settings of {reading.framework.title}", "bold")), facts]
    meant = reading.framework.table.meant
    for kind, (words, style) in KINDS.items():
        keys = reading.understood.others.get(kind, [])
        if keys:
            most = MOST if kind in HARMLESS else len(keys)
            more = f" and {len(keys) - most} more" if len(keys) > most else ""
            spelled = [f"{key} (did you mean {near}?)" if (near := meant(key)) else key for key in keys[:most]]
            listed = f"{', '.join(spelled)}{more}"
            lines.append(Text.assemble((f"{kind}: ", style), listed, (f"  ({words})", "dim")))
    if reading.assembled.assumed:
        lines.append(Text.assemble(("assumed: ", "dim"), ", ".join(reading.assembled.assumed)))
    lines += [problem_line(problem) for problem in reading.problems]
    return Group(*lines, Text())


def problem_line(problem: SettingsProblem) -> Text:
    """Return what is wrong with settings, why, and the fix."""
    mark, style = SEVERITIES[problem.severity]
    text = Text.assemble((f"{mark} {problem.code}  ", style), problem.what, f". {problem.why}" if problem.why else "")
    return text.append("  fix ", "green").append(problem.fix) if problem.fix else text


def as_dict(reading: SettingsReading) -> Json:
    """Return the same for `--json`."""
    return {
        "framework": reading.framework.title,
        "understood": dict(reading.understood.used.items()),
        **{kind.replace(" ", "_"): reading.understood.others.get(kind, []) for kind in KINDS},
        "assumed": reading.assembled.assumed,
        "problems": [problem.as_dict() for problem in reading.problems],
    }


def recipes(verdicts: Sequence[RecipeVerdict]) -> RenderableType:
    """Return a row per framework, then the findings."""
    rows = []
    for framework in sorted({v.framework for v in verdicts}):
        own = [v for v in verdicts if v.framework == framework]
        fits, read, illegal = Counter(v.fits for v in own), sum(v.read for v in own), sum(v.legal is False for v in own)
        rows.append((framework, *map(str, (len(own), read, illegal, fits[True], fits[False], fits[None]))))
    columns = ("framework", ">recipes", ">read", ">illegal", ">fits", ">does not fit", ">unknown fit")
    lines: list[RenderableType] = [titled("", columns, rows), Text()]
    for verdict in verdicts:
        for finding in verdict.findings:
            if finding["severity"] == "error" or finding.get("cost_s"):
                fix = f"  Fix: {finding['fix']}" if finding["fix"] else ""
                cost = f" ({format_seconds(finding['cost_s'])} per step)" if finding.get("cost_s") else ""
                code = (f"{finding['code']}  ", "red" if finding["severity"] == "error" else "yellow")
                lines.append(Text.assemble((f"{verdict.id}  ", "bold"), code, finding["what"] + cost, (fix, "green")))
    return Group(*lines)


def migration(result: Migration) -> RenderableType:
    """Return what became of every key of the settings that were migrated."""
    lines: list[RenderableType] = []
    title = result.target.title
    for name, keys, style in (("carried", result.carried, "green"), ("lost or changed", result.lost, "yellow")):
        if keys:
            rows = Table(box=None, pad_edge=False, show_header=False)
            for key in keys:
                rows.add_row(_shown(f"  {key.key}", 80), _shown(key.value), Text(key.target, "dim"))
            aside = f"  ({result.source.framework.title} → {title})"
            lines += [Text.assemble((name, f"bold {style}"), (aside, "dim")), rows]
    if result.other:
        lines.append(Text.assemble(("not about the plan: ", "bold"), printable(", ".join(result.other))))
    if result.source.assembled.assumed:
        lines.append(Text.assemble(("assumed: ", "bold"), ", ".join(result.source.assembled.assumed)))
    return Group(*lines)


def _shown(value: Any, most: int = 40) -> Text:
    """A value of a file in one cell: not markup, and without control characters."""
    text = printable(str(value).lower() if isinstance(value, bool) else str(value))
    return Text(text if len(text) <= most else text[: most - 3] + "...")
