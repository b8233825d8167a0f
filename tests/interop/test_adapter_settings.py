"""Settings of LoRA and QLoRA become `[adapter]` of a plan, and are written from it."""

from typing import Any

import pytest

from meshwright.describe.adapter import Adapter
from meshwright.describe.config import configure
from meshwright.errors import MeshwrightError
from meshwright.interop.files import read_settings
from meshwright.interop.frameworks import FRAMEWORKS, READABLE
from meshwright.interop.migrate import migrate_file
from meshwright.interop.reading import understand
from meshwright.interop.write import check_runnable, settings_of

FOUR = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@pytest.mark.parametrize(
    ("framework", "settings", "adapter"),
    [
        (
            "axolotl",
            {"adapter": "qlora", "load_in_4bit": True, "lora_r": 32, "lora_alpha": 16, "lora_dropout": 0.05, "lora_target_linear": True},
            Adapter(rank=32, alpha=16, dropout=0.05, targets=("all-linear",), base="nf4", double_quantised=True),
        ),
        ("axolotl", {"adapter": "lora", "lora_r": 8, "lora_target_modules": ["q_proj"], "lora_modules_to_save": ["lm_head", "x"]},
         Adapter(rank=8, targets=("q_proj",), trains=("lm_head",))),
        ("axolotl", {"lora_r": 8}, Adapter()),
        ("automodel", {"peft._target_": "nemo_automodel.components._peft.lora.PeftConfig", "peft.dim": 16, "peft.target_modules": "*_proj"},
         Adapter(rank=16, alpha=32, targets=("*_proj",))),
        ("megatron-bridge", {"peft": "LoRA"}, Adapter(rank=32, alpha=32, targets=FOUR)),
        ("llama-factory", {"finetuning_type": "lora", "quantization_bit": 8, "lora_rank": 4},
         Adapter(rank=4, alpha=8, targets=("all-linear",), base="int8")),
        ("llama-factory", {"finetuning_type": "lora", "quantization_bit": 4},
         Adapter(rank=8, alpha=16, targets=("all-linear",), base="nf4", double_quantised=True)),
        ("trl", {"use_peft": True, "lora_r": 16, "lora_alpha": 32, "lora_target_modules": "q_proj,v_proj"},
         Adapter(rank=16, alpha=32, dropout=0.05, targets=("q_proj", "v_proj"))),
        ("trl", {"use_peft": True}, Adapter(rank=16, alpha=32, dropout=0.05)),
        ("ms-swift", {"tuner_type": "lora"}, Adapter(rank=8, targets=("all-linear",))),
    ],
)  # fmt: skip
def test_settings_are_read(framework: str, settings: dict[str, Any], adapter: Adapter) -> None:
    reading = understand(READABLE[framework], settings, gpus=8, model="meta-llama/Meta-Llama-3-8B")
    assert reading.adapter == adapter
    assert reading.shape.model.adapter == adapter


@pytest.mark.parametrize("framework", ["axolotl", "automodel", "megatron-bridge", "trl", "llama-factory"])
@pytest.mark.parametrize(
    "words",
    [
        ["rank=16", "targets=q_proj,k_proj,v_proj", "alpha=32", "dropout=0.05"],
        ["rank=8", "targets=all-linear"],
        ["rank=8", "targets=all-linear", "base=nf4", "double_quantised=true"],
        ["rank=8"],
    ],
)
def test_what_is_written_is_read_back(framework: str, words: list[str]) -> None:
    target = FRAMEWORKS[framework]
    sets = ["plan.shard=8", "plan.zero=3", "workload.batch=64", *(f"adapter.{word}" for word in words)]
    config = configure("llama3-8b", "dgx-h100", stack=target.stack, set=sets)
    written = settings_of(config, target)
    lost = {name for name in written.inexpressible if name.startswith("adapter")}
    joined = framework == "megatron-bridge"  # it has one matrix for q, k and v, and no quantised base
    expected = {"adapter.base", "adapter.double_quantised"} if joined and "base=nf4" in words else set()
    assert lost == (expected | ({"adapter.targets"} if joined and len(words) == 1 else set()))


