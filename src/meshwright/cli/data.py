"""`meshwright data`: make token files from text, and show what is in them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.cli.options import command_group, described

LINE_S = 2.0  # seconds between lines of progress where there is no terminal
command = command_group("Make token files for [data] in a run file, and show what is in them.")


@command.command("prepare")
@described
def prepare_command(
    sources: list[Path],
    out: Path,
    tokenizer: str,
    field: str = "text",
    document: str = "file",
    format: str = "auto",
    split: str = "",
    end_token: str = "",
    workers: int = 0,
    json: bool = False,
) -> None:
    """Tokenize text into a token file for [data] in a run file.

    The result does not depend on the number of workers. After an interruption the same command continues where it stopped;
    a finished folder is never overwritten."""
    from meshwright.training.data.page import contents, page
    from meshwright.training.data.prepare.run import prepare
    from meshwright.view.tables import show, show_json

    with progress(partial=out / "partial") as listen:
        prepare(
            sources,
            out,
            tokenizer,
            field=field,
            document=document,
            format=format,
            split=split,
            end_token=end_token,
            workers=workers,
            listen=listen,
        )
    summary = contents(out)
    if json:
        show_json(summary)
    else:
        show(page(summary), f'[dim]written to {out}; use it with [/][bold]\\[data] path = "{out}"[/]')


@command.command("show")
@described
def show_command(
    path: Path,
    samples: int = 3,
    tokenizer: str = "",
    verify: bool = False,
    json: bool = False,
) -> None:
    """Show what is in a token file: counts, tokenizer, and the beginnings of some documents."""
    from meshwright.training.data.page import contents, page
    from meshwright.training.data.token_file import check_offsets, open_tokens, verify_hashes
    from meshwright.view.tables import show, show_json

    if verify:
        file = open_tokens(path)
        check_offsets(file)
        if file.header is not None:
            verify_hashes(path)
    summary = contents(path, samples, tokenizer)
    show_json(summary) if json else show(page(summary))


@contextmanager
def progress(partial: Path) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr with rate and time left; lines where there is no terminal. If the work is interrupted, say what
    was kept."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    err = Console(stderr=True)
    columns = TextColumn("tokenizing"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
    task = bar.add_task("", total=None)
    started = printed = time.monotonic()
    first: int | None = None  # bytes that an earlier run had done

    def listen(done: int, total: int) -> None:
        nonlocal printed, first
        if first is None:
            first = done
            bar.reset(task, total=total, completed=done)
        bar.update(task, completed=done, total=total)
        now = time.monotonic()
        if not err.is_terminal and now - printed > LINE_S:
            printed = now
            rate = (done - first) / (now - started)
            left = f", {(total - done) / rate:.0f} s left" if rate else ""
            print(f"tokenizing: {done / max(total, 1):.0%} of {total / 1e6:,.1f} MB{left}", file=sys.stderr, flush=True)

    try:
        with bar:
            yield listen
    except (KeyboardInterrupt, SystemExit):
        if partial.is_dir():
            print("Interrupted. Finished parts are kept: the same command continues.", file=sys.stderr)
        raise
