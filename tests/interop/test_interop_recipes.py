"""A hundred public recipes and published mistakes, as facts with their source: what is read, what is flagged, and that corrections are not."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import MeshwrightError
from meshwright.interop.files import read_settings
from meshwright.interop.frameworks import FRAMEWORKS, READABLE, find, megatron
from meshwright.interop.keys import is_misspelling
from meshwright.interop.recipes import RecipeVerdict, check, rows
from meshwright.interop.shapes import catalog_model
from meshwright.planner.advice.lint.recipes import judge, judge_all

HERE = Path(__file__).parent
NAMED = {f.title for f in FRAMEWORKS.values()}
# Recipes of the sample that are wrong as published; docs/recipes.md has them, each checked by hand.
WRONG = {
    "a4e8c2cb60": "MW-SET-002",  # 64 GPUs, experts need 512
    "8f01f894a8": "MW-SET-002",  # 64 GPUs, experts need 256
    "250dcc42a4": "MW-SET-008",  # experts beyond the NVLink domain
    "185bde9a66": "MW-SET-001",  # 8 GPUs, degrees of 128
    "59dfbdf8bd": "MW-SET-001",  # 8 GPUs, 16 shards
}
# Expert tensor parallelism is not set: refused when it was published, legal since Megatron-Bridge 0.6, which takes 1.
LEGAL_NOW = {14}
# Published mistakes that ran out of memory and that the cost model shows, with a correction that fits.
FOUND_MEMORY = {44, 45, 47, 53, 63, 64}


@cache
def verdicts() -> dict[str, RecipeVerdict]:
    return {row["id"]: check(row) for row in rows(HERE / "recipes.jsonl")}


@cache
def mistakes() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / "mistakes.jsonl").read_text("utf-8").splitlines()]


def verdict(recipe: dict[str, Any]) -> RecipeVerdict:
    return check({**recipe, "id": "one"})


def test_there_are_a_hundred_recipes_with_their_source() -> None:
    lines = [json.loads(line) for line in (HERE / "recipes.jsonl").read_text("utf-8").splitlines()]
    assert len(lines) == 100
    assert all("@" in line["source"] for line in lines)


def test_recipes_are_read_without_an_unknown_that_matters() -> None:
    named = [v for v in verdicts().values() if v.framework in NAMED]
    assert sum(v.read for v in named) >= 0.95 * len(named)


def test_only_the_wrong_recipes_are_illegal() -> None:
    found = {v.id: v.findings[0]["code"] for v in verdicts().values() if v.legal is False}
    assert found == WRONG


def test_a_recipe_is_said_to_fit_only_with_gpus_and_hardware() -> None:
    for row in rows(HERE / "recipes.jsonl"):
        if not row.get("gpus") or not row.get("hardware"):
            assert verdicts()[row["id"]].fits is not True


@pytest.mark.parametrize("n", range(len(mistakes())))
def test_mistakes_are_flagged_and_corrections_are_not(n: int) -> None:
    pair = mistakes()[n]
    if pair["mistake"]["n"] in LEGAL_NOW:
        assert pair["after"] is None or verdict(pair["after"]).legal
    elif pair["expected"] == "illegal":
        assert verdict(pair["before"]).legal is False
        assert pair["after"] is None or verdict(pair["after"]).legal
    elif pair["mistake"]["n"] in FOUND_MEMORY and pair["before"].get("hardware"):
        assert verdict(pair["before"]).fits is False
        assert verdict(pair["after"]).fits is not False


@pytest.mark.parametrize(
    ("name", "known", "wrong"),
    [
        ("context_parapllel_size", "context_parallel_size", True),
        ("distributed.tp_sise", "distributed.tp_size", True),
        ("training.local_batchsize", "training.local_batch_size", True),
        ("optimizer.exp_avg_sq_dtype", "optimizer.exp_avg_dtype", False),
        ("converters.1.rank", "converters.0.rank", False),
        ("tp", "pp", False),
    ],
)
def test_misspellings(name: str, known: str, wrong: bool) -> None:
    assert is_misspelling(name, known) is wrong


def test_a_misspelt_key_is_unknown_and_matters() -> None:
    recipe = {
        "framework": "axolotl",
        "settings": {"micro_batch_size": 1, "sequence_len": 512, "context_parapllel_size": 2},
    }
    assert verdict(recipe).unknown == ["context_parapllel_size"]
    assert not verdict(recipe).read


def test_a_key_without_meaning_for_cost_is_not_unknown() -> None:
    recipe = {
        "framework": "axolotl",
        "settings": {"micro_batch_size": 1, "sequence_len": 512, "favourite_colour": "blue"},
    }
    found = verdict(recipe)
    assert found.read
    assert found.reading is not None
    assert found.reading.understood.others["ignored"] == ["favourite_colour"]


def test_a_value_without_meaning_is_unknown() -> None:
    recipe = {
        "framework": "torchtitan",
        "settings": {"parallelism.tensor_parallel_degree": "many", "training.seq_len": 64},
    }
    assert verdict(recipe).unknown == ["parallelism.tensor_parallel_degree = many"]


def test_settings_of_an_unread_framework_say_so() -> None:
    found = check({"id": "1", "framework": "sockeye", "settings": {}})
    assert not found.read
    assert found.legal is None
    assert found.findings[0]["code"] == "MW-SET-012"


def test_kv_heads_must_divide_in_torchtitan() -> None:
    """torchtitan's pull request 4016: tensor parallelism 4 with two KV heads."""
    shape = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 2, "vocab_size": 1000, "hidden_dim": 8192}
    settings = {"parallelism.tensor_parallel_degree": 4, "training.local_batch_size": 1, "training.seq_len": 4096}
    found = verdict({"framework": "torchtitan", "settings": settings, "shape": shape, "gpus": 8})
    assert found.legal is False
    assert "KV heads" in found.findings[0]["what"]
    assert verdict(
        {
            "framework": "torchtitan",
            "settings": settings | {"parallelism.tensor_parallel_degree": 2},
            "shape": shape,
            "gpus": 8,
        }
    ).legal


