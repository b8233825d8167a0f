"""`meshwright validate`: compare predictions with published runs."""

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
    runs: str = typer.Argument("", help="A CSV file of published runs."),
    failed: str = typer.Option("", "--failed", help="A CSV file of runs that ran out of memory or crashed."),
    by: str = typer.Option("source", "--by", help="Columns to group by, such as source,model,gpus,stack."),
    headline: bool = typer.Option(False, "--headline", help="Twelve well-known runs, the wrong predictions included."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
    html: str = typer.Option("", "--html", help="Write a page with a scatter plot to this file."),
) -> None:
    """Compare predictions with published runs and show the errors by source."""
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
        raise MeshwrightError("MW-VAL-005", "there are no runs to compare with", fix="give RUNS.csv or --headline")
    chosen = list(rows.read(runs)) if runs else []
    famous = list(rows.read(str(files("meshwright.calibrate").joinpath("headline.csv")))) if headline else []
    crashed = list(rows.read(failed)) if failed else []
    with Progress(
        console=Console(stderr=True), transient=True, disable=as_json or len(chosen) + len(crashed) < 150
    ) as progress:
        task = progress.add_task("predicting", total=len(chosen) + len(famous) + len(crashed))
        outcomes, headlines, lost = (
            validate.predict_rows(part, lambda: progress.advance(task)) for part in (chosen, famous, crashed)
        )
    scores = {name: validate.score(part) for name, part in validate.by(outcomes, columns).items()}
    sources = {name: validate.score(part) for name, part in validate.by(outcomes, ["source"]).items()}
    overall = validate.macro(sources)
    recall = validate.recall(lost)
    if recall is not None:
        overall["recall_failed"] = recall
    if html:
        from meshwright.describe.files import write_text
        from meshwright.view.validate_html import page

        write_text(html, page(outcomes, headlines))
    if as_json:
        out = {
            "overall": overall,
            "sources": {n: s.as_dict() for n, s in sources.items()},
            "rows": [o.as_dict() for o in (*outcomes, *headlines)],
        }
        print(json.dumps(out))
        return
    from meshwright.view import validate as view
    from meshwright.view.tables import console as standard_output

    console = standard_output()
    if outcomes:
        console.print(view.table(scores, overall, by))
        console.print(view.refusals(outcomes))
    if recall is not None:
        console.print(
            f"{100 * recall:.0f}% of {len(lost)} failed runs are predicted not to fit in memory "
            "(the failed runs include crashes for other reasons)"
        )
    if headlines:
        console.print(view.headline_table(headlines))
