"""`meshwright train`: run a plan on local processes and hold it to its prediction."""

from __future__ import annotations

from pathlib import Path

import typer


def command(
    plan: Path = typer.Argument(..., help="A plan file."),
    steps: int = typer.Option(100, "--steps", help="Steps to train.", min=1, max=10**9),
    seed: int = typer.Option(0, "--seed", help="Of the weights and the batches.", min=0),
    learning_rate: float = typer.Option(1e-3, "--learning-rate", help="After its linear warm-up.", min=0.0),
    device: str = typer.Option("auto", "--device", help="cpu, cuda, or auto: GPUs where there are enough."),
    out: Path | None = typer.Option(None, "--out", help="The run folder. Unsaid: runs/PLAN-TIME."),
    settings: list[str] = typer.Option([], "--set", help="Override any field: --set plan.tp=2."),
    as_json: bool = typer.Option(False, "--json", help="Print what a program can read."),
) -> None:
    """Train a plan on local processes, on Python's own sources, and compare with its prediction."""
    import time

    from meshwright.cli.output import patient, writable
    from meshwright.describe.config import load
    from meshwright.training.page import page, showing
    from meshwright.training.records import Settings
    from meshwright.training.run import run_training
    from meshwright.view.tables import show, show_json

    config = load(plan, settings)
    folder = out or Path("runs") / f"{plan.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    writable(folder / "measurement.json", make=True)
    options = Settings(learning_rate=learning_rate)
    if as_json:
        with patient("training", told=False):
            training = run_training(config, steps, seed=seed, settings=options, device=device, folder=folder)
        show_json(training.as_dict())
        return
    with showing(steps) as listen:
        training = run_training(config, steps, seed=seed, settings=options, device=device, folder=folder, listen=listen)
    show(page(training, str(folder)))
