"""`meshwright verify`: prove that a plan trains the same model as one device."""

import json
from pathlib import Path
from typing import Any, Unpack

import typer

from meshwright import api
from meshwright.cli.options import Overrides, described
from meshwright.cli.output import patient, writable
from meshwright.describe.files import write_text
from meshwright.errors import MeshwrightError
from meshwright.units import Json
from meshwright.view.tables import present


@described
def command(
    subject: str,
    plan: Path | None = None,
    example: str | None = None,
    loss: str | None = None,
    table: str | None = None,
    layers: str | None = None,
    ranks: int = 8,
    steps: int = 5,
    seed: int = 0,
    device: str = "auto",
    backend: str = "auto",
    share_device: bool = False,
    whole: bool = False,
    allow_differences: str = "",
    check: bool = True,
    out: Path | None = None,
    as_json: bool = False,
    **asked: Unpack[Overrides],
) -> None:
    """Prove on local processes that a plan trains the same model as one device: the model of a plan file, or a module of yours
    (verify script.py:make --plan plan.toml).

    Compares losses, gradients, parameters and collectives of small copies. A plan of more ranks than --ranks is folded:
    once with every axis at 2, then with each axis at 4. Exit code 1 if they differ."""
    writable(out, make=True)
    own: Json = {"plan": plan, "example": example, "loss": loss, "table": table, "layers": layers}
    source: Any = subject
    if not api.is_module(subject):
        usage = "meshwright verify script.py:make --plan plan.toml"
        refuse(own | {"no-check": not check}, "a plan file describes its model", usage)
        asked["set"] += api.difference_settings(allow_differences)
        source = api.load(subject, **asked).check_trainable()
        own, asked["set"] = {}, []
    else:
        refuse({**asked, "set": [], "allow-differences": allow_differences}, "a module is proved without a cluster", "")
        own["check"] = check
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
            whole=whole,
            set=asked["set"],
        )
    if out is not None:
        write_text(out, json.dumps(proof.as_dict(), indent=2))
    present(proof, proof.as_dict(), as_json)
    if not proof.passed:
        raise typer.Exit(1)


def refuse(options: Json, why: str, fix: str) -> None:
    """Raise for an option that would have no effect."""
    for name, value in options.items():
        if value:
            raise MeshwrightError("MW-VERIFY-002", f"--{name} has no effect here: {why}", fix=fix)