def test_olmo_core_counts_tokens_and_levanter_names_axes() -> None:
    settings = {
        "SEQUENCE_LENGTH": 8192, "GLOBAL_BATCH_SIZE": 4194304, "train_module.rank_microbatch_size": 16384,
        "train_module.max_sequence_length": "sequence_length", "train_module.dp_config": "TransformerDataParallelConfig",
        "train_module.dp_config.name": "DataParallelType.hsdp", "train_module.dp_config.shard_degree": 64,
        "train_module.cp_config": "TransformerContextParallelConfig.ulysses", "train_module.cp_config.degree": 2,
        "train_module.ac_config.mode": "TransformerActivationCheckpointingMode.budget", "train_module.optim": "SkipStepAdamWConfig",
    }  # fmt: skip
    found = verdict({"framework": "OLMo-core", "settings": settings, "gpus": 256})
    assert found.read
    assert found.reading is not None
    assert found.reading.plan.title() == "dp 2×64 (ZeRO-3) · cp 2 (ulysses) · micro-batch 2 · recompute selective"
    assert found.reading.workload.batch == 512
    settings = {
        "model.type": "llama", "model.hidden_dim": 4096, "model.num_layers": 32, "model.num_heads": 32, "model.intermediate_dim": 11008,
        "model.seq_len": 2048, "trainer.train_batch_size": 1024, "trainer.fsdp_axis": "embed", "trainer.mp": "p=f32,c=bfloat16",
        "trainer.model_axis_size": 2, "trainer.replica_dcn_axis_size": 2,
    }  # fmt: skip
    found = verdict({"framework": "levanter", "settings": settings})
    assert (found.read, found.legal) == (True, True)
    assert found.reading is not None
    assert (found.reading.plan.tp, found.reading.plan.replicate, found.reading.workload.batch) == (2, 2, 1024)


