"""The token files that [data] names, opened and checked against the model: before any rank starts, and again in each rank.

Checks that read only headers and indices are made here; a token outside the vocabulary in a file without a header (Megatron's)
is found when its batch is read (`sequences`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwright.describe.config import Config
from meshwright.describe.data import Data
from meshwright.errors import MeshwrightError
from meshwright.training.data.documents import Documents
from meshwright.training.data.token_file import TokenFile, check_offsets, open_tokens
from meshwright.training.data.tokenizer import tokenizer_hash


def training_documents(data: Data) -> list[Documents]:
    """The documents of each path, without those kept for validation."""
    return [Documents(open_tokens(path), data.validation) for path in data.path]


def validation_documents(data: Data) -> list[Documents]:
    """The validation documents: the files of `validation_path`, or the validation share of each path."""
    if data.validation_path:
        return [Documents(open_tokens(path)) for path in data.validation_path]
    return [Documents(open_tokens(path), data.validation, validation=True) for path in data.path]


def check_data(config: Config) -> None:
    """Raise if a run cannot train on its data: a missing, damaged or foreign file, another tokenizer, a vocabulary that is too
    small for it, or too few tokens for one sequence."""
    data, model = config.data, config.model
    if not data.path:
        return
    if model.unit != "tokens":
        raise MeshwrightError(
            "MW-DATA-008",
            f"{model.name or 'the model'} has no sequence and does not train on tokens",
            fix="remove [data], or train a transformer",
        )
    files = [open_tokens(path) for path in (*data.path, *data.validation_path)]
    for file in files:
        check_offsets(file)
        check_vocabulary(file, model.padded_vocab)
    check_tokenizers(files, data.tokenizer)
    seq = config.workload.seq
    check_lengths(training_documents(data), seq, data.pack, "")
    if data.validation or data.validation_path:
        check_lengths(validation_documents(data), seq, data.pack, "validation ")


def check_vocabulary(file: TokenFile, vocabulary: int) -> None:
    """Raise if the model has fewer token values than the tokenizer of a file."""
    if file.vocabulary > vocabulary:
        raise MeshwrightError(
            "MW-DATA-006",
            f"the tokenizer of '{file.name}' has {file.vocabulary:,} tokens, the model {vocabulary:,}",
            why="A token above the vocabulary has no row in the embedding",
            fix=f"--set model.vocab={file.vocabulary}",
        )


def check_tokenizers(files: Sequence[TokenFile], tokenizer: str) -> None:
    """Raise if the files were made with different tokenizers, or not with the one that [data] names."""
    hashes = {file.header.tokenizer_hash: file for file in files if file.header}
    if len(hashes) > 1:
        one, other = list(hashes.values())[:2]
        raise MeshwrightError(
            "MW-DATA-007",
            f"'{one.name}' and '{other.name}' were made with different tokenizers",
            why="The same token would mean different text",
            fix="prepare all sources with one tokenizer",
        )
    if tokenizer and hashes and tokenizer_hash(tokenizer) not in hashes:
        (file,) = hashes.values()
        name = file.header.tokenizer if file.header else ""
        raise MeshwrightError(
            "MW-DATA-007",
            f"'{file.name}' was not made with '{Path(tokenizer).name}'",
            why=f"Its header names the tokenizer '{name}' with another hash",
            fix="prepare the sources with this tokenizer, or correct data.tokenizer",
        )


def check_lengths(documents: Sequence[Documents], seq: int, pack: bool, kind: str) -> None:
    """Raise if a source has no sequence of `seq` tokens."""
    for part in documents:
        if not part.sequences(seq, pack):
            raise MeshwrightError(
                "MW-DATA-002",
                f"the {kind}documents of '{part.file.name}' have {part.tokens:,} tokens: too few for one sequence of {seq:,}",
                fix="use more text, a shorter sequence (--set workload.seq=N) or another data.validation",
            )
