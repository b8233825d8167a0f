"""`meshwright runs`: list runs, compare them, watch one."""

from pathlib import Path

from meshwright.cli.options import described
from meshwright.view.tables import console, show, show_json


@described
def command(
    places: list[Path] = [],
    watch: bool = False,
    as_json: bool = False,
) -> None:
    """List the training runs of a folder, compare some of them, or watch one that runs here or on another host."""
    from meshwright.describe.run_folder import is_run
    from meshwright.view.runs import comparison, find_runs, listing, summary

    places = places or [Path("runs")]
    folders = find_runs(places)
    if watch:
        from meshwright.view.watch import watch_run

        watch_run(folders)
    elif as_json:
        show_json({"runs": [summary(folder) for folder in folders]})
    elif len(places) > 1 and all(map(is_run, places)):
        show(comparison(places))
    else:
        show(listing([summary(folder) for folder in folders], console().width))