def test_names_of_models_without_their_owner() -> None:
    assert catalog_model("meta-llama/Meta-Llama-3.1-8B-Instruct") == "llama3.1-8b"
    assert catalog_model("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16") == "nemotron-3-nano"


DENSE = {
    "num_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "ffn_hidden_size": 8192,
    "vocab_size": 128256,
}


def gib(framework: str, settings: dict[str, Any], name: str = "", **shape: int) -> float:
    """Peak memory of a small model on 8 H100."""
    row = {
        "framework": framework,
        "settings": settings,
        "model": name,
        "shape": DENSE | shape,
        "gpus": 8,
        "hardware": "H100",
    }
    found = verdict(row)
    assert found.memory_gib is not None, found.findings
    return found.memory_gib


def test_multi_token_prediction_takes_memory() -> None:
    """Megatron-Bridge trains it where the model has it; its logits are kept with those of the model: 12 · 4096 · 128256 bytes and more."""
    settings = {
        "model.seq_length": 4096,
        "train.micro_batch_size": 2,
        "train.global_batch_size": 16,
        "mixed_precision": "bf16_mixed",
    }
    without = gib("Megatron-Bridge", settings)
    assert gib("Megatron-Bridge", settings | {"model.mtp_num_layers": 1}) > without + 2 * 4096 * 128256 * 2 / 2**30
    hybrid = gib("Megatron-Bridge", settings, "Qwen/Qwen3.5-9B")
    assert gib("Megatron-Bridge", settings | {"model.mtp_num_layers": None}, "Qwen/Qwen3.5-9B") < hybrid - 1.5


def test_a_split_vocabulary_without_a_fused_loss_takes_16_bytes_a_logit() -> None:
    """The backward of DTensor's loss has four fp32 tensors of the size of the logits at once."""
    settings = {"training.local_batch_size": 4, "training.seq_len": 4096, "parallelism.tensor_parallel_degree": 2}
    fused = gib("torchtitan", settings | {"compile.enable": True})
    assert gib("torchtitan", settings) - fused == pytest.approx(12 * 4 * 4096 * 128256 / 2 / 2**30)


def test_torch_pipelines_keep_buffers_for_all_micro_batches() -> None:
    """Twice as many micro-batches: 2 more buffers of b·s·h each, and in Automodel the logits on the last stage."""
    settings = {"training.seq_len": 4096, "parallelism.pipeline_parallel_degree": 4}
    few, many = (gib("torchtitan", settings | {"training.local_batch_size": n}) for n in (8, 16))
    assert many - few == pytest.approx(2 * 8 * 4096 * 2048 * 2 / 2**30)
    settings = {"dataset.seq_len": 4096, "distributed.pp_size": 4, "distributed.pipeline.pp_schedule": "1f1b", "model.torch_dtype": "bfloat16",
                "step_scheduler.global_batch_size": 32}  # fmt: skip
    few, many = (gib("Automodel", settings | {"step_scheduler.local_batch_size": n}) for n in (8, 16))
    assert many - few == pytest.approx((2 * 8 * 4096 * 2048 * 2 + 8 * 4096 * 128256 * 2) / 2**30)


@pytest.mark.parametrize("line", ["[1]", "not json", "{"])
def test_a_bad_line_is_an_error(line: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line)
    with pytest.raises(MeshwrightError) as caught:
        list(rows(path))
    assert caught.value.code == "MW-SET-010"


@pytest.mark.parametrize(
    "bad", [{"settings": 5}, {"args": "x"}, {"gpus": "many"}, {"shape": [1]}, {"settings": {"training.seq_len": -1}}]
)
def test_odd_rows_do_not_raise(bad: dict[str, Any]) -> None:
    for name in READABLE:
        check({"id": "x", "framework": name, **bad})


def test_names_of_frameworks() -> None:
    assert find("ms-swift (Megatron-Core)") is FRAMEWORKS["megatron-lm"]
    assert find("NeMo Automodel") is FRAMEWORKS["automodel"]
    assert find("unknown") is None


