"""`meshwright validate`: compare predictions with published runs."""

from meshwright.calibrate.runs import accuracy, rows
from meshwright.cli.options import described
from meshwright.cli.output import patient, writable
from meshwright.describe.files import write_text
from meshwright.errors import MeshwrightError, unknown
from meshwright.view.tables import show, show_json

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


@described
def command(
    runs: str = "",
    failed: str = "",
    by: str = "source",
    headline: bool = False,
    beside: str = "",
    as_json: bool = False,
    html: str = "",
    markdown: str = "",
) -> None:
    """Compare predictions with published runs and show the errors by source, also of sources that the fit has not seen."""
    from importlib.resources import files

    from meshwright.calibrate.runs.accuracy import assess
    from meshwright.calibrate.runs.beside import read as read_predictions

    writable(html, markdown)
    columns = [c.strip() for c in by.split(",") if c.strip()]
    for column in columns:
        if column not in COLUMNS:
            raise unknown("MW-VAL-004", "column", column, COLUMNS, "--by {}")
    famous = list(rows.read(str(files("meshwright.calibrate.runs").joinpath("headline.csv")))) if headline else []
    chosen, crashed = chosen_rows(runs, failed, headline and not markdown)
    predictions = read_predictions(beside) if beside else None
    with patient("predicting") as progress:
        unnamed = bool(html or markdown or as_json)
        accuracy = assess(chosen, famous, crashed, progress, unnamed, predictions)
    from meshwright.view import validate as view

    if html:
        write_text(html, view.html(accuracy))
    if markdown:
        if accuracy.left_out is None:
            why = "The tables of --markdown need predicted runs of at least two sources (column `file`)"
            raise MeshwrightError("MW-VAL-003", "no source can be left out", why=why)
        from meshwright.view.accuracy_markdown import document

        write_text(markdown, document(accuracy))
    if as_json:
        show_json(accuracy.as_dict())
        return
    show(*view.page(accuracy, columns, by))


def chosen_rows(runs: str, failed: str, only_headline: bool) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The runs to compare with, and those that failed. Without a file: the published ones, or none if only the well-known runs are asked."""
    crashed = list(rows.read(failed)) if failed else []
    if runs:
        return list(rows.read(runs)), crashed
    if only_headline:
        return [], crashed
    return accuracy.runs(), crashed or accuracy.failed()
