"""Settings of other frameworks on the command line: estimate, lint, plan --compare, plan --for --write, lint --recipes."""

import json
import tomllib
from pathlib import Path

import pytest

from meshwright.cli import main

TITAN = """
[job]
dump_folder = "out"
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "full"
[compile]
enable = true
"""
SCRIPT = """
#!/bin/bash
TP=2  # tensor parallelism
ARGS=(
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 --swiglu
    --group-query-attention --num-query-groups 8 --vocab-size 128256 --untie-embeddings-and-output-weights
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP:-2}
    --micro-batch-size 1 --global-batch-size 64 --seq-length 4096 --bf16 --use-distributed-optimizer
)
torchrun pretrain_gpt.py ${ARGS[@]} --log-interval 10
"""


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as leaving:
        main(list(words))
    return int(leaving.value.code or 0), capsys.readouterr().out


def document(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    code, text = run(capsys, *words, "--json")
    assert code in (0, 1), text
    return json.loads(text)


@pytest.fixture
def titan(tmp_path: Path) -> str:
    path = tmp_path / "titan.toml"
    path.write_text(TITAN)
    return str(path)


def test_estimate_reads_settings_and_lists_their_keys(capsys, titan) -> None:
    found = document(capsys, "estimate", titan, "--cluster", "dgx-h100", "--gpus", "16")
    assert found["plan"] == {"shard": 8, "tp": 2, "sp": True, "zero": 3, "recompute": "full", "overlap": ["dp"]}
    settings = found["settings"]
    assert settings["framework"] == "torchtitan"
    assert settings["understood"]["parallelism.tensor_parallel_degree"] == 2
    assert settings["no_effect"] == ["job.dump_folder"]
    assert settings["unknown"] == []
    assert settings["assumed"] == ["batch: 8", "no overlap of tp: the framework's default"]


def test_a_script_of_flags_is_a_plan(capsys, tmp_path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    found = document(capsys, "estimate", "--plan", str(path), "--cluster", "dgx-h100", "--gpus", "16")
    assert found["plan"] == {"shard": 4, "tp": 2, "pp": 2, "zero": 1, "overlap": [], "prefetch": False}
    assert found["settings"]["framework"] == "Megatron-LM"


def test_lint_explains_degrees_that_do_not_multiply(capsys, titan) -> None:
    code, text = run(capsys, "lint", titan, "--cluster", "dgx-h100", "--gpus", "9")
    assert code == 1
    assert "MW-SET-001" in text
    assert "does not divide 9 GPUs" in text


def test_estimate_of_contradictory_settings_is_an_error(capsys, titan) -> None:
    code, text = run(capsys, "estimate", titan, "--cluster", "dgx-h100", "--gpus", "9", "--json")
    assert code == 2
    assert json.loads(text)["error"]["code"] == "MW-SET-001"


def test_settings_without_a_shape_ask_for_the_model(capsys, tmp_path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 16, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}))
    _, text = run(capsys, "estimate", str(path), "--cluster", "dgx-h100", "--gpus", "8", "--json")
    error = json.loads(text)["error"]
    assert error["code"] == "MW-SET-013"
    assert f"meshwright estimate MODEL --plan {path}" in error["fix"]
    assert "--set model.layers=N" in error["fix"]
    found = document(capsys, "estimate", "llama3-8b", "--plan", str(path), "--cluster", "dgx-h100", "--gpus", "8")
    assert found["plan"]["zero"] == 2


def test_plan_for_a_framework_writes_its_settings_and_compares(capsys, titan, tmp_path) -> None:
    out = tmp_path / "best.toml"
    words = ("llama3-8b", "--cluster", "dgx-h100", "--gpus", "8", "--batch", "64", "--seq", "8192")
    found = document(capsys, "plan", *words, "--for", "torchtitan", "--write", str(out), "--compare", titan)
    assert found["runs_in"] == "torchtitan"
    assert found["compare"]["legal"]
    assert found["settings"]["framework"] == "torchtitan"
    best = found["plans"][0]["plan"]
    again = document(capsys, "estimate", "llama3-8b", "--plan", str(out), "--cluster", "dgx-h100", "--gpus", "8")
    same = {name: value for name, value in best.items() if name not in ("bucket", "grad_dtype")}
    assert {name: value for name, value in again["plan"].items() if name in same} == same


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("plan", "llama3-8b", "--for", "nothing"), "MW-SET-012"),
        (("plan", "llama3-8b", "--write", "x.toml"), "MW-CLI-003"),
        (("lint",), "MW-CLI-003"),
        (("estimate", "missing.yaml"), "MW-CONF-004"),
    ],
)
def test_bad_requests(capsys, words, code) -> None:
    _, text = run(capsys, *words, "--json")
    assert json.loads(text)["error"]["code"] == code


@pytest.mark.parametrize(
    ("name", "text"), [("a.yaml", "- 1"), ("a.yaml", "{"), ("b.sh", "echo hello"), ("c.yaml", "a: 1\nb: 2")]
)
def test_files_that_are_no_settings(capsys, tmp_path, name, text) -> None:
    path = tmp_path / name
    path.write_text(text)
    _, out = run(capsys, "estimate", str(path), "--json")
    assert json.loads(out)["error"]["code"] == "MW-SET-010"


