"""Drawn command lines and damaged files for `tests/cli/test_cli_fuzz.py`.

A case is a command with its options and values of any kind, and files that are good, damaged or hostile. What would start ranks, serve,
or make namespaces is stopped right before it does (`stop_before_work`): the arguments and the files are what is tested.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import MeshwrightError

ROOT = Path(__file__).parents[1]
DOCUMENTED = {0, 1, 2, 3}
WORDS = ("", "0", "1", "2", "8", "-1", "1e999", "nan", "1e400s", "99999999999999999999", "x", "--", "é✓\u202e", "a" * 3000, "../..", "/dev/null",
         "plan.tp=2", "plan.tp=", "=", "a.b.c=1", "plan.tp=[1,2", "model.router.capacity=1e400", "cluster.levels=[]", "workload.batch=0",
         "nano", "tiny", "laptop", "dgx-h100", "llama3-8b", "1f1b", "ring", "5%", "10GB/s", "1h", "2M$", "\x00", "\x1b[31m", "%s",
         "{}", "$(x)")  # fmt: skip
TOML = """model = "nano"
cluster = "laptop"
stack = "gloo-cpu"
[workload]
batch = 16
seq = 64
precision = "fp32"
[plan]
replicate = 2
tp = 2
microbatch = 4
"""
SETTINGS = {
    "titan.toml": '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 8192\n[parallelism]\ntensor_parallel_degree = 2\n',
    "ds.json": '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}',
    "accelerate.yaml": "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n",
    "megatron.sh": "torchrun pretrain_gpt.py --tensor-model-parallel-size 8 --num-layers 32 --hidden-size 4096 --num-attention-heads 32\n",
    "config.json": '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}',
    "recipes.jsonl": '{"id": "a", "framework": "torchtitan", "settings": {"parallelism.tensor_parallel_degree": 3}}\n',
    "bench.json": '{"version": 1, "points": [{"operation": "all-reduce", "ranks": 2, "bytes": 1024, "seconds": 1e-4}]}',
    "faults.json": '[{"kind": "kill", "rank": 1, "step": 20}]',
}  # fmt: skip


def write_files(folder: Path, draw: random.Random) -> list[str]:
    """Good files and damaged copies of each, of every format that a command reads; their names."""
    good = {"plan.toml": TOML, **SETTINGS}
    run = {"run/plan.toml": TOML, "run/prediction.json": "{}", "run/run.json": '{"version": 1, "attempts": []}'}
    run |= {
        "run/steps.jsonl": '{"step": 0, "loss": 1.5, "seconds": 0.1}\n' * 5,
        "run/events.jsonl": '{"time": 1, "kind": "fault"}\n',
    }
    names = []
    for name, text in {**good, **run}.items():
        for version in ("", "bad-", "worse-"):
            path = (
                folder / Path(name).parent / (version + Path(name).name)
                if "/" not in name
                else folder / (version + name)
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode() if not version else damaged(text.encode(), draw))
            names.append(str(path.relative_to(folder)))
    (folder / "tokens").mkdir(exist_ok=True)
    (folder / "tokens" / "header.json").write_bytes(damaged(b'{"version": 1, "dtype": "uint8", "tokens": 4}', draw))
    (folder / "tokens" / "tokens.bin").write_bytes(bytes(range(4)))
    return [*names, "run", "bad-run", "worse-run", "tokens", "missing.toml", "missing"]


def damaged(data: bytes, draw: random.Random) -> bytes:
    """The bytes of a file after one to four accidents."""
    out = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(out) + 1)
        match draw.randrange(7):
            case 0:
                del out[at : at + draw.randint(1, 40)]
            case 1:
                out[at:at] = bytes(draw.randrange(256) for _ in range(draw.randint(1, 8)))
            case 2:
                out[at:at] = draw.choice(WORDS).encode("utf-8", "surrogatepass")
            case 3:
                out[at:at] = draw.choice(
                    (b"[" * 500, b"{" * 500, b'{"a":' * 300, b"\xff\xfe", b"\x00" * 10, b"- " * 200, b"&a [*a]")
                )
            case 4:
                out = out[:at]
            case 5 if out:
                out[at % len(out)] ^= 1 << draw.randrange(8)
            case _:
                out += draw.choice(
                    (
                        b"\n[plan]\ntp = 1e400\n",
                        b"\nx = 1979-05-27\n",
                        b'\n[cluster]\nextends = "bad-plan.toml"\n',
                        b"9" * 500,
                    )
                )
    return bytes(out)


class Stopped(BaseException):
    """A command has got as far as the work that a fuzz does not do."""


def stop_before_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: Any, **named: Any) -> Any:
        raise SystemExit(0)

    def no_rights() -> None:
        raise MeshwrightError("MW-EMU-001", "no permission to make network namespaces")

    monkeypatch.setattr("meshwright.proof.prove.prove", stop)
    monkeypatch.setattr("meshwright.training.run.run_training", stop)
    monkeypatch.setattr("meshwright.training.measure.calibration.machine_measurement", stop)
    monkeypatch.setattr("meshwright.training.dry_run.dry_run", stop)
    monkeypatch.setattr("meshwright.cli.bench.measure", stop, raising=False)
    monkeypatch.setattr("meshwright.training.launch.local.run", stop)
    monkeypatch.setattr("meshwright.web.serve.serve", stop)
    monkeypatch.setattr("meshwright.view.watch.watch_run", stop)
    monkeypatch.setattr("webbrowser.open", stop)
    monkeypatch.setattr("meshwright.calibrate.runs.accuracy.runs", list)  # thousands of predictions
    monkeypatch.setattr("meshwright.calibrate.runs.accuracy.failed", list)
    for module in ("system", "emulation", "ranks"):
        monkeypatch.setattr(f"meshwright.comm.emulate.{module}.check_rights", no_rights, raising=False)


def cases(seed: int, files: list[str], words: dict[str, list[str]]) -> Iterator[list[str]]:
    """Command lines without end. `words` are the commands and options that completion offers."""
    draw = random.Random(seed)
    paths = [path for path in words if path and not path.startswith("--")]
    while True:
        path = draw.choice(paths)
        line = path.split()
        for _ in range(draw.randint(0, 5)):
            flags = [word for word in words[path] if word not in ("--help", "--watch")]
            if flags and draw.random() < 0.6:
                line.append(draw.choice(flags))
            line.append(draw.choice(files) if draw.random() < 0.55 else draw.choice(WORDS))
        if path in ("plan", "estimate") and draw.random() < 0.8:  # a search that ends soon
            line += [
                "--cluster",
                draw.choice(("laptop", "dgx-h100", "bad-plan.toml")),
                "--gpus",
                draw.choice(("2", "8", "7", "-1", "10000000000")),
            ]
        yield line


def readable(line: list[str]) -> str:
    return json.dumps(line)[:400]
