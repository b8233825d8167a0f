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
    from functools import partial

    from meshwright import api
    from meshwright.cli.output import patient, writable
    from meshwright.training.page import page, showing
    from meshwright.view.tables import show, show_json

    config = api.load(plan, set=settings)
    folder = out or Path("runs") / f"{plan.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    writable(folder / "measurement.json", make=True)
    run = partial(api.train, config, steps=steps, seed=seed, learning_rate=learning_rate, device=device, out=folder)
    if as_json:
        with patient("training", told=False):
            show_json(run().as_dict())
        return
    with showing(steps) as listen:
        training = run(listen=listen)
    show(page(training, str(folder)))
