"""`meshwright migrate` on the command line: settings, lists, refusals and bad input."""

import json
import tomllib
from pathlib import Path

import pytest

from meshwright.cli import main

SCRIPT = """
ARGS=(
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 --swiglu --disable-bias-linear
    --group-query-attention --num-query-groups 8 --untie-embeddings-and-output-weights --normalization RMSNorm --position-embedding-type rope
    --tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 1 --global-batch-size 64 --seq-length 4096 --bf16
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --use-distributed-optimizer --overlap-grad-reduce --lr 3e-4 --moe-permute-fusion --save checkpoints
)
torchrun pretrain_gpt.py ${ARGS[@]}
"""
ZERO = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 500000000},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5}},
}


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as leaving:
        main(["migrate", *words])
    captured = capsys.readouterr()
    return int(leaving.value.code or 0), captured.out, captured.err


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture
def zero(tmp_path: Path) -> str:
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(ZERO))
    return str(path)


def test_a_refusal_offers_a_change_that_is_then_written(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    """torchtitan has no ZeRO-1; it names the model, which the script describes by its sizes."""
    code, out, err = run(capsys, "megatron-lm", "torchtitan", script, "--gpus", "16")
    assert (code, out) == (1, "")
    assert "MW-PLAN-023" in err
    assert "--set plan.zero=3" in err
    code, out, err = run(capsys, "megatron-lm", "torchtitan", script, "--gpus", "16", "--set", "plan.zero=3")
    assert code == 0
    settings = tomllib.loads(out)
    assert settings["parallelism"]["tensor_parallel_degree"] == 2
    assert settings["parallelism"]["data_parallel_shard_degree"] == 8
    assert settings["model"] == {"name": "llama3", "flavor": "8B"}
    assert (settings["training"]["global_batch_size"], settings["training"]["seq_len"]) == (64, 4096)
    assert settings["activation_checkpoint"]["mode"] == "full"
    assert settings["optimizer"]["lr"] == 3e-4
    carried, _, rest = err.partition("lost or changed")
    assert "--tensor-model-parallel-size" in carried
    assert "--use-distributed-optimizer" in rest
    assert "not about the plan: --save" in rest


def test_what_the_script_sets_is_listed_as_lost(zero: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "accelerate.yaml"
    code, text, err = run(capsys, "auto", "accelerate", zero, "--gpus", "16", "--out", str(out), "--json")
    assert (code, err) == (0, "")
    result = json.loads(text)
    assert result["from"] == "deepspeed"
    assert out.read_text() == result["text"]
    assert result["settings"]["distributed_type"] == "FSDP"
    lost = {key["key"]: key["target"] for key in result["lost"]}
    assert lost["train_batch_size"] == "the training script sets it"
    assert "zero_optimization.reduce_bucket_size" in lost
    assert {"zero_optimization.stage", "bf16.enabled"} <= {key["key"] for key in result["carried"]}


def test_a_refusal_as_json(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = run(capsys, "auto", "accelerate", script, "--gpus", "16", "--json")
    assert code == 1
    result = json.loads(text)
    assert result["text"] is None
    assert result["not_runnable"]["code"] == "MW-PLAN-023"
    assert result["not_runnable"]["fix"].startswith("--set plan.zero=3")


def test_bad_input_is_an_error_of_the_usual_shape(
    script: str, zero: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "empty.yaml": b"",
        "empty.sh": b"",
        "binary.json": b"\x00\xff\xfe",
        "broken.py": b"def (:",
        "nul.py": b"x = '\0'",
        "list.json": b"[1]",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for words, code in (
        (("megatron", "torchtitan", script), "MW-SET-012"),
        (("auto", "torchtitn", script), "MW-SET-012"),
        (("auto", "ms-swift", script), "MW-SET-012"),  # is read, not written
        (("nanotron", "torchtitan", zero), "MW-SET-010"),
        (("auto", "torchtitan", "none.toml"), "MW-CONF-004"),
        (("auto", "torchtitan", str(tmp_path)), "MW-CONF-004"),
        *((("auto", "torchtitan", str(tmp_path / name)), "MW-") for name in files),
        (("auto", "torchtitan", script), "MW-SET-015"),
        (("auto", "torchtitan", script, "--gpus", "16", "--set", "plan.zer=3"), "MW-CONF"),
        (("auto", "megatron-lm", zero, "--gpus", "16"), "MW-SET-013"),
        (("auto", "accelerate", zero, "--gpus", "16", "--out", str(tmp_path / "x.sh")), "MW-SET-014"),
        (("auto", "accelerate", zero, "--gpus", "16", "--out", str(tmp_path / "no" / "x.yaml")), "MW-CLI-004"),
    ):
        result, _, err = run(capsys, *words)
        assert result == (1 if code == "MW-SET-013" else 2), words
        assert err.startswith(code), (words, err)
        assert "Traceback" not in err
    assert "looks like settings of DeepSpeed" in run(capsys, "nanotron", "torchtitan", zero)[2]