def test_recipes_print_one_object_per_line(capsys, tmp_path) -> None:
    path = tmp_path / "two.jsonl"
    good = {"id": "a", "framework": "torchtitan", "settings": {"training.seq_len": 64, "training.local_batch_size": 1}}
    bad = {**good, "id": "b", "gpus": 6, "settings": {**good["settings"], "parallelism.tensor_parallel_degree": 4}}
    path.write_text(json.dumps(good) + "\n" + json.dumps(bad) + "\n")
    code, text = run(capsys, "lint", "--recipes", str(path), "--json")
    first, second = map(json.loads, text.splitlines())
    assert code == 0
    assert list(first) == ["id", "read", "unknown", "legal", "fits", "slow", "findings"]
    assert (first["id"], first["read"], first["legal"], first["fits"]) == ("a", True, True, None)
    assert second["legal"] is False
    code, text = run(capsys, "lint", "--recipes", str(path))
    assert "torchtitan" in text
    assert "MW-SET-001" in text


def test_yaml_without_its_library_says_what_to_install(capsys, tmp_path, monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "yaml", None)
    path = tmp_path / "a.yaml"
    path.write_text("parallelism:\n  tp: 2\n")
    _, out = run(capsys, "estimate", str(path), "--json")
    assert json.loads(out)["error"]["code"] == "MW-SET-011"


def test_our_own_trainer_is_a_framework_to_plan_for(capsys, tmp_path):
    best, narrow = tmp_path / "best.toml", ["plan", "nano", "--batch", "16", "--seq", "64", "--without", "pp,cp"]
    for cluster, stack in (("dgx-h100", "meshwright"), ("laptop", "gloo-cpu")):
        found = document(capsys, *narrow, "--cluster", cluster, "--for", "Meshwright", "--out", str(best))
        assert found["runs_in"] == "Meshwright's own trainer"
        assert f'stack = "{stack}"' in best.read_text()
    _, refused = run(capsys, *narrow, "--cluster", "laptop", "--for", "meshwright", "--write", "x.toml", "--json")
    assert json.loads(refused)["error"]["fix"] == "--out x.toml"
    _, unknown = run(capsys, *narrow, "--cluster", "laptop", "--for", "none", "--json")
    assert "meshwright" in json.loads(unknown)["error"]["valid"]


@pytest.mark.parametrize("command", [["plan"], ["estimate"], ["verify"]])
def test_a_folder_in_place_of_a_plan_names_the_file_in_it(command, capsys, tmp_path):
    code, text = run(capsys, *command, str(tmp_path), "--json")
    error = json.loads(text)["error"]
    assert (code, error["code"], error["what"]) == (2, "MW-CONF-004", f"'{tmp_path}' is a folder")
    (tmp_path / "plan.toml").touch()
    _, text = run(capsys, *command, str(tmp_path), "--json")
    assert json.loads(text)["error"]["fix"] == str(tmp_path / "plan.toml")


MEGATRON = "torchrun pretrain_gpt.py --num-layers 12 --hidden-size 2048 --num-attention-heads 16 --tensor-model-parallel-size 8 "
MEGATRON += "--micro-batch-size 1 --global-batch-size 64 --seq-length 2048 --bf16"


def test_what_a_script_does_not_say_of_its_model_is_named_and_may_be_set(capsys, tmp_path):
    path = tmp_path / "train.sh"
    path.write_text(MEGATRON)
    words = ["estimate", str(path), "--cluster", "dgx-h100", "--gpus", "64"]
    error = json.loads(run(capsys, *words, "--json")[1])["error"]
    assert error["what"].endswith("model.vocab")
    assert error["fix"].startswith("--set model.vocab=N, or ")
    found = document(capsys, *words, "--set", "model.vocab=50304")
    assert found["plan"] | {"tp": 8, "replicate": 8} == found["plan"]
    assert found["parameters"] > 50304 * 2048


def test_settings_of_megatron_switch_on_the_overlap_that_its_stack_is_predicted_with(capsys, tmp_path):
    path = tmp_path / "best.sh"
    asked = ["plan", "gpt3-2.7b", "--cluster", "dgx-a100", "--nodes", "2", "--batch", "64", "--seq", "1024"]
    asked += ["--for", "megatron-lm", "--without", "cp,pp", "--write", str(path)]
    every = {"--overlap-grad-reduce", "--overlap-param-gather", "--tp-comm-overlap"}
    for fixed, expected in (
        (["tp=8", "sp=true", "zero=1"], every),
        (["tp=1", "zero=0"], {"--overlap-grad-reduce"}),
        (["tp=8", "sp=true", "zero=1", "overlap=tp"], {"--tp-comm-overlap"}),
    ):
        document(capsys, *asked, *(word for f in fixed for word in ("--fix", f)))
        assert every & {line.split()[0] for line in path.read_text().splitlines()} == expected, fixed


@pytest.mark.parametrize(("tp", "asynchronous"), [(1, False), (2, True)])
def test_settings_of_torchtitan_switch_on_what_its_stack_is_predicted_with(tp, asynchronous, capsys, tmp_path):
    path = tmp_path / "best.toml"
    asked = ["plan", "llama3-8b", "--cluster", "dgx-h100", "--nodes", "1", "--batch", "32", "--without", "cp,pp"]
    document(capsys, *asked, "--fix", f"tp={tp}", "--for", "torchtitan", "--write", str(path))
    written = tomllib.loads(path.read_text())
    assert written["compile"]["enable"]
    assert written["parallelism"].get("enable_async_tensor_parallel", False) == asynchronous
