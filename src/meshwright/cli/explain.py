"""`meshwright explain`: where the steps of anybody's training went."""

from pathlib import Path

from meshwright.cli.options import described


@described
def command(files: list[Path], html: str = "", as_json: bool = False) -> None:
    """Read the profiler traces of a training program, and say where its steps went.

    meshwright explain trace-0.json.gz trace-1.json.gz; meshwright explain FOLDER with a file per rank."""
    from meshwright.cli.output import patient, writable
    from meshwright.explain.folder import read_traces
    from meshwright.view.tables import show, show_json
    from meshwright.view.traces import as_dict, page

    writable(html)
    with patient("reading traces", measurable=False):
        traces = read_traces(files)
    if as_json:
        show_json(as_dict(traces))
    else:
        show(page(traces))
