"""`meshwright verify`: prove that a plan trains the same model as one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from meshwright.cli.options import ClusterOption, DifferencesOption, GpusOption, JsonOption, NodesOption


def command(
    subject: str = typer.Argument(
        ...,
        metavar="PLAN|SCRIPT.py:MAKE",
        help="A plan file, or script.py:make, a function that returns a module of yours.",
    ),
    plan: Path | None = typer.Option(None, "--plan", help="For a module of yours: the plan file; its [plan] is used."),
    example: str | None = typer.Option(
        None,
        "--example",
        help="Name in the script of the batch (inputs, targets), or of a function of a seed that returns it. Default: example.",
    ),
    loss: str | None = typer.Option(
        None,
        "--loss",
        help="Name in the script of loss(output, targets). Default: loss, else the module returns its loss.",
    ),
    table: str | None = typer.Option(
        None,
        "--table",
        help="Name in the script of the sharding table. Default: table, else that of the module's class.",
    ),
    layers: str | None = typer.Option(
        None, "--layers", help="Path in the module of its list of layers, for a pipeline."
    ),
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
    allow_differences: DifferencesOption = "",
    check: bool = typer.Option(
        True, "--check/--no-check", help="For your own module: run the checks of `parallelize`."
    ),
    cluster: ClusterOption = "",
    nodes: NodesOption = 0,
    gpus: GpusOption = 0,
    settings: list[str] = typer.Option([], "--set", help="Override a field, such as --set plan.tp=8. Repeatable."),
    out: Path | None = typer.Option(None, "--out", help="Write the proof as JSON to this file, which `report` reads."),
    as_json: JsonOption = False,
) -> None:
    """Prove on local processes that a plan trains the same model as one device: the model of a plan file, or a module of yours
    (verify script.py:make --plan plan.toml).

    Compares losses, gradients, parameters and collectives of small copies. A plan of more ranks than --ranks is folded:
    once with every axis at 2, then with each axis at 4. Exit code 1 if they differ."""
    from meshwright import api
    from meshwright.cli.output import patient, writable
    from meshwright.view.tables import show, show_json

    writable(out, make=True)
    own: dict[str, Any] = {
        "plan": plan,
        "example": example,
        "loss": loss,
        "table": table,
        "layers": layers,
        "check": check,
    }
    source: Any = subject
    if not api.is_module(subject):
        refuse(
            own | {"check": False, "no-check": not check},
            "a plan file describes its model",
            "meshwright verify script.py:make --plan plan.toml",
        )
        settings = [*settings, *api.difference_settings(allow_differences)]
        source = api.load(subject, cluster=cluster, nodes=nodes, gpus=gpus, set=settings).check_trainable()
        own, settings = {}, []
    else:
        refuse(
            {"cluster": cluster, "nodes": nodes, "gpus": gpus, "allow-differences": allow_differences},
            "a module is proved without a cluster",
            "",
        )
    with patient("training on many ranks and on one", measurable=False):
        proof = api.verify(
            source,
            **own,
            ranks=ranks,
            steps=steps,
            seed=seed,
            device=device,
            backend=backend,
            share_device=share_device,
            set=settings,
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


def refuse(options: dict[str, Any], why: str, fix: str) -> None:
    """Raise for an option that would have no effect."""
    from meshwright.errors import MeshwrightError

    for name, value in options.items():
        if value:
            raise MeshwrightError("MW-VERIFY-002", f"--{name} has no effect here: {why}", fix=fix)
