"""`meshwright verify`: does the plan train the model one device would?"""

from __future__ import annotations

from pathlib import Path

import typer


def command(
    plan: Path = typer.Argument(..., help="A plan file."),
    ranks: int = typer.Option(8, "--ranks", help="Most local processes to use.", min=1, max=64),
    steps: int = typer.Option(5, "--steps", help="Steps to train and compare.", min=1, max=100),
    seed: int = typer.Option(0, "--seed", help="Of the weights and the batches.", min=0),
    device: str = typer.Option("auto", "--device", help="cpu, cuda, or auto: GPUs where there are enough."),
    settings: list[str] = typer.Option([], "--set", help="Override any field: --set plan.tp=4."),
    out: Path | None = typer.Option(None, "--out", help="Also write the proof as JSON to this file, for `report`."),
    as_json: bool = typer.Option(False, "--json", help="Print what a program can read."),
) -> None:
    """Does the plan train what one device would? Losses, gradients, parameters and collectives, compared."""
    from meshwright import api
    from meshwright.cli.output import patient, writable
    from meshwright.view.tables import show, show_json

    writable(out, make=True)
    config = api.load(plan, set=settings).check()
    with patient("training on many ranks and on one", measurable=False):
        proof = api.verify(config, ranks=ranks, steps=steps, seed=seed, device=device)
    if out is not None:
        import json

        from meshwright.describe.files import write_text

        write_text(out, json.dumps(proof.as_dict(), indent=2))
    if as_json:
        show_json(proof.as_dict())
    else:
        from meshwright.proof.page import page

        show(page(proof))
    if not proof.passed:
        raise typer.Exit(1)
