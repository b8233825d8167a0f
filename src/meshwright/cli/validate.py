"""`meshwright validate`: were the predictions true?"""

from __future__ import annotations

import typer

COLUMNS = (
    "source",
    "file",
    "model",
    "gpus",
    "gpu_type",
    "stack",
    "dtype",
    "tp",
    "pp",
    "dp",
    "cp",
    "ep",
    "zero",
    "schedule",
    "seq_len",
    "tier",
    "task",
    "recompute_mode",
)


def command(
    runs: str = typer.Argument("", help="A CSV with the columns of published runs."),
    failed: str = typer.Option("", "--failed", help="A CSV of runs that ran out of memory or crashed."),
    by: str = typer.Option("source", "--by", help="Group by columns: source,model,gpus,stack."),
    headline: bool = typer.Option(False, "--headline", help="Twelve famous runs, misses included."),
    as_json: bool = typer.Option(False, "--json", help="Print what a program can read."),
    html: str = typer.Option("", "--html", help="Write a page with a scatter."),
) -> None:
    """Were the predictions true? Hold them to published runs and tell the errors by source."""
    import json
    from importlib.resources import files

    from rich.console import Console
    from rich.progress import Progress

    from meshwright.calibrate import rows, validate
    from meshwright.cli.output import writable
    from meshwright.errors import MeshwrightError, unknown

    writable(html)
    columns = [c.strip() for c in by.split(",") if c.strip()]
    for column in columns:
        if column not in COLUMNS:
            raise unknown("MW-VAL-004", "column", column, COLUMNS, "--by {}")
    if not runs and not headline:
        raise MeshwrightError("MW-VAL-005", "nothing to validate", fix="give RUNS.csv or --headline")
    chosen = list(rows.read(runs)) if runs else []
    famous = list(rows.read(str(files("meshwright.calibrate").joinpath("headline.csv")))) if headline else []
    crashed = list(rows.read(failed)) if failed else []
    with Progress(
        console=Console(stderr=True), transient=True, disable=as_json or len(chosen) + len(crashed) < 150
    ) as progress:
        task = progress.add_task("predicting", total=len(chosen) + len(famous) + len(crashed))
        outcomes, stars, lost = (
            validate.predict_rows(part, lambda: progress.advance(task)) for part in (chosen, famous, crashed)
        )
    scores = {name: validate.score(part) for name, part in validate.by(outcomes, columns).items()}
    sources = {name: validate.score(part) for name, part in validate.by(outcomes, ["source"]).items()}
    overall = validate.macro(sources)
    recall = validate.recall(lost)
    if recall is not None:
        overall["recall_failed"] = recall
    if html:
        from pathlib import Path

        from meshwright.view.validate import page

        Path(html).write_text(page(outcomes or stars, sources, overall), encoding="utf-8")
    if as_json:
        out = {
            "overall": overall,
            "sources": {n: s.as_dict() for n, s in sources.items()},
            "rows": [o.as_dict() for o in (*outcomes, *stars)],
        }
        print(json.dumps(out))
        return
    from meshwright.view import validate as view
    from meshwright.view.tables import console as standard_output

    console = standard_output()
    if outcomes:
        console.print(view.table(scores, overall, by))
        console.print(view.reasons(outcomes))
    if recall is not None:
        console.print(
            f"of {len(lost)} runs that failed, {100 * recall:.0f}% are predicted not to fit (crashes for other reasons are among them)"
        )
    if stars:
        console.print(view.headline(stars))
