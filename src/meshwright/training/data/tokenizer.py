"""Tokenizers: text to tokens and back. `bytes` needs no file and no package; a `tokenizer.json` of Hugging Face needs `tokenizers`."""

import hashlib
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from meshwright.describe.files import read_text
from meshwright.errors import MeshwrightError
from meshwright.training.hooks import BYTE_VALUES
from meshwright.version import install_command

BYTES = "bytes"
LIMIT = 500_000_000  # bytes of a tokenizer file
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")


class Tokenizer(Protocol):
    """`vocabulary` is one more than the largest token; `end` closes a document, None: documents have no last token.
    `special` are the texts that are one token each. Offsets are the first character of each token, and the one after its last."""

    name: str
    vocabulary: int
    end: int | None
    special: list[str]

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]: ...
    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...


def package(name: str, needed_for: str) -> Any:
    """Import an optional package; a missing one is a clear error."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MeshwrightError(
            "MW-DATA-014",
            f"{needed_for} needs the package {name.partition('.')[0]}, which is not installed",
            fix=install_command("train"),
        ) from None


class ByteTokenizer:
    """Each byte of the UTF-8 text is a token."""

    name, vocabulary = BYTES, BYTE_VALUES

    def __init__(self, end: str = "") -> None:
        self.special: list[str] = []
        self.end: int | None = None
        if end and end != "none":
            if not (end.isdecimal() and len(end) < 4 and int(end) < BYTE_VALUES):
                raise MeshwrightError(
                    "MW-DATA-013", f"--end-token {end!r} is not a byte", valid=["none", "0 to 255"], fix="--end-token 0"
                )
            self.end = int(end)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        starts = [np.repeat(np.arange(len(text)), [len(c.encode("utf-8")) for c in text]) for text in texts]
        offsets = [np.stack((start, start + 1), 1) for start in starts]
        return list(zip(self.encode(texts), offsets, strict=True))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(int(t) for t in tokens).decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizer.json`, through the package `tokenizers`. Special tokens are not added to the text, only `end` to each document."""

    def __init__(self, path: str | Path, end: str = "") -> None:
        tokenizers = package("tokenizers", "A tokenizer file")
        text = read_text(path, LIMIT)
        self.name = Path(path).name
        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the package raises plain exceptions
            raise MeshwrightError(
                "MW-DATA-013",
                f"'{path}' is not a tokenizer file",
                why=str(error)[:200],
                valid=["the tokenizer.json of a Hugging Face model", BYTES],
            ) from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        tokens = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary = max(tokens.values(), default=-1) + 1
        self.end = self._end_token(tokens, end)
        self.special = [t.content for t in self.tokenizer.get_added_tokens_decoder().values() if t.special]
        self._encode = getattr(self.tokenizer, "encode_batch_fast", self.tokenizer.encode_batch)

    def _end_token(self, tokens: dict[str, int], end: str) -> int | None:
        if end == "none":
            return None
        if not end:
            return next((tokens[name] for name in END_TOKENS if name in tokens), None)
        if end not in tokens:
            raise MeshwrightError(
                "MW-DATA-013",
                f"--end-token {end[:60]!r} is not a token of {self.name}",
                valid=["none", *(name for name in END_TOKENS if name in tokens)],
            )
        return tokens[end]

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(e.ids, np.int64) for e in self._encode(list(texts), add_special_tokens=False)]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        encoded = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [(np.array(e.ids, np.int64), np.array(e.offsets, np.int64).reshape(-1, 2)) for e in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode([int(t) for t in tokens], skip_special_tokens=False)


def open_tokenizer(name: str, end: str = "") -> Tokenizer:
    """`bytes`, or the path of a tokenizer file."""
    return ByteTokenizer(end) if name == BYTES else FileTokenizer(name, end)


def tokenizer_hash(name: str) -> str:
    """The hash that a token file stores of its tokenizer."""
    content = b"" if name == BYTES else read_text(name, LIMIT).encode("utf-8")
    return hashlib.sha256(content or BYTES.encode()).hexdigest()
