"""A token file in the terminal: what it contains, how long its documents are, and some of its text."""

from pathlib import Path

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.training.data.token_file import TOKENIZER, TokenFile, open_tokens
from meshwright.training.data.tokenizer import BYTES, Tokenizer, open_tokenizer
from meshwright.units import Json, format_count, format_decimal_bytes
from meshwright.view.tables import facts, filled, heading

SHOWN = 100  # tokens of a sample
LENGTHS = 1 << 20  # documents whose lengths are summarised: all, or as many spread over the file


def contents(path: str | Path, samples: int = 3, tokenizer: str = "") -> Json:
    """Return the contents of a token file, as plain data."""
    file = open_tokens(path)
    reader = reader_of(file, Path(path), tokenizer)
    chosen = np.linspace(0, file.documents - 1, min(samples, file.documents)).round().astype(int)
    header = file.header
    return {
        "name": file.name,
        "format": "meshwright" if header else "megatron",
        "tokens": len(file.tokens),
        "documents": file.documents,
        "dtype": file.tokens.dtype.name,
        "bytes": file.tokens.nbytes + file.offsets.nbytes + (0 if file.learned is None else file.learned.nbytes),
        "tokenizer": header.tokenizer if header else None,
        "tokenizer_hash": header.tokenizer_hash if header else None,
        "vocabulary": header.vocabulary if header else None,
        "end_token": header.end_token if header else None,
        "options": header.options if header else {},
        "sources": header.sources if header else [],
        "document_tokens": document_lengths(file),
        "learned_share": None if file.learned is None else np.count_nonzero(file.learned) / len(file.tokens),
        "samples": [sample_of(file, int(d), reader) for d in chosen],
    }


def reader_of(file: TokenFile, path: Path, tokenizer: str) -> Tokenizer | None:
    """The tokenizer that decodes a file: the given one, or the copy in its folder."""
    if tokenizer:
        return open_tokenizer(tokenizer)
    if file.header is None:
        return None
    if file.header.tokenizer == BYTES:
        return open_tokenizer(BYTES)
    return open_tokenizer(str(path / TOKENIZER)) if (path / TOKENIZER).is_file() else None


def document_lengths(file: TokenFile) -> dict[str, float]:
    """Median, 90th percentile and largest number of tokens of a document."""
    step = -(-file.documents // LENGTHS)
    lengths = (np.asarray(file.offsets[1:]) - np.asarray(file.offsets[:-1]))[::step]
    middle, high = np.percentile(lengths, (50, 90))
    return {"median": float(middle), "p90": float(high), "largest": float(lengths.max())}


def sample_of(file: TokenFile, document: int, reader: Tokenizer | None) -> Json:
    start, stop = int(file.offsets[document]), int(file.offsets[document + 1])
    tokens = np.asarray(file.tokens[start : min(stop, start + SHOWN)]).tolist()
    text = reader.decode(tokens) if reader else None
    return {"document": document, "length": stop - start, "tokens": tokens, "text": text}


def page(found: Json) -> RenderableType:
    """The page that `meshwright data show` prints."""
    lengths, end = found["document_tokens"], found["end_token"]
    names = [name for name, _ in found["sources"]]
    rows = [
        ("tokens", f"{found['tokens']:,}  ({format_count(found['tokens'])})"),
        ("documents", f"{found['documents']:,}"),
        (
            "length",
            f"median {lengths['median']:,.0f}, 90% below {lengths['p90']:,.0f}, longest {lengths['largest']:,.0f}",
        ),
        *([("learned", f"{share:.1%} of the tokens")] if (share := found["learned_share"]) is not None else []),
        ("stored as", f"{found['dtype']}, {format_decimal_bytes(found['bytes'])}"),
        ("tokenizer", f"{found['tokenizer']}  {found['tokenizer_hash'][:12]}" if found["tokenizer"] else "not stored"),
        ("vocabulary", f"{found['vocabulary']:,}" if found["vocabulary"] else ""),
        ("end token", "none" if end is None else str(end)),
        ("sources", ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")),
    ]
    cells = [
        (s["document"], f"{s['length']:,}", Text(excerpt(s), "cyan" if s["text"] is not None else "dim"))
        for s in found["samples"]
    ]
    title = heading(found["name"], f"{found['format']} token file")
    return (
        Group(title, facts(rows), filled((">document", ">tokens", "begins with"), cells))
        if cells
        else Group(title, facts(rows))
    )


def excerpt(sample: Json, width: int = 100) -> str:
    """The beginning of a document on one line; its tokens if there is no tokenizer to decode them."""
    text = " ".join(map(str, sample["tokens"])) if sample["text"] is None else " ".join(sample["text"].split())
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return text if len(text) <= width else text[: width - 1] + "…"
