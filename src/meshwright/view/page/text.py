"""A configuration as text to copy or save: a plan file, a command that estimates it, settings of other frameworks, and launch files."""

import json
import shlex
from typing import Any

from meshwright.describe.config import Config
from meshwright.describe.draft import leaves
from meshwright.errors import MeshwrightError
from meshwright.interop.frameworks import FRAMEWORKS
from meshwright.interop.write import settings_of
from meshwright.units import Json
from meshwright.view.launch_files import LAUNCHERS
from meshwright.view.launch_files.job import make_job

FILE = "plan.toml"
ENDING = {"args": "sh", "python": "py"}  # of settings whose form is not an ending


def texts(config: Config) -> Json:
    """The plan file, a command, settings and launch files. The command needs the plan file where a section is not from the catalog."""
    launch = {name: launch_text(config, name) for name in LAUNCHERS}
    return {"toml": config.to_toml(), "command": command(config), "settings": settings_texts(config), "launch": launch}


def launch_text(config: Config, name: str) -> Json:
    """The file with which a launcher starts the plan, that is saved as `FILE` beside it."""
    try:
        job = make_job(config, FILE, typed=shlex.join(["meshwright", "launch", FILE, f"--{name}"]))
        return {"file": f"{job.name}{LAUNCHERS[name].suffix}", "text": LAUNCHERS[name].write(job), "error": None}
    except MeshwrightError as error:
        return {"file": "", "text": "", "error": error.as_dict()}


def settings_texts(config: Config) -> dict[str, Json]:
    """By framework: its settings for this plan, and the fields of the plan that they cannot express."""
    out: dict[str, Json] = {}
    for name, framework in FRAMEWORKS.items():
        try:
            written = settings_of(config, framework)
        except MeshwrightError as error:
            out[name] = {"file": "", "text": "", "lost": [], "error": error.as_dict()}
        else:
            file = f"{name}.{ENDING.get(framework.form, framework.form)}"
            out[name] = {"file": file, "text": written.text, "lost": list(written.inexpressible), "error": None}
    return out


def command(config: Config, name: str = "estimate") -> str:
    """`meshwright estimate MODEL --cluster …` with the values that differ from the catalog, quoted for a shell."""
    sections = config.to_dict()
    words = ["meshwright", name]
    settings: Json = {}
    for section in ("model", "cluster", "stack"):
        entry = sections[section]
        table = {"extends": entry} if isinstance(entry, str) else dict(entry)
        if "extends" not in table or any(isinstance(value, dict | list) for value in table.values()):
            return shlex.join(["meshwright", name, "--plan", FILE])
        base = str(table.pop("extends"))
        words += [base] if section == "model" else [f"--{section}", base]
        if section == "cluster" and "gpus" in table:
            words += ["--gpus", str(table.pop("gpus"))]
        settings |= {f"{section}.{key}": value for key, value in table.items()}
    for section in ("workload", "plan", "adapter"):
        table = sections[section]
        settings |= dict(leaves(table, section)) if isinstance(table, dict) and table else {}
    for path, value in settings.items():
        words += ["--set", f"{path}={_value(value)}"]
    return shlex.join(words)


def _value(value: Any) -> str:
    """A value as `--set` reads it: TOML, or a bare word."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(json.dumps(item) for item in value) + "]"
    return str(value)
