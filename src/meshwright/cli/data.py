"""`meshwright data`: make token files from text, and show what is in them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.cli.options import command_group, described
from meshwright.cli.output import patient
from meshwright.training.data.page import contents, page
from meshwright.view.tables import present, show, show_json

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
    template: str = "",
    learn: str = "assistant",
    date: str = "",
    workers: int = 0,
    json: bool = False,
) -> None:
    """Tokenize text into a token file for [data] in a run file.

    The result does not depend on the number of workers. After an interruption the same command continues where it stopped;
    a finished folder is never overwritten."""
    from meshwright.training.data.prepare.run import prepare

    with patient("tokenizing") as set_share, note_of_interruption(out / "partial"):
        prepare(
            sources,
            out,
            tokenizer,
            field=field,
            document=document,
            format=format,
            split=split,
            end_token=end_token,
            template=template,
            learn=learn,
            date=date,
            workers=workers,
            listen=lambda done, total: set_share(done / max(total, 1)),
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
    from meshwright.training.data.token_file import check_offsets, open_tokens, verify_hashes

    if verify:
        file = open_tokens(path)
        check_offsets(file)
        if file.header is not None:
            verify_hashes(path)
    summary = contents(path, samples, tokenizer)
    present(page(summary), summary, json)


@contextmanager
def note_of_interruption(partial: Path) -> Iterator[None]:
    """Say what an interruption leaves, if there is something to continue."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if partial.is_dir():
            print("Interrupted. Finished parts are kept: the same command continues.", file=sys.stderr)
        raise
