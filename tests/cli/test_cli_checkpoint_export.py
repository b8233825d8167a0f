"""`meshwright checkpoint convert --to huggingface`: what it prints, and options that do not fit together."""

import json

import pytest

from meshwright.cli import main
from meshwright.describe.model import Model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from meshwright.describe.sharding import parameters
    from meshwright.models import initial_value
    from meshwright.training.checkpoint.convert import write_checkpoint

    model = Model(hidden=16, layers=2, heads=2, ffn=24, vocab=20, name="tiny")
    folder = tmp_path_factory.mktemp("run") / "checkpoints" / "step-00000003"
    tensors = (
        (f"weight/{p.name}", initial_value(model, p.name, p.shape, 0)) for p in parameters(model, range(model.layers))
    )
    write_checkpoint(folder, tensors, {"step": 3, "model": model.as_dict(), "plan": {}, "workload": {}, "order": ()})
    return folder


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as leaving:
        main(["checkpoint", "convert", *map(str, arguments)])
    printed = capsys.readouterr()
    return leaving.value.code or 0, printed.out, printed.err


def test_a_folder_is_written_and_described(checkpoint, tmp_path, capsys):
    code, text, _ = run(capsys, checkpoint, "--to", "huggingface", "--dtype", "bf16", "--out", tmp_path / "a")
    assert code == 0
    assert "llama, 21 tensors in bfloat16" in " ".join(text.split())
    code, text, _ = run(capsys, checkpoint.parents[1], "--to", "huggingface", "--out", tmp_path / "b", "--json")
    assert (code, json.loads(text)["dtype"], json.loads(text)["files"]) == (0, "float32", 1)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--to", "huggingface", "--model", "nano"], "MW-CKPT-015"),
        (["--dtype", "bf16"], "MW-CKPT-015"),
        (["--to", "huggingface", "--ema"], "MW-CKPT-016"),
        (["--to", "huggingface", "--dtype", "fp8"], "MW-CKPT-017"),
        (["--to", "huggingfase"], "MW-CKPT-015"),
    ],
)
def test_options_that_do_not_fit(checkpoint, tmp_path, capsys, options, error):
    code, _, text = run(capsys, checkpoint, *options, "--out", tmp_path / "a")
    assert code == 2
    assert error in text
    assert not (tmp_path / "a").exists()
