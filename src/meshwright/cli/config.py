"""`meshwright config`: show a resolved configuration and the origin of each value."""

from typing import Unpack

from meshwright.cli.options import Overrides, command_group, described
from meshwright.describe.config import CLASSES, diff
from meshwright.errors import unknown
from meshwright.interop.files import configure
from meshwright.view import config as view
from meshwright.view.tables import present, show_json

command = command_group()


@command.command("show")
@described
def show_command(
    file: str, everything: bool = False, toml: bool = False, json: bool = False, **asked: Unpack[Overrides]
) -> None:
    """Check the plan, and print the resolved configuration with the origin of each value."""
    config = configure(plan=file, **asked).check()
    if toml and not json:
        print(config.to_toml(), end="")
    else:
        present(view.page(config, everything), view.as_json(config), json)


@command.command("diff")
@described
def diff_command(first: str, second: str, json: bool = False, **asked: Unpack[Overrides]) -> None:
    """Print the values in which two plan files differ; --cluster, --nodes, --gpus and --set apply to both."""
    changed = diff(*(configure(plan=file, **asked) for file in (first, second)))
    sides = {path: {"first": a, "second": b} for path, (a, b) in changed.items()}
    present(view.difference(changed, (first, second)), sides, json)


@command.command("schema")
@described
def schema_command(
    section: str = "",
    output: str = "",
) -> None:
    """Print the JSON Schema of a plan file, or of what a command prints with --json."""
    from meshwright.describe.schema import schema

    if output:
        from meshwright.view.json_schema import OUTPUTS, output_schema

        if output not in OUTPUTS:
            raise unknown("MW-CONF-010", "output", output, OUTPUTS, "meshwright config schema --output {}")
        show_json(output_schema(output))
        return
    if section and section not in CLASSES:
        raise unknown("MW-CONF-010", "section", section, CLASSES, "meshwright config schema {}")
    show_json(schema(section))
