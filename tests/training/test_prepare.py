"""`data prepare`: every format, any number of workers, interruptions, and bad input."""

import json
import os
import shutil

import pytest

from meshwright.errors import MeshwrightError
from meshwright.training.data.page import contents
from meshwright.training.data.prepare import run as preparation
from meshwright.training.data.prepare.run import prepare
from meshwright.training.data.prepare.texts import Reading, source_files, texts_of
from meshwright.training.data.token_file import open_tokens

TEXTS = [f"Document {i}: " + "äé∑ words\nand lines " * (i % 7 + 1) for i in range(40)]


def jsonl(path, texts=TEXTS, field="text"):
    path.write_text("".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)))
    return path


def documents(folder):
    file = open_tokens(folder)
    return [bytes(file.tokens[a:b]).decode() for a, b in zip(file.offsets[:-1], file.offsets[1:], strict=True)]


def refused(code, *args, **options):
    with pytest.raises(MeshwrightError) as error:
        prepare(*args, **{"workers": 1, **options})
    assert error.value.code == code, error.value
    return str(error.value)


def test_json_lines_become_documents(tmp_path):
    header = prepare([jsonl(tmp_path / "a.jsonl", field="body")], tmp_path / "out", field="body", workers=1)
    assert documents(tmp_path / "out") == TEXTS
    assert (header.documents, header.dtype, header.vocabulary) == (40, "uint8", 256)
    assert header.largest_token == max(max(text.encode()) for text in TEXTS)
    assert sorted(os.listdir(tmp_path / "out")) == ["documents.bin", "header.json", "tokens.bin"]


@pytest.mark.parametrize("kind", ["file", "line", "blank-line"])
@pytest.mark.parametrize("size", [1, 7, 64, 10**6])
def test_a_text_file_cut_into_pieces_of_any_size_has_the_same_documents(tmp_path, kind, size):
    text = "\ufefffirst\n\n\nsecond line\nthird ä\r\n\r\nfourth\n  indented\n\n" + "\n" * 9 + "∑ last"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (file,) = source_files([tmp_path / "a.txt"])
    joined, whole, before = [], "", 0
    for part, ended, read, _ in texts_of(file, Reading(document=kind), size):
        assert before < read <= file.size
        before = read
        whole += part
        if ended:
            joined.append(whole)
            whole = ""
    text = text[1:]
    expected = {
        "file": [text],
        "line": [line for line in (one.strip("\r") for one in text.split("\n")) if line.strip()],
        "blank-line": ["first", "second line\nthird ä", "fourth\n  indented", "∑ last"],
    }
    assert joined == expected[kind]
    assert whole == ""