LLAMA = {
    "model.tensor_model_parallel_size": 2, "model.seq_length": 4096, "train.micro_batch_size": 1, "train.global_batch_size": 64,
    "mixed_precision": "bf16_mixed", "model.cross_entropy_fusion_impl": "te", "ddp.use_distributed_optimizer": True,
}  # fmt: skip


def bridge(
    path: str = "src/megatron/bridge/perf_recipes/x.py", model: str = "llama3-8b", **settings: Any
) -> RecipeVerdict:
    """A recipe of Megatron-Bridge on 2 H100: one data-parallel rank, so that the optimizer states are not sharded."""
    gpus = settings.pop("gpus", 2)
    named = {key.replace("__", "."): value for key, value in settings.items()}
    row = {"framework": "Megatron-Bridge", "model": model, "path": path, "gpus": gpus, "hardware": "H100"}
    return verdict({**row, "settings": LLAMA | named})


def test_the_gpus_in_the_name_of_a_library_recipe_are_the_fewest_that_its_degrees_allow() -> None:
    library = "src/megatron/bridge/recipes/llama/h100/llama3.py"
    assert bridge().fits is False
    found = bridge(library)
    assert found.fits is None  # more GPUs shard the states
    assert "smallest number of GPUs" in found.findings[-1]["why"]
    assert found.findings[-1]["fix"] == "4 GPUs"
    assert bridge(library, gpus=4).fits is True
    long = {"model__seq_length": 131072}  # no number of shards frees activations
    assert bridge(library, **long).fits is False


def test_either_key_turns_the_distributed_optimizer_of_megatron_bridge_on() -> None:
    off = {"ddp__use_distributed_optimizer": False}
    for more, zero in (({}, 0), ({"optimizer__use_distributed_optimizer": True}, 1)):
        found = bridge(gpus=8, **off, **more).reading
        assert found is not None
        assert found.plan.zero == zero


def test_replicas_of_hybrid_fsdp_can_share_the_optimizer_states() -> None:
    hybrid = {"ddp__use_megatron_fsdp": True, "ddp__num_distributed_optimizer_instances": 4, "gpus": 32}
    whole, shared = bridge(**hybrid), bridge(**hybrid, ddp__outer_dp_sharding_strategy="optim")
    assert whole.memory_gib is not None
    assert shared.memory_gib is not None
    parameters = 8.03e9 / 2 / 4  # of a rank of tp = 2 and shard = 4
    assert whole.memory_gib - shared.memory_gib == pytest.approx(12 * parameters * 3 / 4 / 2**30, rel=0.01)


@pytest.mark.parametrize(
    ("offload", "share"),
    [
        ({"activation_offload_layers": 24}, 0.25),
        (
            {"model__fine_grained_activation_offloading": True, "model__offload_modules": ["core_attn", "attn_proj"]},
            None,
        ),
        ({"model__fine_grained_activation_offloading": False, "model__offload_modules": ["core_attn"]}, 1.0),
    ],
)
def test_offloaded_activations_take_no_memory(offload: dict[str, Any], share: float | None) -> None:
    """Of 32 layers 24, or the inputs of the modules that are named."""
    plain, less = bridge(gpus=16), bridge(gpus=16, **offload)
    assert plain.memory_gib is not None
    assert less.memory_gib is not None
    if share == 1.0:
        assert less.memory_gib == plain.memory_gib
    elif share is None:
        assert less.memory_gib < plain.memory_gib - 1
    else:
        most = bridge(gpus=16, activation_offload_layers=28)  # of the last four layers nothing is moved
        assert most.memory_gib is not None
        assert less.memory_gib - most.memory_gib == pytest.approx(
            (share - 4 / 32) / (1 - 4 / 32) * (plain.memory_gib - most.memory_gib), rel=1e-6
        )


