"""Token files: what is written is read back; a missing, damaged, truncated or foreign file is a clear error."""

import json
import struct
from dataclasses import replace

import numpy as np
import pytest

from meshwright.describe.config import Config
from meshwright.describe.model import Model
from meshwright.describe.run import Data
from meshwright.errors import MeshwrightError
from meshwright.training.data.prepare.run import prepare
from meshwright.training.data.sources import check_data
from meshwright.training.data.token_file import check_offsets, open_tokens, smallest_dtype, verify_hashes


@pytest.fixture
def tokens(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo words\n\nthree whole words\n")
    prepare([tmp_path / "a.txt"], tmp_path / "tokens", document="blank-line", workers=1)
    return tmp_path / "tokens"


def refused(code, call, *args):
    with pytest.raises(MeshwrightError) as error:
        call(*args)
    assert error.value.code == code, error.value
    return str(error.value)


def test_a_token_file_is_read_back(tokens):
    file = open_tokens(tokens)
    assert bytes(file.tokens[file.offsets[1] : file.offsets[2]]) == b"two words"
    assert (file.documents, len(file.tokens), file.vocabulary) == (3, 3 + 9 + 17, 256)
    assert isinstance(file.tokens, np.memmap)
    check_offsets(file)
    verify_hashes(tokens)


@pytest.mark.parametrize(
    ("vocabulary", "name"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_tokens_are_stored_in_the_smallest_type(vocabulary, name):
    assert smallest_dtype(vocabulary).name == name


def test_a_missing_or_foreign_file_is_refused(tmp_path):
    refused("MW-DATA-003", open_tokens, tmp_path / "missing")
    refused("MW-DATA-003", open_tokens, tmp_path)
    (tmp_path / "header.json").write_text('{"format": "something else"}')
    refused("MW-DATA-003", open_tokens, tmp_path)
    (tmp_path / "header.json").write_bytes(b"\xff\xfe{")
    refused("MW-DATA-003", open_tokens, tmp_path)


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin"])
@pytest.mark.parametrize("size", [0, 7, 1000])
def test_a_truncated_empty_or_longer_array_is_refused(tokens, name, size):
    content = (tokens / name).read_bytes()
    (tokens / name).write_bytes((content + bytes(1000))[:size])
    assert name in refused("MW-DATA-004", open_tokens, tokens)
    (tokens / name).unlink()
    refused("MW-DATA-003", open_tokens, tokens)


def test_changed_bytes_are_found(tokens):
    for name in ("tokens.bin", "documents.bin"):
        content = (tokens / name).read_bytes()
        (tokens / name).write_bytes(content[:8] + bytes([content[8] ^ 1]) + content[9:])
        refused("MW-DATA-004", verify_hashes, tokens)
        (tokens / name).write_bytes(content)
    offsets = np.fromfile(tokens / "documents.bin", "<i8")
    offsets[1:3] = offsets[2], offsets[1]
    offsets.tofile(tokens / "documents.bin")
    refused("MW-DATA-004", check_offsets, open_tokens(tokens))


def change_header(tokens, changes):
    document = json.loads((tokens / "header.json").read_text())
    (tokens / "header.json").write_text(json.dumps({**document, **changes}))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"version": 2}, "MW-DATA-005"),
        ({"dtype": "object"}, "MW-DATA-004"),
        ({"tokens": -1}, "MW-DATA-004"),
        ({"tokens": True}, "MW-DATA-004"),
        ({"tokens": "9"}, "MW-DATA-004"),
        ({"hashes": None}, "MW-DATA-004"),
        ({"new": 1}, "MW-DATA-004"),
    ],
)
def test_a_header_that_is_not_valid_is_refused(tokens, change, code):
    change_header(tokens, change)
    refused(code, open_tokens, tokens)


# Megatron's files


def write_megatron(prefix, texts, code=8, dtype="<u2", **changes):
    """The published format: one sequence for each document."""
    parts = {
        "magic": b"MMIDIDX\x00\x00",
        "preamble": struct.pack("<QBQQ", 1, code, len(texts), len(texts) + 1),
        "lengths": np.array([len(d) for d in texts], "<i4").tobytes(),
        "pointers": (np.cumsum([0, *map(len, texts)])[:-1] * np.dtype(dtype).itemsize).astype("<i8").tobytes(),
        "documents": np.arange(len(texts) + 1, dtype="<i8").tobytes(),
    }
    prefix.with_suffix(".idx").write_bytes(b"".join({**parts, **changes}.values()))
    prefix.with_suffix(".bin").write_bytes(np.concatenate(texts).astype(dtype).tobytes())


