"""`meshwright launch`: the file that starts a plan on a cluster."""

import shlex
from pathlib import Path
from typing import Any, Unpack

from meshwright import api
from meshwright.cli.options import Overrides, described
from meshwright.cli.output import writable
from meshwright.describe.files import write_text
from meshwright.errors import MeshwrightError
from meshwright.units import Json
from meshwright.view.tables import show


@described
def command(
    plan: str,
    slurm: bool = False,
    kubernetes: bool = False,
    pytorchjob: bool = False,
    skypilot: bool = False,
    torchrun: bool = False,
    ray: bool = False,
    out: str = "",
    folder: str = "",
    framework: str = "",
    per_node: int = 0,
    save_every: int = 0,
    interface: str = "",
    image: str = "",
    claim: str = "",
    time_limit: str = "",
    force: bool = False,
    **asked: Unpack[Overrides],
) -> None:
    """Write the file that starts a plan under a launcher, with comments that give the reasons (docs/launching.md).

    Nothing is started and no launcher needs to be installed here. The plan is checked first."""
    from meshwright.view.launch_files import LAUNCHERS
    from meshwright.view.launch_files.job import make_job, option_words

    options = not_empty(**asked)
    own: Json = {"per_node": per_node, "save_every": save_every, "interface": interface}
    own |= {"image": image, "claim": claim}
    words = option_words({**not_empty(**{"for": framework, "run": folder}, **own, time=time_limit), **options})
    flags = {"slurm": slurm, "kubernetes": kubernetes, "pytorchjob": pytorchjob, "skypilot": skypilot}
    chosen = chosen_launcher(plan, **flags, torchrun=torchrun, ray=ray)
    job = make_job(
        api.load(plan, **options),
        plan,
        typed=shlex.join(["meshwright", "launch", plan, f"--{chosen}", *words]),
        framework=framework,
        folder=folder,
        time_limit=time_limit,
        options=options,
        **own,
    )
    launcher = LAUNCHERS[chosen]
    if out == "-":
        print(launcher.write(job), end="")
        return

    file = Path(out or job.name + launcher.suffix)
    write_file(file, launcher.write(job), force)
    show(f"{file}: {job.config.plan.world} ranks on {job.nodes} × {job.per_node} devices, run folder {job.folder}")
    show(f"start it with: [bold]{launcher.command(job, file)}[/]")


def not_empty(**options: Any) -> Json:
    """The options that were given: those that are not empty."""
    return {name: value for name, value in options.items() if value}


def chosen_launcher(plan: str, **flags: bool) -> str:
    """The one launcher that is given."""
    chosen = [name for name, flag in flags.items() if flag]
    if len(chosen) != 1:
        what = "no launcher is given" if not chosen else f"--{chosen[0]} and --{chosen[1]} both name a launcher"
        raise MeshwrightError(
            "MW-CLI-003", what, valid=[f"--{name}" for name in flags], fix=f"meshwright launch {plan} --slurm"
        )
    return chosen[0]


def write_file(file: Path, text: str, force: bool) -> None:
    """Write a launch file; one that exists with another text is kept unless `force`."""
    if not force and file.is_file() and file.read_text("utf-8", errors="replace") != text:
        why, fix = "It may hold changes of yours", "--force, or --out FILE"
        raise MeshwrightError("MW-CLI-006", f"'{file}' exists and is different", why=why, fix=fix)
    writable(file)
    write_text(file, text)
