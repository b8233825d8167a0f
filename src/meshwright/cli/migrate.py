"""`meshwright migrate`: settings of one framework as settings of another."""

import typer

from meshwright.cli.options import described
from meshwright.cli.output import writable
from meshwright.describe.files import write_text
from meshwright.view.tables import show, show_json


@described
def command(
    source: str,
    target: str,
    file: str,
    model: str = "",
    gpus: int = 0,
    set: list[str] = [],
    out: str = "",
    as_json: bool = False,
) -> None:
    """Write settings of one framework as settings of another, and list what is carried, what is lost or changed, and what the target cannot run.

    The settings are printed, and the lists go to stderr; with --out the settings go to a file. Exit code 1 if the target cannot run the plan: nothing
    is written then, and the error offers the nearest change.
    """
    from meshwright.interop.frameworks import READABLE, framework_named
    from meshwright.interop.migrate import migrate_file
    from meshwright.view.settings import migration

    usage = "meshwright migrate {} FILE"
    to = framework_named(target, fix=usage.format(f"{source} {{}}"))
    of = None if source == "auto" else framework_named(source, ("auto",), READABLE, usage.format(f"{{}} {target}"))
    writable(out)
    result = migrate_file(file, of, to, gpus=gpus, model=model, overrides=tuple(set), out=out)
    if result.written and out:
        write_text(out, result.written.text)
    if as_json:
        show_json(result.as_dict())
        if result.refusal:
            raise typer.Exit(1)
        return
    if result.refusal:
        raise result.refusal
    assert result.written is not None
    if not out:
        print(result.written.text, end="", flush=True)
    show(migration(result), stderr=not out)
    if out:
        print(f"settings of {to.title} written to {out}")