@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4"), (1, "u1"), (5, "<i8")])
def test_files_of_megatron_are_read(tmp_path, code, dtype):
    write_megatron(tmp_path / "corpus", [[1, 2, 3], [4], [5, 6]], code, dtype)
    for name in ("corpus", "corpus.bin", "corpus.idx"):
        file = open_tokens(tmp_path / name)
        assert (file.tokens.tolist(), file.offsets.tolist()) == ([1, 2, 3, 4, 5, 6], [0, 3, 4, 6])
        assert file.vocabulary == 0


def test_damaged_files_of_megatron_are_refused(tmp_path):
    prefix, documents = tmp_path / "corpus", [[1, 2, 3], [4]]
    for code, changes in (
        ("MW-DATA-003", {"magic": b"MMIDIDX\x00\x01"}),
        ("MW-DATA-005", {"preamble": struct.pack("<QBQQ", 2, 8, 2, 3)}),
        ("MW-DATA-005", {"preamble": struct.pack("<QBQQ", 1, 7, 2, 3)}),
        ("MW-DATA-004", {"preamble": struct.pack("<QBQQ", 1, 8, 2**60, 3)}),
        ("MW-DATA-004", {"documents": b""}),
        ("MW-DATA-004", {"documents": np.array([0, 2, 1], "<i8").tobytes()}),
        ("MW-DATA-004", {"pointers": np.array([0, 8], "<i8").tobytes()}),
        ("MW-DATA-004", {"lengths": np.array([3, -1], "<i4").tobytes()}),
        ("MW-DATA-004", {"lengths": np.array([3, 5], "<i4").tobytes()}),
    ):
        write_megatron(prefix, documents, **changes)
        refused(code, open_tokens, prefix)
    write_megatron(prefix, documents)
    prefix.with_suffix(".idx").write_bytes(b"")
    refused("MW-DATA-003", open_tokens, prefix)
    write_megatron(prefix, documents)
    prefix.with_suffix(".bin").unlink()
    refused("MW-DATA-003", open_tokens, prefix)


# [data] against the model


def config(**data):
    parts = {"model": {"hidden": 16, "layers": 1, "heads": 2, "ffn": 16, "vocab": 256}, "cluster": "laptop"}
    return Config.from_parts(**parts, workload={"batch": 2, "seq": 8}, data=data)


def test_data_is_checked_before_a_run(tmp_path):
    tokens = tmp_path / "tokens"
    (tmp_path / "a.txt").write_text("a line of text\n" * 10)
    prepare([tmp_path / "a.txt"], tokens, document="line", workers=1)
    check_data(config())
    check_data(config(path=str(tokens), tokenizer="bytes", validation=0.5))
    made = config(path=str(tokens))
    refused("MW-DATA-006", check_data, replace(made, model=made.model.but(vocab=255)))
    refused("MW-DATA-002", check_data, replace(made, workload=made.workload.but(seq=200)))
    refused("MW-DATA-002", check_data, config(path=str(tokens), validation=0.001))
    refused("MW-DATA-008", check_data, replace(made, model=Model(kind="mlp", hidden=16, layers=1)))
    other = tmp_path / "tokenizer.json"
    other.write_text("{}")
    refused("MW-DATA-007", check_data, config(path=str(tokens), tokenizer=str(other)))
    refused("MW-DATA-003", check_data, config(path=[str(tokens), str(tmp_path / "missing")]))


@pytest.mark.parametrize(
    "fields",
    [
        {"validation": 0.1},
        {"document_mask": True},
        {"path": "a", "weights": [1.0, 2.0]},
        {"path": ["a", "b"], "weights": [1.0, 0.0]},
        {"path": "a", "eval_every": 5},
        {"path": "a", "validation": 0.1, "validation_path": "b"},
    ],
)
def test_options_that_do_not_fit_together_are_refused(fields):
    refused("MW-DATA-008", lambda: Data(**fields))


def test_relative_paths_start_at_the_file_in_which_they_stand(tmp_path, monkeypatch):
    from meshwright.describe.config import load

    (tmp_path / "runs").mkdir()
    text = 'model = "nano"\ncluster = "laptop"\n[data]\npath = ["tokens", "/elsewhere"]\ntokenizer = "bytes"\n'
    (tmp_path / "runs" / "run.toml").write_text(text)
    made = load(tmp_path / "runs" / "run.toml").data
    assert made.path == (str(tmp_path / "runs" / "tokens"), "/elsewhere")
    assert made.tokenizer == "bytes"
    (tmp_path / "copy.toml").write_text(load(tmp_path / "runs" / "run.toml").to_toml())
    assert load(tmp_path / "copy.toml").data == made
