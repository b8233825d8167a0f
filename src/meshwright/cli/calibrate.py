"""`meshwright calibrate`: a cluster file from the results of `bench`."""

from __future__ import annotations

import typer


def command(
    files: list[str] = typer.Argument(None, metavar="BENCH.json…", help="Results of `meshwright bench --json FILE`."),
    out: str = typer.Option("", "--out", "-o", metavar="FILE", help="Write the cluster file, for --cluster FILE."),
    expect: str = typer.Option(
        "", "--expect", metavar="NAME", help="The cluster this should be. Default: the catalog's closest."
    ),
    name: str = typer.Option("", "--name", help="The name of the calibrated cluster. Default: measured."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Fit latency and bandwidth of every level, and factors of the collectives, to measured points.

    Prints a verdict for each level against the catalog: normal, or slow by a factor with likely causes. The cluster file
    stands wherever a catalog name of a cluster may stand: --cluster FILE."""
    from meshwright.calibrate.calibration import calibrate
    from meshwright.calibrate.points import Bench
    from meshwright.cli.output import writable
    from meshwright.describe.files import write_text
    from meshwright.view.tables import show, show_json

    writable(out)
    result = calibrate([Bench.read(file) for file in files or []], expect, name)
    if out:
        write_text(out, result.to_toml())
    if as_json:
        show_json(result.as_dict())
        return
    from meshwright.view.calibrate import page

    show(page(result))
    if out:
        print(f"cluster written to {out}: use --cluster {out}")