def test_the_result_does_not_depend_on_the_size_of_batches(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", TEXTS * 4)
    outs = []
    for name, size in (("one", 10**6), ("small", 300)):
        prepare([source], tmp_path / name, end_token="0", workers=1, batch=size)
        outs.append([(tmp_path / name / file).read_bytes() for file in ("tokens.bin", "documents.bin", "header.json")])
    assert outs[0] == outs[1]


@pytest.mark.parametrize("stop", [0, 1, 5])
def test_an_interrupted_preparation_continues(tmp_path, monkeypatch, stop):
    source, encoded = jsonl(tmp_path / "a.jsonl"), []
    prepare([source], tmp_path / "whole", workers=1, batch=200)
    plain = preparation.encode

    def interrupted(batch, tokenizer):
        if len(encoded) == stop:
            raise KeyboardInterrupt
        encoded.append(batch.read)
        return plain(batch, tokenizer)

    monkeypatch.setattr(preparation, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare([source], tmp_path / "out", workers=1, batch=200)
    with pytest.raises(MeshwrightError, match="not finished"):
        open_tokens(tmp_path / "out")
    partial = tmp_path / "out" / "partial"
    for name in ("tokens.bin", "documents.bin"):  # of an interruption while a batch was written
        with (partial / name).open("ab") as file:
            file.write(b"torn")
    monkeypatch.setattr(preparation, "encode", lambda *a: encoded.append(a[0].read) or plain(*a))
    prepare([source], tmp_path / "out", workers=1, batch=200)
    assert encoded == sorted(set(encoded))  # no batch was tokenized twice
    for name in ("tokens.bin", "documents.bin", "header.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not partial.exists()


def test_an_interruption_before_the_header_continues(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "a.jsonl")
    prepare([source], tmp_path / "whole", workers=1)
    plain = preparation.replace_file

    def stopped(path, text):
        if path.name == "header.json":
            raise KeyboardInterrupt
        plain(path, text)

    monkeypatch.setattr(preparation, "replace_file", stopped)
    with pytest.raises(KeyboardInterrupt):
        prepare([source], tmp_path / "out", workers=1)
    monkeypatch.undo()
    prepare([source], tmp_path / "out", workers=1)
    for name in ("tokens.bin", "documents.bin", "header.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_nothing_is_overwritten(tmp_path):
    source = jsonl(tmp_path / "a.jsonl")
    header = prepare([source], tmp_path / "out", workers=1)
    before = (tmp_path / "out" / "tokens.bin").stat().st_mtime_ns
    assert prepare([source], tmp_path / "out", workers=1) == header  # the same preparation is already there
    assert (tmp_path / "out" / "tokens.bin").stat().st_mtime_ns == before
    refused("MW-DATA-015", [source], tmp_path / "out", field="id")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    refused("MW-DATA-015", [source], tmp_path / "mine")
    assert os.listdir(tmp_path / "mine") == ["thesis.txt"]


def test_changed_sources_or_a_second_process_are_refused(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "a.jsonl")
    monkeypatch.setattr(preparation, "encode", lambda *a: refused("MW-DATA-015", [source], tmp_path / "out") and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare([source], tmp_path / "out", workers=1)
    monkeypatch.undo()
    jsonl(source, TEXTS[:5])
    assert "partial" in refused("MW-DATA-015", [source], tmp_path / "out")


def test_bad_sources_are_refused_with_their_line(tmp_path):
    out = tmp_path / "out"
    refused("MW-DATA-010", [tmp_path / "missing.txt"], out)
    (tmp_path / "folder").mkdir()
    refused("MW-DATA-010", [tmp_path / "folder"], out)
    refused("MW-DATA-010", [tmp_path / "a.jsonl"], out, document="page")
    assert not out.exists()
    for content, code, words in (
        (b'{"text": "a"}\n{"text": 3}\n', "MW-DATA-012", "a.jsonl:2: the field 'text' is a number"),
        (b'{"text": "a"}\n\n{"body": "b"}\n', "MW-DATA-012", "a.jsonl:3 has no field 'text'"),
        (b'{"text": "a"}\n[1]\n', "MW-DATA-012", "a.jsonl:2 has no field"),
        (b'{"text": "a"}\n{"text": \n', "MW-DATA-012", "a.jsonl:2 is not JSON"),
        (b'{"text": "a"}\n\xff\n', "MW-DATA-011", "a.jsonl:2 is not UTF-8"),
        (b"\n \n", "MW-DATA-017", "no text"),
    ):
        (tmp_path / "a.jsonl").write_bytes(content)
        assert words in refused(code, [tmp_path / "a.jsonl"], out)
        assert not out.exists()
    (tmp_path / "a.txt").write_bytes(b"fine\nbad \xc3( byte")
    assert "a.txt:2 is not UTF-8" in refused("MW-DATA-011", [tmp_path / "a.txt"], out)
    (tmp_path / "a.txt.gz").write_bytes(b"")
    refused("MW-DATA-010", [tmp_path / "a.txt.gz"], out)


def test_an_error_after_some_batches_keeps_them(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' * 20 + '{"txt": "x"}\n')
    assert "a.jsonl:21" in refused("MW-DATA-012", [tmp_path / "a.jsonl"], tmp_path / "out", batch=8)
    assert json.loads((tmp_path / "out" / "partial" / "done.json").read_text())["documents"] == 20


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    refused("MW-CLI-004", [jsonl(tmp_path / "a.jsonl")], tmp_path / "file" / "out")


def test_splits_of_a_dataset_folder_are_not_mixed(tmp_path):
    data = tmp_path / "dataset" / "data"
    data.mkdir(parents=True)
    jsonl(data / "train-00001.jsonl", ["c"])
    jsonl(data / "train-00000.jsonl", ["a", "b"])
    jsonl(data / "test-00000.jsonl", ["secret"])
    (data.parent / "dataset_infos.json").write_text("{}")
    assert "--split train" in refused("MW-DATA-016", [data.parent], tmp_path / "out")
    refused("MW-DATA-016", [data.parent], tmp_path / "out", split="dev")
    prepare([data.parent], tmp_path / "out", split="train", workers=1)
    assert documents(tmp_path / "out") == ["a", "b", "c"]


# Tokenizer files


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return str(path)


def test_a_tokenizer_file_closes_every_document(tmp_path, tokenizer):
    header = prepare([jsonl(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer, workers=1)
    file = open_tokens(tmp_path / "out")
    assert (header.dtype, header.vocabulary, header.end_token) == ("uint16", 300, 0)
    assert file.tokens[file.offsets[1:] - 1].tolist() == [0] * 40
    found = contents(tmp_path / "out", samples=2)
    assert found["samples"][0]["text"] == TEXTS[0] + "<|endoftext|>"
    prepare([tmp_path / "a.jsonl"], tmp_path / "none", tokenizer, end_token="none", workers=1)
    assert len(open_tokens(tmp_path / "none").tokens) == len(file.tokens) - 40


def test_a_text_file_cut_for_the_tokenizer_has_the_tokens_of_the_whole_text(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    sizes = {
        size: prepare([tmp_path / "a.txt"], tmp_path / str(size), tokenizer, workers=1, batch=size)
        for size in (150, 10**6)
    }
    assert sizes[150].hashes == sizes[10**6].hashes
    assert sizes[150].documents == 1


def test_a_file_that_is_not_a_tokenizer_is_refused(tmp_path, tokenizer):
    source = jsonl(tmp_path / "a.jsonl")
    (tmp_path / "bad.json").write_text('{"version": "1.0"}')
    refused("MW-DATA-013", [source], tmp_path / "out", str(tmp_path / "bad.json"))
    refused("MW-CONF-004", [source], tmp_path / "out", str(tmp_path / "missing.json"))
    refused("MW-DATA-013", [source], tmp_path / "out", tokenizer, end_token="<nope>")
    refused("MW-DATA-013", [source], tmp_path / "out", end_token="256")
    assert not (tmp_path / "out").exists()


# Tables


def test_parquet_and_arrow_are_read(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    table = arrow.table({"id": list(range(40)), "text": [None if i == 3 else text for i, text in enumerate(TEXTS)]})
    kept = [text for i, text in enumerate(TEXTS) if i != 3]
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    with arrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, arrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=9)
    with arrow.OSFile(str(tmp_path / "b.arrow"), "wb") as sink, arrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=9)
    for name in ("a.parquet", "a.arrow", "b.arrow"):
        prepare([tmp_path / name], tmp_path / f"{name}.out", workers=1, batch=500)
        assert documents(tmp_path / f"{name}.out") == kept
        assert "is missing" in refused("MW-DATA-012", [tmp_path / name], tmp_path / "out", field="body")
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        assert "int64, not text" in refused("MW-DATA-012", [tmp_path / name], tmp_path / "out", field="id")
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    for name in ("bad.parquet", "bad.arrow"):
        (tmp_path / name).write_bytes(b"this is not a table")
        refused("MW-DATA-010", [tmp_path / name], tmp_path / "out")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    from meshwright.training.data import tokenizer

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(tokenizer.importlib, "import_module", missing)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    assert "pip install" in refused("MW-DATA-014", [tmp_path / "a.parquet"], tmp_path / "out")
    refused("MW-DATA-014", [jsonl(tmp_path / "a.jsonl")], tmp_path / "out", "tokenizer.json")


@pytest.mark.parametrize("options", [{}, {"template": "plain"}])
def test_half_of_a_surrogate_pair_is_refused(tmp_path, options):
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud800", "prompt": "\\ud800", "completion": ""}\n')
    assert "\\ud800" in refused("MW-DATA-011", [tmp_path / "a.jsonl"], tmp_path / "out", **options)
