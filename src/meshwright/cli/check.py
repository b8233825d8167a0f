"""`meshwright check`: anybody's training code against one device."""

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.options import HELP_NAMES, command_group, described

command = command_group("Record the first steps of anybody's training, and compare them with those on one device.")


@command.command("record", context_settings={**HELP_NAMES, "allow_interspersed_args": False})
@described
def record_command(
    arguments: list[str],
    out: Path,
    steps: int = 2,
    perturbed: int = 0,
    limit: str = "2GiB",
    go_on: bool = False,
    on_cpu: bool = False,
) -> None:
    """Run a training script unchanged, and record what its ranks compute in the first steps.

    meshwright check record --out one -- python train.py;
    meshwright check record --out many -- torchrun --nproc-per-node 4 train.py.
    When all ranks have recorded their steps the script is ended. If it fails, its exit code is returned, and what was recorded stays.
    --perturbed 2 runs it twice more with weights moved by one unit in their last place: from these `compare` knows how far rounding goes.
    --on-cpu makes frameworks that ask for a GPU run on CPU processes: `meshwright check frameworks` lists what it replaces."""
    from meshwright.check.start import record, summary
    from meshwright.units import parse_bytes
    from meshwright.view.tables import show

    code = record(arguments, out, steps, perturbed, parse_bytes(limit), go_on, on_cpu)
    show(summary(out))
    raise SystemExit(code)


@command.command("frameworks")
@described
def frameworks_command(as_json: bool = False) -> None:
    """Print which frameworks were tried: versions, layouts, what a rank holds is read from, what runs on a CPU and what is replaced for it."""
    from meshwright.check.frameworks.tried import FRAMEWORKS_TRIED, frameworks_page
    from meshwright.view.tables import present

    present(frameworks_page(), [tried.as_dict() for tried in FRAMEWORKS_TRIED], as_json)


@command.callback(invoke_without_command=True)
def check_options(
    context: typer.Context,
    frameworks: Annotated[bool, typer.Option("--frameworks", help="The same as the command frameworks.")] = False,
) -> None:
    if frameworks:
        frameworks_command(as_json=False)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


@command.command("compare")
@described
def compare_command(
    reference: Path, candidate: Path, table: Path | None = None, html: Path | None = None, as_json: bool = False
) -> None:
    """Compare two recordings of the same steps, and name the first difference: where it is, and what its numbers look like.

    Exit code 0: equal within rounding; 1: differs, or cannot be told."""
    from meshwright.check.compare import compare
    from meshwright.check.folder import Recording
    from meshwright.check.names import read_table
    from meshwright.check.page import page
    from meshwright.cli.output import patient, writable
    from meshwright.view.tables import present

    writable(html)
    with patient("comparing", measurable=False):
        one, many = Recording.read(reference), Recording.read(candidate)
        comparison = compare(one, many, one.perturbed(), read_table(table))
    if html is not None:
        from meshwright.check.comparison_view import document
        from meshwright.describe.files import write_text

        write_text(html, document(one, many, comparison))
    present(page(one, many, comparison), comparison.as_dict(), as_json)
    raise SystemExit(comparison.verdict != "equal within rounding")


@command.command("watch", context_settings={**HELP_NAMES, "allow_interspersed_args": False})
@described
def watch_command(
    arguments: list[str],
    out: Path = Path("watch"),
    every: int = 50,
    stop: bool = False,
    without: list[str] = [],
    table: Path | None = None,
    on_cpu: bool = False,
) -> None:
    """Run a training script unchanged, and compare its ranks every few steps: copies of parameters, gradient norms, samples, random states.

    meshwright check watch -- torchrun --nproc-per-node 4 train.py.
    What does not hold is reported once on stderr and in OUT/watch.json.
    The exit code is the script's; with --stop a violation ends the run with 1."""
    from meshwright.check.folder import read_json
    from meshwright.check.invariants import summary_of
    from meshwright.check.start import watch
    from meshwright.view.tables import show

    code = watch(arguments, out, every, stop, without, table, on_cpu)
    if (out / "watch.json").exists():
        show(summary_of(read_json(out / "watch.json")), stderr=True)
    raise SystemExit(code)


@command.command("collectives")
@described
def collectives_command(
    recording: Path,
    settings: str = "",
    model: str = "",
    cluster: str = "",
    gpus: int = 0,
    set: list[str] = [],
    step: int = 0,
    as_json: bool = False,
) -> None:
    """Compare the collectives of a recording among the ranks of each group, and with those that the plan of its settings needs.

    Exit code 1: one is missing, repeated, or in a wrong group. No second recording is needed."""
    from meshwright.check.expected import against_plan, between_members
    from meshwright.check.folder import Recording
    from meshwright.check.page import findings_page
    from meshwright.interop.files import configure, is_settings_file
    from meshwright.view.tables import present

    many = Recording.read(recording)
    steps = many.step(min(step, many.steps - 1))
    findings = list(between_members(many, steps))
    if settings:
        cluster = cluster or ("dgx-h100" if is_settings_file(settings) else "")  # no time is asked: any cluster does
        config = configure(model, cluster, plan=settings, gpus=gpus or many.world, set=set)
        findings += against_plan(many, steps, config)
    shown = findings_page(many, min(step, many.steps - 1), findings, settings)
    present(shown, {"findings": [vars(finding) for finding in findings]}, as_json)
    raise SystemExit(any(finding.kind != "note" for finding in findings))


@command.command("reference")
@described
def reference_command(
    settings: Path, framework: str = "", out: Path | None = None, gpus: int = 0, model: str = "", memory: str = "80GiB"
) -> None:
    """Write how to run a training on one device: its settings with all degrees 1 and the same global batch, and the commands that compare both.

    SETTINGS is a settings file or launch script of a framework, as `migrate` reads them. A model too large for one device is shrunk in both runs."""
    from meshwright.check.reference import reference_of
    from meshwright.cli.output import writable
    from meshwright.interop.frameworks import READABLE, framework_named
    from meshwright.units import parse_bytes

    named = framework_named(framework, among=READABLE, fix="--framework {}") if framework else None
    plan = reference_of(settings, framework=named, gpus=gpus, model=model, memory=parse_bytes(memory), out=out or "")
    if out is not None:
        writable(out / "README.txt", make=True)
    written = [] if out is None else ["", *(f"written: {file}" for file in plan.write(out))]
    print("\n".join([plan.text(), *written]))
