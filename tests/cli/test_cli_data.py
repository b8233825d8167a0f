"""`meshwright data`: prepare and show, as a user calls them."""

import json

import pytest

from meshwright.cli import main


def run(capsys, *arguments, code=0):
    with pytest.raises(SystemExit) as leaving:
        main(["data", *map(str, arguments)])
    captured = capsys.readouterr()
    assert leaving.value.code == code, captured.err
    return captured.out or captured.err


def test_prepare_and_show(capsys, tmp_path):
    (tmp_path / "a.txt").write_text("first document\n\nsecond [bold]document[/]\x1b[31m\n")
    out = tmp_path / "tokens"
    options = ("--tokenizer", "bytes", "--out", out, "--document", "blank-line", "--workers", 1)
    page = run(capsys, "prepare", tmp_path / "a.txt", *options)
    assert "documents   2" in page
    assert "first document" in page
    assert "[data] path =" in page.replace("\n", " ")
    page = run(capsys, "show", out, "--verify")
    assert "second [bold]document[/]" in page  # text is not markup
    assert "\x1b[31m" not in page
    found = json.loads(run(capsys, "show", out, "--json", "--samples", 1))
    assert (found["documents"], len(found["samples"])) == (2, 1)
    (out / "tokens.bin").write_bytes((out / "tokens.bin").read_bytes()[:-1] + b"?")
    assert "MW-DATA-004" in run(capsys, "show", out, "--verify", code=2)


def test_conversations_are_prepared_and_shown(capsys, tmp_path):
    rows = [{"prompt": "12345", "completion": "ab"}, {"prompt": "x", "completion": "y"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--tokenizer", "bytes", "--out", tmp_path / "chats", "--template", "plain", "--workers", 1)
    run(capsys, "prepare", tmp_path / "a.jsonl", *options)
    assert "10.6% of the tokens" in run(capsys, "show", tmp_path / "chats", "--verify")  # 3 + 2 of 26 + 21
    refused = run(
        capsys, "prepare", tmp_path / "a.jsonl", *options[:3], tmp_path / "other", "--template", "chatml", code=2
    )
    assert "MW-DATA-018" in refused
    assert "--template plain" in refused


def test_bad_input_is_a_clear_error(capsys, tmp_path):
    missing = ("prepare", tmp_path / "missing.txt", "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert "MW-DATA-010" in run(capsys, *missing, code=2)
    assert "MW-CLI-005" in run(capsys, "prepare", tmp_path, "--out", tmp_path / "out", code=2)
    assert "MW-DATA-003" in run(capsys, "show", tmp_path, code=2)
    assert not (tmp_path / "out").exists()
