"""`meshwright doctor`: what works on this machine, and why not."""

import typer

from meshwright.cli.options import described
from meshwright.cli.output import patient
from meshwright.view.tables import present


@described
def command(
    as_json: bool = False,
) -> None:
    """Check versions, devices, network interfaces and rights, and say which commands work here and why others do not.

    Nothing is changed and nothing is sent. Exit code 1 if planning itself does not work."""
    from meshwright.doctor import FAILS, examine

    with patient("looking at this machine", measurable=False):
        checkup = examine()
    present(checkup, checkup.as_dict(), as_json)
    if any(check.state == FAILS for check in checkup.sections["versions"] if check.what != "torch"):
        raise typer.Exit(1)