def test_layers_are_offloaded_where_the_framework_does_so() -> None:
    """Megatron-Core asks for the switch and for a number, below the layers of the model; Megatron-LM has the number only."""
    layers = {"model__cpu_offloading_num_layers": 24}
    plain, named = bridge(gpus=16), bridge(gpus=16, **layers)
    assert named.memory_gib == plain.memory_gib  # as NVIDIA's recipes of gpt-oss do: the switch is off
    for off in ({}, {"model__cpu_offloading_num_layers": 0}, {**layers, "model__cpu_offloading_activations": False}):
        found = bridge(gpus=16, model__cpu_offloading=True, **off)
        assert found.reading is not None
        assert found.reading.plan.offload == "none"
    on = bridge(gpus=16, model__cpu_offloading=True, **layers)
    flags = ["--num-layers", "32", "--micro-batch-size", "1", "--cpu-offloading-num-layers", "24"]
    flagged = verdict({"framework": "Megatron-LM", "args": flags, "gpus": 8})
    for found in (on, flagged):
        assert found.reading is not None
        assert (found.reading.plan.offload, found.reading.plan.offload_layers) == ("activations", 24)
        assert found.legal
    for wrong in ({"model__pipeline_model_parallel_size": 2}, {"model__recompute_granularity": "selective"}):
        assert bridge(gpus=16, model__cpu_offloading=True, **layers, **wrong).legal is False
    assert verdict({"framework": "Megatron-LM", "args": [*flags[:-1], "32"], "gpus": 8}).legal is False


def test_modules_that_are_offloaded_are_said_to_have_no_time() -> None:
    found = bridge(gpus=16, model__fine_grained_activation_offloading=True, model__offload_modules=["core_attn"])
    assert found.legal
    (warning,) = (f for f in found.findings if "core_attn" in f["what"])
    assert (warning["severity"], "time of their copies" in warning["why"]) == ("warning", True)


@pytest.mark.parametrize(("swiglu", "ffn"), [(True, 10880), (False, 16384)])
def test_megatron_chooses_the_width_of_a_feed_forward_layer(swiglu: bool, ffn: int) -> None:
    """4 × hidden; with SwiGLU, which has a third matrix, two thirds of that in multiples of 64."""
    facts = {"model.hidden": 4096, "gated": swiglu}
    megatron.MEGATRON.table.derive(facts)
    assert facts["model.ffn"] == ffn
    named = {"model.hidden": 4096, "gated": swiglu, "model.ffn": 14336}
    megatron.MEGATRON.table.derive(named)
    assert named["model.ffn"] == 14336


def full_tuning(**more: Any) -> RecipeVerdict:
    """Fine-tuning of Llama 3.1 8B by torchtune, without a GPU that is stated."""
    settings = {
        "model._component_": "torchtune.models.llama3_1.llama3_1_8b", "batch_size": 2, "tokenizer.max_seq_len": 2048, "dtype": "bf16",
        "enable_activation_checkpointing": True, "optimizer._component_": "torch.optim.AdamW",
    }  # fmt: skip
    row = {"framework": "torchtune", "model": "llama3.1-8b", "gpus": 8, "settings": settings}
    return verdict(
        {**row, **{k: v for k, v in more.items() if k != "settings"}, "settings": settings | more.get("settings", {})}
    )


def test_without_a_gpu_the_gpus_that_fit_are_listed() -> None:
    found = full_tuning()
    assert found.fits is None
    assert "A100 (40 GB)" in found.findings[-1]["what"]
    assert found.findings[-1]["severity"] == "note"
    long = full_tuning(settings={"tokenizer.max_seq_len": 131072, "batch_size": 16})
    assert long.fits is False
    assert "no GPU of the catalog" in long.findings[-1]["why"]


def test_an_unstated_vocabulary_gives_a_lower_bound() -> None:
    """Megatron's tokenizer has the vocabulary: with the smallest usual one a recipe can be shown not to fit, never to fit."""
    words = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --micro-batch-size 1 --global-batch-size 64 --bf16"
    row = {"framework": "Megatron-LM", "gpus": 8, "hardware": "H100"}
    small, whole = (
        verdict({**row, "args": [*words.split(), "--tensor-model-parallel-size", str(tp)]}) for tp in (8, 1)
    )
    assert (small.fits, whole.fits) == (None, False)
    stated = verdict({**row, "args": [*words.split(), "--tensor-model-parallel-size", "8", "--vocab-size", "32000"]})
    assert stated.fits is True
    assert stated.memory_gib == pytest.approx(small.memory_gib)