@pytest.mark.parametrize("framework", ["axolotl", "trl", "llama-factory"])
def test_trainers_of_transformers_have_every_field_of_an_adapter(framework: str) -> None:
    """And their settings say it without FSDP; LLaMA-Factory shards quantised weights of 4 bits only."""
    sets = [
        "workload.batch=64",
        "adapter.rank=8",
        "adapter.trains=lm_head",
        "adapter.scaling=root",
        "adapter.base=int8",
    ]
    target = FRAMEWORKS[framework]
    config = configure("llama3-8b", "dgx-h100", stack=target.stack, set=["plan.replicate=8", *sets])
    assert not settings_of(config, target).inexpressible
    check_runnable(config, target)
    sharded = configure("llama3-8b", "dgx-h100", stack=target.stack, set=["plan.shard=8", "plan.zero=3", *sets])
    if framework == "llama-factory":
        with pytest.raises(MeshwrightError, match="8-bit weights"):
            check_runnable(sharded, target)


@pytest.mark.parametrize("framework", ["trl", "llama-factory"])
@pytest.mark.parametrize(
    "words", [["tp=8"], ["pp=8"], ["cp=8"], ["replicate=2", "shard=4", "zero=3"], ["shard=8", "zero=1"]]
)
def test_trainers_of_transformers_run_no_plan_with_a_mesh(framework: str, words: list[str]) -> None:
    target = FRAMEWORKS[framework]
    sets = ["workload.batch=64", "adapter.rank=8", *(f"plan.{word}" for word in words)]
    config = configure("llama3-8b", "dgx-h100", stack=target.stack, set=sets)
    with pytest.raises(MeshwrightError, match=rf"{target.title} does not run"):
        check_runnable(config, target)


def test_trainers_of_transformers_recompute_by_fsdp() -> None:
    """Layers are units of FSDP, which recomputes them without gathering once more; LLaMA-Factory then loads no GPU with all weights."""
    sets = ["plan.shard=8", "plan.zero=3", "plan.recompute=full", "workload.batch=64"]
    for name, off in (
        ("trl", {"gradient_checkpointing": False}),
        ("llama-factory", {"disable_gradient_checkpointing": True, "low_cpu_mem_usage": False}),
    ):
        config = configure("llama3-8b", "dgx-h100", stack=FRAMEWORKS[name].stack, set=sets)
        written = settings_of(config, FRAMEWORKS[name])
        assert (
            written.settings["fsdp"] == "full_shard auto_wrap"
        )  # without the second word, Transformers 5.6 shards the model as one unit
        assert off | {"fsdp_config.activation_checkpointing": True} == {
            key: written.settings[key] for key in [*off, "fsdp_config.activation_checkpointing"]
        }
        assert written.back.plan.recompute == "full"


def test_a_framework_without_adapters_is_refused() -> None:
    target = FRAMEWORKS["deepspeed"]
    sets = ["plan.shard=8", "plan.zero=3", "workload.batch=64", "adapter.rank=8"]
    config = configure("llama3-8b", "dgx-h100", stack=target.stack, set=sets)
    with pytest.raises(MeshwrightError, match=r"MW-LAUNCH-005.*adapter\.rank = 8") as error:
        check_runnable(config, target)
    assert error.value.fix == "--for meshwright"  # no other plan of this framework has adapters


def test_a_plan_of_settings_has_their_adapter(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "lora.yaml"
    file.write_text(
        "base_model: meta-llama/Meta-Llama-3-8B\nadapter: lora\nlora_r: 16\nlora_target_linear: true\nmicro_batch_size: 1\n"
        "gradient_accumulation_steps: 4\nsequence_len: 2048\nbf16: true\n"
    )
    reading = read_settings(file, gpus=8)
    assert reading.shape.model.trained == 41_943_040
    file.write_text(file.read_text().replace("adapter: lora", "adapter: qlora\nload_in_4bit: true"))
    lost = migrate_file(file, None, FRAMEWORKS["automodel"], gpus=8).lost  # it has one word for both
    assert not [key for key in lost if key.key == "adapter"]
