"""`meshwright measure`: one device runs one rank of a large plan."""

from pathlib import Path
from typing import Unpack

from meshwright.cli.options import Overrides, described
from meshwright.errors import MeshwrightError


@described
def command(
    plan: Path,
    rank: int | None = None,
    stage: str = "all",
    steps: int = 5,
    device: str = "auto",
    log: str = "",
    out: str = "",
    as_json: bool = False,
    **asked: Unpack[Overrides],
) -> None:
    """Run one rank of a plan on one device, with the collectives replaced, and compare its compute and memory with the prediction.

    The rank has its real shapes; PyTorch's fake process group stands for the others. Of a pipeline every stage is measured in turn. The
    step of all ranks is then composed of the measured compute, the predicted network and the walked schedule. `plan --from-measure FILE` plans with
    what was measured. For settings of torchtitan or Megatron-LM: prints the command that runs one rank there; --log reads what it printed."""
    from meshwright import api
    from meshwright.calibrate.runs import from_rank
    from meshwright.cli.output import patient, writable
    from meshwright.describe.files import write_text
    from meshwright.interop.files import is_settings_file
    from meshwright.view.measured import page
    from meshwright.view.tables import show, show_json

    writable(out)
    if rank is not None and stage != "all":
        raise MeshwrightError("MW-CLI-003", "--rank and --stage cannot be combined", fix=f"--rank {rank}")
    config = api.load(plan, **asked)
    if log or is_settings_file(str(plan)):
        from meshwright.interop.one_rank import command_of, measured_in

        if not log:
            print(command_of(str(plan), config.plan.world))  # on one line, to be copied
            return
        measured, kind = [measured_in(log, config)], "the framework"
    else:
        from meshwright.training.machine import resolve_device, with_precision
        from meshwright.training.measure.one_rank import measure_plan

        kind = resolve_device(device, 1)
        config, note = with_precision(config, kind == "cpu")
        if note and not as_json:
            show(f"[dim]{note}[/]")
        with patient("measuring", measurable=False):
            config, measured = measure_plan(config, chosen_stage(stage, config.plan.pp), rank, steps, kind)
    result = from_rank.content(config, measured, kind)
    if out:
        import json

        write_text(out, json.dumps(result, indent=2))
    if as_json:
        show_json(result)
    else:
        show(page(result), *([f"[dim]written to {out}[/]"] if out else []))


def chosen_stage(stage: str, stages: int) -> int | None:
    """The number of a pipeline stage, or None for all of them."""
    if stage == "all":
        return None
    if not stage.isdecimal() or int(stage) >= stages:
        raise MeshwrightError(
            "MW-MEASURE-001",
            f"--stage {stage}: the plan has {stages} pipeline stage{'s' * (stages != 1)}",
            valid=["all", *map(str, range(min(stages, 16)))],
            fix="--stage all",
        )
    return int(stage)