def test_the_gpu_of_a_path_counts() -> None:
    assert full_tuning(path="configs/8b_h100.yaml").fits is True
    assert full_tuning(path="configs/8b_a10g.yaml", gpus=1).fits is False
    assert full_tuning(path="configs/8b_tpu.yaml").memory_gib is None


def test_quantised_weights_and_offloaded_parameters_take_less_memory() -> None:
    whole = {
        "base_model": "meta-llama/Llama-3.1-8B",
        "micro_batch_size": 1,
        "sequence_len": 2048,
        "bf16": True,
        "gradient_checkpointing": True,
    }

    def gib_of(**more: Any) -> float:
        found = verdict({"framework": "axolotl", "settings": whole | more, "gpus": 1, "hardware": "H100"})
        assert found.memory_gib is not None
        return found.memory_gib

    lora = gib_of(adapter="lora", lora_r=16)
    # The matrices of layers have 4 bits and a scale of a byte for 64; the largest of them in 16 bits is added where it is used.
    matrices, largest = 6.98e9, 4096 * 14336 * 2
    saved = matrices * (2 - 0.5 - (1 + 4 / 256) / 64) - largest
    assert lora - gib_of(adapter="qlora", lora_r=16, load_in_4bit=True) == pytest.approx(saved / 2**30, rel=0.01)
    assert gib_of() > lora + 8.03e9 * 6 / 2**30 * 0.9
    saved = gib_of(adapter="lora", lora_r=16, gradient_checkpointing=False)
    assert (
        gib_of(adapter="lora", lora_r=16, gradient_checkpointing=False, attn_implementation="eager")
        > saved + 32 * 32 * 2048**2 * 2 / 2**30 * 0.9
    )


def test_trl_and_ms_swift_are_read() -> None:
    settings = {
        "model_name_or_path": "Qwen/Qwen3-8B",
        "per_device_train_batch_size": 2,
        "max_length": 4096,
        "bf16": True,
        "deepspeed": "zero3",
    }
    for name in ("TRL", "ms-swift"):
        found = verdict({"framework": name, "settings": settings, "gpus": 8, "hardware": "H100"})
        assert (found.read, found.legal, found.fits) == (True, True, True)
        assert found.reading is not None
        assert found.reading.plan.zero == 3
        assert verdict({"framework": name, "settings": settings | {"fp16": True}}).legal is False
        assert verdict({"framework": name, "settings": {**settings, "max_lenght": 1}}).unknown == ["max_lenght"]
    args = [
        "--pipeline_model_parallel_size",
        "1",
        "--decoder_first_pipeline_num_layers",
        "3",
        "--micro_batch_size",
        "1",
        "--global_batch_size",
        "8",
    ]
    assert verdict({"framework": "ms-swift", "args": args, "gpus": 8}).legal is False
    assert verdict({"framework": "ms-swift", "args": ["--tensor_model_parallel_size", "3"], "gpus": 8}).legal is False
    grpo = {"num_generations": 8, "per_device_train_batch_size": 1, "NPROC_PER_NODE": 4, "NNODES": 1}
    assert verdict({"framework": "TRL", "settings": grpo}).legal is True
    assert verdict({"framework": "TRL", "settings": grpo | {"generation_batch_size": 12}}).legal is False


def test_many_recipes_are_judged_on_all_cores_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.planner.advice.lint.recipes.usable_processes", lambda: 2)
    recipes = [{"framework": "torchtitan", "settings": {}, "id": str(n)} for n in range(60)]
    assert [v.as_dict() for v in judge_all(recipes)] == [judge(recipe).as_dict() for recipe in recipes]


