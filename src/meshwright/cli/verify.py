"""`meshwright verify`: prove that a plan trains the same model as one device."""

from __future__ import annotations

from pathlib import Path

import typer

from meshwright.cli.options import ClusterOption, GpusOption, JsonOption, NodesOption


def command(
    plan: Path = typer.Argument(..., help="A plan file."),
    ranks: int = typer.Option(8, "--ranks", help="Maximum number of local processes.", min=1, max=64),
    steps: int = typer.Option(5, "--steps", help="Number of steps to train and compare.", min=1, max=100),
    seed: int = typer.Option(0, "--seed", help="Seed of the initial weights and of the batches.", min=0),
    device: str = typer.Option("auto", "--device", help="cpu, cuda, or auto (GPUs if there is one for each rank)."),
    backend: str = typer.Option(
        "auto",
        "--backend",
        help="gloo, meshwright (our collectives, on the CPU), nccl, or auto (nccl on GPUs, else gloo).",
    ),
    share_device: bool = typer.Option(
        False, "--share-device", help="Several ranks on one GPU, for tests: their tensors move through the host."
    ),
    cluster: ClusterOption = "",
    nodes: NodesOption = 0,
    gpus: GpusOption = 0,
    settings: list[str] = typer.Option([], "--set", help="Override a field, such as --set plan.tp=8. Repeatable."),
    out: Path | None = typer.Option(None, "--out", help="Write the proof as JSON to this file, which `report` reads."),
    as_json: JsonOption = False,
) -> None:
    """Prove on local processes that a plan trains the same model as one device.

    Compares losses, gradients, parameters and collectives of small copies. A plan of more ranks than --ranks is folded:
    once with every axis at 2, then with each axis at 4. Exit code 1 if they differ."""
    from meshwright import api
    from meshwright.cli.output import patient, writable
    from meshwright.view.tables import show, show_json

    writable(out, make=True)
    config = api.load(plan, cluster=cluster, nodes=nodes, gpus=gpus, set=settings).check_trainable()
    with patient("training on many ranks and on one", measurable=False):
        proof = api.verify(
            config,
            ranks=ranks,
            steps=steps,
            seed=seed,
            device=device,
            backend=backend,
            share_device=share_device,
        )
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
