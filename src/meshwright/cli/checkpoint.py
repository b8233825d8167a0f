"""`meshwright checkpoint`: list, verify, convert and delete the checkpoints of runs."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from meshwright.cli.options import command_group, described
from meshwright.cli.output import patient
from meshwright.errors import MeshwrightError, unknown
from meshwright.training.checkpoint.folder import checkpoints_in, prune
from meshwright.training.checkpoint.page import page, summary
from meshwright.units import Json, counted, format_bytes
from meshwright.view.tables import present, show, show_json

command = command_group("List, verify, convert and delete the checkpoints of runs.")
TARGETS = ("meshwright", "huggingface", "peft")


@command.command("ls")
@described
def list_command(
    source: Path,
    json: bool = False,
) -> None:
    """List the checkpoints of a run: step, size, and the plan that wrote each."""
    show_rows([summary(path) for path in checkpoints_in(source, incomplete=True)], json)


def show_rows(rows: list[Json], as_json: bool) -> None:
    present(page(rows), rows, as_json)


@command.command("verify")
@described
def verify_command(
    source: Path,
    json: bool = False,
) -> None:
    """Read all files of checkpoints and compare their hashes with the manifest. Exit code 1 if one is damaged, incomplete or cannot be read."""
    paths = checkpoints_in(source, incomplete=True)
    total = sum(file.stat().st_size for path in paths for file in path.iterdir() if file.is_file())
    done: list[int] = []
    with patient("verifying") as set_share:

        def listen(count: int) -> None:
            done.append(count)
            set_share(sum(done) / max(1, total))

        rows = [summary(path, verify=True, listen=listen) for path in paths]
    show_rows(rows, json)
    if not all(row["good"] for row in rows):
        raise typer.Exit(1)


@command.command("prune")
@described
def prune_command(
    source: Path,
    keep: int,
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """Delete all checkpoints of a run but the newest. The newest one is read first: nothing is deleted if it is damaged."""
    from meshwright.training.checkpoint.manifest import check_files, read_manifest

    checkpoints = checkpoints_in(source)
    if checkpoints == [source]:
        raise MeshwrightError(
            "MW-CKPT-001", f"'{source}' is one checkpoint", why="prune needs a run folder or a folder of checkpoints"
        )
    check_files(checkpoints[-1], read_manifest(checkpoints[-1]))
    doomed = checkpoints[:-keep] if dry_run else prune(checkpoints[0].parent, keep)
    if json:
        show_json({"deleted": [str(path) for path in doomed], "dry_run": dry_run})
    else:
        done = "would be deleted" if dry_run else "deleted"
        show(*(f"{path.name} {done}" for path in doomed), f"{len(checkpoints) - len(doomed)} kept")


@command.command("convert")
@described
def convert_command(
    source: Path,
    out: Path,
    to: str = "meshwright",
    model: str = "",
    dtype: str = "",
    like: Path | None = None,
    ema: bool = False,
    json: bool = False,
) -> None:
    """Convert a checkpoint. Sources: Meshwright's, and torch's distributed checkpoints with torchtitan's names.

    A torch checkpoint has pickled metadata: it is read as data, and nothing in it is executed."""
    from meshwright.describe.config import load_model
    from meshwright.training.checkpoint.convert import convert

    if to not in TARGETS:
        raise unknown("MW-CKPT-015", "the format", to, TARGETS, "--to {}")
    if to != "meshwright":
        if model:
            raise MeshwrightError("MW-CKPT-015", f"--model has no effect with --to {to}", fix="without --model")
        done, words = export(source, out, to, dtype, like, ema)
        present(f"{done.folder}: {words}", {**asdict(done), "folder": str(done.folder)}, json)
        return
    if dtype or like or ema:
        raise MeshwrightError(
            "MW-CKPT-015", "--dtype, --like and --ema have no effect with --to meshwright", fix="--to huggingface"
        )
    with patient("converting") as set_share:
        # The model of a run file, a config.json or the catalog: a checkpoint needs no cluster and no plan.
        written = convert(source, out, load_model(model) if model else None, set_share)
    show_rows([summary(written)], json)


def export(source: Path, out: Path, to: str, dtype: str, like: Path | None, ema: bool) -> tuple[Any, str]:
    """Write a Transformers or a PEFT folder; what was written, and that in words."""
    from meshwright.training.checkpoint.convert import to_huggingface, to_peft

    if to == "peft":
        if ema:
            raise MeshwrightError("MW-CKPT-015", "--ema has no effect with --to peft", fix="without --ema")
        adapter = to_peft(source, out, dtype=dtype, like=like)
        words = f"adapters of rank {adapter.rank} for {adapter.family}, {adapter.tensors} tensors"
        return adapter, f"{words}, {format_bytes(adapter.nbytes)}"
    with patient("converting") as set_share:
        done = to_huggingface(source, out, dtype=dtype, like=like, average=ema, progress=set_share)
    words = f"{done.family}, {done.tensors} tensors in {done.dtype}, {format_bytes(done.nbytes)}"
    return done, f"{words} in {counted(done.files, 'file')}"