def test_slow_patterns_have_seconds() -> None:
    """Full recompute without need; the corrected recipe is not slow."""
    slow = {
        "training.seq_len": 2048,
        "training.local_batch_size": 4,
        "activation_checkpoint.mode": "full",
        "compile.enable": True,
    }
    row = {"id": "1", "framework": "torchtitan", "model": "llama3-8b", "gpus": 64, "hardware": "H100"}
    found = judge({**row, "settings": slow})
    assert found.slow
    assert {f["code"] for f in found.findings if f.get("cost_s", 0) > 0} >= {"MW-LINT-014"}
    assert not judge({**row, "settings": slow | {"activation_checkpoint.mode": "none"}}).slow


NEMO_1 = """
trainer: {num_nodes: 128, devices: 8, precision: bf16}
model:
  micro_batch_size: 1
  global_batch_size: 2048
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 4
  virtual_pipeline_model_parallel_size: 10
  context_parallel_size: 2
  sequence_parallel: true
  encoder_seq_length: 8192
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 80
  hidden_size: 8192
  ffn_hidden_size: ${multiply:4, ${.hidden_size}}
  num_attention_heads: 64
  num_query_groups: 8
  activation: fast-swiglu
  normalization: rmsnorm
  bias: false
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  override_vocab_size: 128256
  activations_checkpoint_granularity: full
  activations_checkpoint_method: block
  activations_checkpoint_num_layers: 1
  megatron_amp_O2: true
  optim: {name: distributed_fused_adam, overlap_grad_sync: true, overlap_param_sync: true}
  data: {seq_length: "${model.encoder_seq_length}", index_mapping_dir: "${data_dir}"}
"""


def nemo_1(tmp_path: Path, *changes: tuple[str, str]) -> Any:
    text = NEMO_1
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "llama3_1_70b.yaml"
    path.write_text(text)
    return read_settings(path)


def test_settings_of_nemo_1_are_not_those_of_megatron_bridge(tmp_path: Path) -> None:
    """Hydra's YAML of the first NeMo, with the numbers of its launcher's llama3_1_70b.yaml; references to other keys are followed."""
    found = nemo_1(tmp_path)
    assert (found.framework.name, found.gpus, found.errors) == ("nemo-1", 1024, [])
    plan, model = found.plan, found.shape.model
    assert plan.title() == (
        "dp 32 (ZeRO-1) · tp 4+sp · cp 2 (ring) · pp 4×10 (interleaved) · micro-batch 1 · recompute full (1 per stage) · overlap dp+cp"
    )
    assert (found.workload.batch, found.workload.seq, found.workload.precision) == (2048, 8192, "bf16")
    assert (model.layers, model.ffn, model.max_positions, model.activation, model.tied) == (
        80,
        32768,
        8192,
        "swiglu",
        False,
    )
    assert "left open" not in found.understood.others
    assert nemo_1(tmp_path, ("distributed_fused_adam", "fused_adam")).plan.zero == 0
    sharded = nemo_1(tmp_path, ("megatron_amp_O2: true", "fsdp: true"), ("pipeline_model_parallel_size: 4\n", "pipeline_model_parallel_size: 1\n"),
                     ("virtual_pipeline_model_parallel_size: 10", "fsdp_grad_reduce_dtype: bf16"), ("distributed_", ""))  # fmt: skip
    assert (sharded.plan.zero, sharded.plan.grad_dtype) == (3, "bf16")


def test_what_has_another_meaning_in_nemo_1_is_said(tmp_path: Path) -> None:
    open_ = nemo_1(tmp_path, ("encoder_seq_length: 8192", "encoder_seq_length: ${seq}"))
    assert "MW-SET-016" in {p.code for p in open_.errors}
    (adapters,) = nemo_1(tmp_path, ("megatron_amp_O2: true", "peft: {peft_scheme: lora}")).errors
    assert "adapters (lora)" in adapters.what
    warned = nemo_1(tmp_path, ("megatron_amp_O2: true", "megatron_amp_O2: false"))
    assert not warned.errors
    assert [p.what for p in warned.problems if p.severity == "warning"] == ["bf16 without megatron_amp_O2"]
