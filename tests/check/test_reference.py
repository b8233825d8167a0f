"""`meshwright check reference`: settings of every framework on one device, read back."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.check.reference import DEGREES, ComparedRun, ReferencePlan, edited, reference_of
from meshwright.cli import main
from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.interop.files import parse
from meshwright.interop.frameworks import FRAMEWORKS, READ_ONLY
from meshwright.interop.reading import SettingsReading, understand
from meshwright.interop.write import is_runnable, write_file
from ranks import soak

EXAMPLES = Path(__file__).parents[2] / "examples" / "settings"
LARGE = 1e18  # bytes: nothing is shrunk
ENDINGS = {"toml": ".toml", "yaml": ".yaml", "json": ".json", "args": ".sh", "python": ".py"}
PLANS = (
    {"tp": 2, "shard": 4, "zero": 3},
    {"tp": 2, "pp": 2, "replicate": 2},
    {"shard": 4, "zero": 3},
    {"shard": 4, "zero": 1},
    {"replicate": 4},
    {"cp": 2, "shard": 2, "zero": 3, "cp_kind": "all-gather"},
)
BATCH_IN_SCRIPT = {"accelerate", "verl", "nemo-rl"}
A, TRAIN = "actor_rollout_ref.actor.", "train_module."
READ: dict[str, dict[str, Any]] = {  # of frameworks that are only read: settings for 8 devices
    "torchtune": {"model._component_": "torchtune.models.llama3_1.llama3_1_8b", "tensor_parallel_dim": 2, "batch_size": 2,
                  "gradient_accumulation_steps": 3, "tokenizer.max_seq_len": 512, "dtype": "bf16"},
    "picotron": {"distributed.tp_size": 2, "distributed.pp_size": 2, "distributed.dp_size": 2, "distributed.pp_engine": "1f1b",
                 "training.micro_batch_size": 2, "training.gradient_accumulation_steps": 4, "training.seq_length": 512, "model.dtype": "bfloat16"},
    "gpt-neox": {"model_parallel_size": 2, "pipe_parallel_size": 2, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
                 "seq_length": 512,
                 "num_layers": 8, "hidden_size": 256, "num_attention_heads": 8, "zero_optimization.stage": 1, "precision": "bfloat16"},
    "nemo-1": {"trainer.devices": 8, "trainer.num_nodes": 1, "trainer.precision": "bf16", "model.tensor_model_parallel_size": 2,
               "model.pipeline_model_parallel_size": 2, "model.micro_batch_size": 2, "model.global_batch_size": 16, "model.encoder_seq_length": 512,
               "model.num_layers": 8, "model.hidden_size": 256, "model.num_attention_heads": 8, "model.optim.name": "distributed_fused_adam"},
    "ms-swift": {"model": "meta-llama/Llama-3.1-8B", "tuner_type": "full", "max_length": 512, "per_device_train_batch_size": 2,
                 "gradient_accumulation_steps": 3, "torch_dtype": "bfloat16", "NPROC_PER_NODE": 8},
    "levanter": {"trainer.train_batch_size": 48, "trainer.per_device_parallelism": 2, "trainer.model_axis_size": 2, "model.seq_len": 512,
                 "trainer.mp": "p=f32,c=bfloat16"},
    "olmo-core": {"SEQUENCE_LENGTH": 512, "GLOBAL_BATCH_SIZE": 512 * 48, f"{TRAIN}rank_microbatch_size": 1024, f"{TRAIN}dp_config.name": "fsdp",
                  f"{TRAIN}tp_config.degree": 2, f"{TRAIN}dp_config.param_dtype": "bfloat16"},
    "verl": {f"{A}megatron.tensor_model_parallel_size": 2, f"{A}strategy": "megatron", f"{A}ppo_micro_batch_size_per_gpu": 2,
             "trainer.n_gpus_per_node": 8, "trainer.nnodes": 1},
    "nemo-rl": {"policy.dtensor_cfg.tensor_parallel_size": 2, "policy.max_total_sequence_length": 512, "policy.train_micro_batch_size": 2,
                "cluster.gpus_per_node": 8, "cluster.num_nodes": 1},
}  # fmt: skip


def settings_file(name: str, folder: Path, plan: dict[str, Any]) -> tuple[Path, int]:
    """Settings of a framework for a plan of llama3-8b, if it runs the plan."""
    framework = FRAMEWORKS[name]
    layout = Plan(**plan, microbatch=2)
    workload = Workload(batch=layout.dp * 2 * 4, seq=512, precision="bf16")
    cluster = catalog.load("clusters", CLUSTER).with_gpus(layout.world)
    config = Config(
        catalog.load("models", "llama3-8b"), cluster, layout, workload, catalog.load("stacks", framework.stack)
    )
    if not is_runnable(config, framework, layout):
        pytest.skip(f"{name} does not run it")
    path = folder / f"settings{ENDINGS[framework.form]}"
    write_file(config, framework, path)
    return path, layout.world


CLUSTER = "dgx-h100"


def read_back(plan: ReferencePlan, run: ComparedRun, folder: Path, model: str = "llama3-8b") -> SettingsReading:
    """The text of a run as it is read from a file."""
    folder.mkdir(exist_ok=True)
    (folder / run.file).write_text(run.text)
    return understand(plan.framework, *parse(folder / run.file)[:2], gpus=run.world, model=model)


def same_training(plan: ReferencePlan, one: SettingsReading, source: SettingsReading) -> None:
    """One device, the same global batch, sequence and precision; the batch may be left to the script."""
    assert [getattr(one.plan, axis) for axis in DEGREES] == [1] * len(DEGREES)
    assert one.workload.seq == source.workload.seq
    assert (one.workload.precision, one.plan.param_dtype) == (source.workload.precision, source.plan.param_dtype)
    left = plan.framework.name in BATCH_IN_SCRIPT
    if not left:
        assert (one.workload.batch, one.plan.microbatch) == (source.workload.batch, source.plan.microbatch)
    assert any("micro-batches" in row or row == "the same batch" for row in plan.reference.by_hand) is left


def used(plan: Plan) -> set[str]:
    """The axes above 1; data parallelism is one."""
    return {{"replicate": "dp", "shard": "dp"}.get(axis, axis) for axis in DEGREES if getattr(plan, axis) > 1}


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", list(FRAMEWORKS))
def test_settings_for_one_device(name: str, plan: dict[str, Any], tmp_path: Path) -> None:
    path, world = settings_file(name, tmp_path, plan)
    source = understand(FRAMEWORKS[name], *parse(path)[:2], gpus=world, model="llama3-8b")
    result = reference_of(path, gpus=world, model="llama3-8b", memory=LARGE)
    assert not result.candidate.changes
    same_training(result, read_back(result, result.reference, tmp_path / "out"), source)


@pytest.mark.parametrize("plan", [*PLANS[:2], *soak(list(PLANS[2:]))], ids=str)
@pytest.mark.parametrize("name", list(FRAMEWORKS))
def test_a_large_model_is_shrunk_in_both_runs(name: str, plan: dict[str, Any], tmp_path: Path) -> None:
    path, world = settings_file(name, tmp_path, plan)
    result = reference_of(path, gpus=world, model="llama3-8b", memory=1e9)
    one, many = (read_back(result, run, tmp_path / "out") for run in (result.reference, result.candidate))
    assert used(many.plan) == used(Plan(**plan))
    assert not used(one.plan)
    assert result.candidate.world <= 8
    if "workload.batch" not in result.framework.left_to_script:
        assert one.workload == many.workload
    said = not result.reference.by_hand
    assert (one.shape.model.hidden < 4096) is said or any(
        "a model with hidden" in row for row in result.reference.by_hand
    )
    assert "shrunk" in result.text()


def test_every_framework_with_a_writer_has_a_case(tmp_path: Path) -> None:
    for name in FRAMEWORKS:
        cases = 0
        for plan in PLANS:
            try:
                settings_file(name, tmp_path, plan)
                cases += 1
            except pytest.skip.Exception:
                continue
        assert cases, name


@pytest.mark.parametrize("name", list(READ))
def test_settings_that_are_only_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(READ[name]))
    result = reference_of(path, framework=READ_ONLY[name], gpus=8, memory=LARGE)
    source = understand(READ_ONLY[name], *parse(path)[:2], gpus=8)
    same_training(result, read_back(result, result.reference, tmp_path / "out", ""), source)


def test_a_script_keeps_its_form(tmp_path: Path) -> None:
    result = reference_of(EXAMPLES / "megatron-llama3-8b.sh", memory=LARGE)
    text = result.reference.text
    assert text.startswith("#!/bin/bash")
    assert "--tokenizer-type HuggingFaceTokenizer\n)" in text
    assert "--nnodes 1 --nproc-per-node 1 pretrain_gpt.py ${MODEL[@]} ${PLAN[@]}" in text
    assert "--sequence-parallel" not in text
    assert result.reference.command == "bash reference.sh"
    assert any("--sequence-parallel" in row and row.startswith("remove") for row in result.reference.changes)
    same_training(
        result,
        read_back(result, result.reference, tmp_path, ""),
        understand(result.framework, *parse(EXAMPLES / "megatron-llama3-8b.sh")[:2]),
    )


def test_flags_are_changed_in_place() -> None:
    script = 'run --tp=8 --tp-comm 3 \\\n  --name "a b" --sp \\\n  --last 1\n'
    changes = {"--tp": ("8", 1), "--name": ("a b", "c"), "--sp": (True, None), "--new": (None, True)}
    assert edited(script, changes) == "run --new --tp 1 --tp-comm 3 \\\n  --name c  \\\n  --last 1\n"


def test_deepspeed_keeps_its_numerics() -> None:
    """Without ZeRO it accumulates gradients in 16 bits."""
    settings = reference_of(EXAMPLES / "deepspeed-zero3.json", gpus=64).reference.settings
    assert settings["zero_optimization.stage"] == 1
    assert settings["train_batch_size"] == 256
    assert settings["gradient_accumulation_steps"] == 64


def test_what_is_left_to_the_script_is_listed(tmp_path: Path) -> None:
    path, world = settings_file("accelerate", tmp_path, {"shard": 4, "zero": 3})
    assert (
        "4 times as many accumulated micro-batches, of the same size"
        in reference_of(path, gpus=world).reference.by_hand
    )


def test_a_model_that_the_settings_do_not_state_is_a_file_or_a_name(tmp_path: Path) -> None:
    path, world = settings_file("accelerate", tmp_path, {"shard": 4, "zero": 3})
    shape = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **shape})
    )
    notes = reference_of(path, gpus=world, model=str(tmp_path / "config.json")).notes
    assert any("on one device it needs about" in note for note in notes)
    with pytest.raises(MeshwrightError, match="nonsense"):
        reference_of(path, gpus=world, model="nonsense")


def test_files_and_commands_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["check", "reference", str(EXAMPLES / "megatron-llama3-8b.sh"), "--out", str(tmp_path / "a" / "b")])
    assert not leaving.value.code
    assert {file.name for file in (tmp_path / "a" / "b").iterdir()} == {"reference.sh", "candidate.sh", "README.txt"}
    shown = capsys.readouterr().out
    assert f"check record --out one --perturbed 2 -- bash {tmp_path}/a/b/reference.sh" in shown
    assert f"check record --out many -- bash {tmp_path}/a/b/candidate.sh" in shown
    unchanged = reference_of(EXAMPLES / "deepspeed-zero3.json", gpus=64).candidate
    assert unchanged.command.endswith(str(EXAMPLES / "deepspeed-zero3.json"))


def test_bad_input_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(
        json.dumps(
            {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}
        )
    )
    with pytest.raises(MeshwrightError, match="MW-REF-001"):
        reference_of(tmp_path / "one.json")
    path, world = settings_file("megatron-lm", tmp_path, {"tp": 2, "pp": 2, "replicate": 2, "cp": 2})
    with pytest.raises(MeshwrightError, match="MW-REF-002"):
        reference_of(path, gpus=world, memory=1e9)


def test_every_framework_that_is_read_has_a_case() -> None:
    assert set(READ) == set(READ_ONLY)
