"""Recordings of training scripts under the frameworks of the test environments: one process for each environment (drivers/record_server.py)."""

import atexit
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from environments import HERE, ROOT, python_of

SECONDS = 180.0  # for one run
TRAINING = HERE / "training"
# By script: its environment, and what the process imports before its first job.
SCRIPTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "torch_native": ("", ("torch.distributed.tensor.parallel", "torch.distributed.fsdp")),
    "torch_pipeline": ("", ("torch.distributed.tensor.parallel", "torch.distributed.fsdp")),
    "deepspeed_engine": ("deepspeed", ("deepspeed", "deepspeed.pipe")),
    "accelerate_loop": ("accelerate", ("accelerate",)),
    "hf_trainer": ("accelerate", ("accelerate", "transformers.trainer", "transformers.models.llama.modeling_llama")),
    "lightning_fit": ("lightning", ("lightning",)),
    "titan": ("torchtitan-0_2", ("torchtitan.models.llama3.infra.parallelize",)),
    "megatron_gpt": ("megatron-core-0_16", ("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.optimizer")),
}


class Server:
    """A process of an environment that runs jobs one after the other."""

    def __init__(self, environment: str, preload: tuple[str, ...]) -> None:
        python, self.missing = python_of(environment) if environment else (sys.executable, "")
        if self.missing:
            return
        variables = {k: v for k, v in os.environ.items() if k not in ("PYTEST_CURRENT_TEST", "PYTHONPATH")}
        variables |= {
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            "PYTHONWARNINGS": "ignore",
        }
        words = [python, str(HERE / "drivers" / "record_server.py"), *preload]
        self.process = subprocess.Popen(
            words,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if not os.environ.get("SHOW") else None,
            text=True,
        )
        atexit.register(self.close)

    def run(self, job: dict[str, Any]) -> list[int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(
                f"the process of the environment ended: {self.process.stderr and self.process.stderr.read()[-3000:]}"
            )
        codes: list[int] = json.loads(answer)
        return codes

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


@cache
def server_of(environment: str, preload: tuple[str, ...]) -> Server:
    return Server(environment, preload)


@dataclass(frozen=True)
class Training:
    """A run of a script: its words, on so many ranks."""

    script: str
    words: str = ""
    world: int = 1
    environment: str = ""  # if not the script's usual one

    def record(self, out: Path, perturb: int = 0, unit: float = 0.0, limit: float = 2e9) -> Path:
        """The folder of the recording."""
        return self.run(out, "record", {"out": str(out), "steps": 2, "limit": limit, "perturb": perturb, "unit": unit})

    def watch(self, out: Path, steps: int) -> dict[str, Any]:
        """The report of a training whose every step but the first is checked."""
        self.run(out, "watch", {"out": str(out), "every": 1}, {"STEPS": str(steps)})
        about: dict[str, Any] = json.loads((out / "watch.json").read_text())
        return about

    def run(self, out: Path, attached: str, arguments: dict[str, Any], variables: dict[str, str] | None = None) -> Path:
        """Run the script under the recorder or the watch; an assertion fails with what the ranks wrote if one of them failed."""
        environment, preload = SCRIPTS[self.script]
        server = server_of(self.environment or environment, preload)
        if server.missing:
            import pytest

            pytest.skip(server.missing)
        out.mkdir(parents=True, exist_ok=True)
        log = out / "output.txt"
        codes = server.run(
            {
                "script": str(TRAINING / f"{self.script}.py"),
                "words": self.words.split(),
                "world": self.world,
                "attached": attached,
                "arguments": arguments,
                "variables": variables or {},
                "log": str(log),
                "seconds": SECONDS,
            }
        )
        assert not any(codes), f"{self} ended with {codes}\n{log.read_text()[-3000:]}"
        return out


@cache
def reference_of(training: Training, perturbed: int, folder: Path) -> Path:
    """One device's recording, and its repetitions with perturbed weights."""
    from meshwright.check.start import unit_of

    out = training.record(folder)
    for seed in range(1, perturbed + 1):
        training.record(out / f"perturbed-{seed}", seed, unit_of(out))
    return out
