"""Bytes that the memory of settings counts, beside what the frameworks' own layers save."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.cost.memory import memory
from meshwright.describe import catalog
from meshwright.describe.adapter import PACKINGS, Adapter
from meshwright.describe.config import Config
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.interop.assemble import switch_stack
from meshwright.interop.frameworks import FRAMEWORKS
from meshwright.interop.migrate import migrate
from meshwright.interop.recipes import check
from meshwright.interop.write import settings_of
from meshwright.predict.estimate import lowered
from meshwright.predict.prediction import element

transformers = pytest.importorskip("transformers")

THREADS = Path(__file__).parents[2] / "benchmarks/recipe_threads.jsonl"
SEQ = 32


class CastingAdapter(torch.nn.Module):
    """A frozen product with an adapter in fp32, to which its input is cast, as PEFT's of bf16 weights."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = torch.nn.Linear(base.in_features, 8, False), torch.nn.Linear(8, base.out_features, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x.to(torch.float32))) * 2.0


def saved_bytes(layers: int, attention: str, targets: tuple[str, ...] = (), seq: int = SEQ) -> int:
    """Bytes that a Llama of Transformers in bf16 keeps for backward beside its weights, each tensor once; with `targets` under autocast."""
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, intermediate_size=192, vocab_size=128,
        attn_implementation=attention,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
    if targets:
        model.requires_grad_(False)
        for name, module in [(n, m) for n, m in model.named_modules() if n.endswith(targets)]:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, CastingAdapter(module))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    autocast = torch.autocast("cpu", torch.bfloat16, enabled=bool(targets))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        model(input_ids=torch.zeros(1, seq, dtype=torch.long), use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("stack", ["accelerate", "axolotl", "huggingface", "deepspeed"])
def test_a_layer_of_transformers_keeps_what_is_counted(stack: str, attention: str) -> None:
    """But for the scale of each norm, in fp32: 4 bytes per token."""
    of_catalog = catalog.load("stacks", stack)
    fields = switch_stack({"eager": attention == "eager"}, {"pp": 1, "tp": 1}, of_catalog)
    model = Model(name="tiny", layers=2, hidden=64, heads=4, kv_heads=2, ffn=192, vocab=128)
    cluster = catalog.load("clusters", "dgx-h100").with_gpus(1)
    config = Config(model, cluster, Plan(), Workload(batch=1, seq=SEQ), of_catalog.but(**fields))
    _, _, program = lowered(config)
    counted = sum(element(size, 0) for size in program.saved["dense"].values())
    assert saved_bytes(3, attention) - saved_bytes(2, attention) == counted + 2 * 4 * SEQ


@pytest.mark.parametrize(
    "targets", [("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")]
)
@pytest.mark.parametrize("stack", ["accelerate", "axolotl", "huggingface", "deepspeed"])
def test_each_adapter_of_peft_keeps_a_copy_of_its_input(stack: str, targets: tuple[str, ...]) -> None:
    """Twice the tokens, so that the casts of weights cancel."""
    adapter = Adapter(rank=8, targets=targets)
    model = Model(name="tiny", layers=2, hidden=64, heads=4, kv_heads=2, ffn=192, vocab=128, adapter=adapter)
    cluster = catalog.load("clusters", "dgx-h100").with_gpus(1)
    config = Config(model, cluster, Plan(), Workload(batch=1, seq=SEQ), catalog.load("stacks", stack))
    _, _, program = lowered(config)
    counted = sum(element(size, 0) for size in program.saved["dense"].values())
    twice, once = (
        saved_bytes(3, "sdpa", targets, seq) - saved_bytes(2, "sdpa", targets, seq) for seq in (2 * SEQ, SEQ)
    )
    assert twice - once == counted + 2 * 4 * SEQ


def thread(n: int, **changed: Any) -> dict[str, Any]:
    """The wrong version of a thread, with some settings changed."""
    row = next(row for row in map(json.loads, THREADS.read_text("utf-8").splitlines()) if row["n"] == n)["before"]
    return {**row, "id": "one", "settings": row["settings"] | changed}


def gib(recipe: dict[str, Any]) -> float:
    peak = check(recipe).memory_gib
    assert peak is not None
    return peak


AUTOMODEL_MOE = {
    "model.config.pretrained_model_name_or_path": "Qwen/Qwen3-30B-A3B", "step_scheduler.global_batch_size": 512,
    "step_scheduler.local_batch_size": 16, "distributed.ep_size": 8, "distributed.activation_checkpointing": True, "dataset.seq_len": 4096,
    "model.backend.te_fp8.recipe": "mxfp8", "loss_fn._target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy",
    "loss_fn.fp32_upcast": False, "optimizer._target_": "torch.optim.Adam",
}  # fmt: skip
V3 = {
    "model.config.pretrained_model_name_or_path": "deepseek-ai/DeepSeek-V3", "step_scheduler.global_batch_size": 128,
    "step_scheduler.local_batch_size": 2, "distributed.ep_size": 64, "model.backend.te_fp8.recipe": None,
}  # fmt: skip
GPT_OSS = {
    "model.config.pretrained_model_name_or_path": "openai/gpt-oss-120b", "step_scheduler.global_batch_size": 1280,
    "step_scheduler.local_batch_size": 8, "distributed.ep_size": 16, "distributed.moe.reshard_after_forward": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("gpus", "changed", "measured"),
    [(8, {}, 135.2), (64, V3, 107.44), (32, GPT_OSS, 132.5)],
    ids=["qwen3", "v3", "gpt-oss"],
)
def test_peaks_that_automodel_states_for_its_recipes(gpus: int, changed: dict[str, Any], measured: float) -> None:
    """GiB of tensors in the heads of qwen3_moe_30b_te_mxfp8_gb200.yaml, deepseek_v3_sdpa_compile_gb200.yaml and gptoss_120b_te_mxfp8_gb200.yaml
    (examples/llm_benchmark at 36044ad3d1): gradients that are added up whole, or allocated when backward comes to them."""
    recipe = {"id": "one", "framework": "Automodel", "gpus": gpus, "hardware": "GB200"}
    assert gib({**recipe, "settings": AUTOMODEL_MOE | changed}) == pytest.approx(measured, rel=0.05)


def test_gradients_that_fsdp_adds_up_whole() -> None:
    """Transformers' Trainer reduces the gradients of FSDP with the last micro-batch of a step, unless `sync_each_batch` is set. Accelerate's
    gradient_synchronization.md: a Mixtral 8x7B on 8 A100 of 80 GB takes 69 GB with one micro-batch and runs out of memory with two."""
    settings = {
        "model_name_or_path": "mistralai/Mixtral-8x7B-v0.1", "fsdp": "full_shard auto_wrap", "bf16": True, "per_device_train_batch_size": 1,
        "max_length": 1024, "gradient_checkpointing": True,
    }  # fmt: skip
    recipe = {"id": "one", "framework": "TRL", "gpus": 8, "hardware": "A100 80GB"}
    each = {"accelerator_config.gradient_accumulation_kwargs.sync_each_batch": True}
    whole, shards = (
        gib({**recipe, "settings": settings | {"gradient_accumulation_steps": 2} | more}) for more in ({}, each)
    )
    parameters = catalog.load("models", "mixtral-8x7b").total
    assert whole - shards == pytest.approx((2 - 4 / 8) * parameters / 2**30, rel=0.05)  # less a copy of one layer
    one = gib({**recipe, "settings": settings | {"gradient_accumulation_steps": 1}})
    assert one == gib({**recipe, "settings": settings | {"gradient_accumulation_steps": 1} | each}) < shards


def test_what_is_written_for_automodel_states_when_gradients_are_reduced() -> None:
    config = Config(
        catalog.load("models", "llama3-8b"), catalog.load("clusters", "dgx-h100").with_gpus(8), Plan(shard=8, zero=3, microbatch=1),
        Workload(batch=32, seq=4096), catalog.load("stacks", "automodel"),
    )  # fmt: skip
    for reduce, plan in (("auto", config.plan), ("step", config.plan.but(reduce="step"))):
        written = settings_of(config.but(plan=plan), FRAMEWORKS["automodel"])
        assert written.settings.get("distributed.defer_fsdp_grad_sync", True) == (reduce == "step")
        assert written.back.plan.reduces_each == plan.reduces_each


def test_parts_of_a_sequence_store_no_scores() -> None:
    """Context parallelism has kernels of its own: the `eager` of a setting is that of one rank."""
    cut = {"model.backend.attn": "eager", "distributed.cp_size": 2, "packed_sequence.packed_sequence_size": 8192}
    recipe = {"id": "one", "framework": "Automodel", "gpus": 8, "hardware": "GB200"}
    settings = AUTOMODEL_MOE | {"step_scheduler.local_batch_size": 1}
    assert gib({**recipe, "settings": settings | cut}) == gib(
        {**recipe, "settings": settings | cut | {"model.backend.attn": "te"}}
    )


def test_scores_of_an_unfused_softmax_have_gradients_beside_them() -> None:
    """In the backward of one layer 6 bytes of a score are saved, and 6 are gradients, beside which those of the widest product fit."""
    scores = 48 * 8192**2 / 2**30
    stored = gib(thread(66)) - gib(thread(66, attn_implementation="sdpa"))
    widest = (2 * 8192 * 2 * 24576) / 2**30
    assert stored == pytest.approx(1.06 * (12 * scores - widest), rel=0.03)


def test_scales_of_a_quantised_base_are_not_sharded_and_the_root_stays_gathered() -> None:
    """bitsandbytes keeps scales in an attribute of the module. 70B on two cards of 24 GB: half a GiB more of them, and 1.6 GiB gathered, of the ends
    and two layers, where the largest two units would be one GiB."""
    stack = catalog.load("stacks", "axolotl")
    assert (stack.root_unit, stack.whole_scales) == (True, True)
    reading = check(thread(1)).reading
    assert reading is not None
    model, plan, workload = reading.shape.model, reading.plan, reading.workload
    cluster = catalog.load("clusters", "dgx-h100").with_gpus(2)

    def parts(**changed: bool) -> dict[str, float]:
        _, _, program = lowered(Config(model, cluster, plan, workload, stack.but(**changed)))
        return {part: element(size, 0) for part, size in memory(program, program.ranks[0]).items()}

    whole, sharded, units = parts(), parts(whole_scales=False), parts(root_unit=False)
    matrices = model.total - 2 * model.padded_vocab * model.hidden
    scales = matrices / PACKINGS["nf4"].block  # of one byte; four more for each row
    assert scales / 2 < whole["parameters"] - sharded["parameters"] < 1.03 * scales / 2
    end = 2 * model.padded_vocab * model.hidden
    assert units["gathered"] == pytest.approx(2 * end, rel=0.01)
    layer = matrices / model.layers * (0.5 + 1 / 64)
    assert whole["gathered"] == pytest.approx(2 * end + 2 * layer, rel=0.02)


def test_ends_that_are_wrapped_are_freed() -> None:
    settings = {
        "model._component_": "torchtune.models.llama3_1.llama3_1_8b", "batch_size": 1, "tokenizer.max_seq_len": 512, "dtype": "bf16",
        "enable_activation_checkpointing": True, "optimizer._component_": "torch.optim.AdamW",
    }  # fmt: skip
    row = {"id": "one", "framework": "torchtune", "model": "llama3.1-8b", "gpus": 8, "hardware": "H100"}
    root = gib({**row, "settings": settings})
    wrapped = gib({**row, "settings": settings | {"custom_sharded_layers": ["tok_embeddings", "output"]}})
    layer = 2 * 218.1e6
    assert root - wrapped == pytest.approx(2 * layer / 2**30 * 1.06, rel=0.01)


def test_fp8_layers_that_are_not_compiled_keep_their_input_in_16_bits() -> None:
    """Command R 7B with 4,096 tokens: 47.7 GiB were measured (Automodel's pull request 1828)."""
    eager = gib(thread(81, **{"packed_sequence.packed_sequence_size": 4096}))
    compiled = gib(thread(81, **{"packed_sequence.packed_sequence_size": 4096, "compile.enabled": True}))
    assert eager == pytest.approx(47.7, rel=0.03)
    assert compiled < eager - 8


def test_one_round_of_an_interleaved_schedule_reduces_stage_by_stage() -> None:
    row = next(row for row in map(json.loads, THREADS.read_text("utf-8").splitlines()) if row["n"] == 73)["after"]
    one, two = (
        gib({**row, "id": "one", "settings": row["settings"] | {"step_scheduler.local_batch_size": n}}) for n in (2, 4)
    )
    gradients = 4 * 70.55e9 / 8
    assert two - one == pytest.approx(gradients * 0.8 * 0.75 / 2**30, rel=0.05)


@pytest.mark.parametrize(
    ("framework", "settings", "parts"),
    [("axolotl", {}, set()), ("axolotl", {"liger_rms_norm": True}, {"norm"}), ("axolotl", {"torch_compile": True}, {"norm", "activation"}),
     ("TRL", {"use_liger_kernel": True}, {"norm", "activation", "loss"}), ("torchtitan", {}, {"norm", "loss"}),
     ("torchtitan", {"compile.enable": True}, {"norm", "activation", "loss"})],
)  # fmt: skip
def test_what_settings_fuse(framework: str, settings: dict[str, Any], parts: set[str]) -> None:
    reading = check({"id": "one", "framework": framework, "gpus": 8, "settings": settings}).reading
    assert reading is not None
    assert {"norm", "activation", "loss"} & set(reading.stack.fused) == parts


def dropped(hidden: float | None, attention: float | None, **more: Any) -> Any:
    """A GPT of 16 layers with a rate of each dropout, or none stated, as flags of Megatron-LM; on one GPU."""
    flags = {
        "num-layers": 16, "hidden-size": 2048, "num-attention-heads": 16, "max-position-embeddings": 2048, "seq-length": 2048, "vocab-size": 51200,
        "micro-batch-size": 4, "global-batch-size": 64, "hidden-dropout": hidden, "attention-dropout": attention,
    }  # fmt: skip
    args = [str(word) for name, value in flags.items() if value is not None for word in (f"--{name}", value)]
    row = {"id": "one", "framework": "Megatron-LM", "args": [*args, "--bf16"], "gpus": 1, "hardware": "H100", **more}
    found = check(row)
    assert found.reading is not None
    assert found.memory_gib is not None
    assert "not modelled" not in found.reading.understood.others
    assert not found.findings
    return found


def test_a_mask_of_dropout_takes_a_byte_for_each_element() -> None:
    """Korthikanti et al. 2022, section 4: a byte for each of the two masks of a layer, s·b·h elements each, and one of the embedding. Fused attention
    keeps a seed instead of a mask."""
    plain, hidden, attention = dropped(0, 0), dropped(0.1, 0), dropped(0, 0.1)
    assert plain.memory_gib == attention.memory_gib == dropped(None, None).memory_gib
    masks = (2 * 16 + 1) * 4 * 2048 * 2048 / 2**30
    slack = 1 + plain.reading.stack.allocator_slack
    assert hidden.memory_gib - plain.memory_gib == pytest.approx(masks * slack, rel=1e-6)
    model = dropped(0.2, 0.1).reading.shape.model
    assert (model.dropout, model.dropout_rate, model.attention_dropout) == (True, 0.2, 0.1)


def test_stored_probabilities_have_a_mask_where_they_are_dropped() -> None:
    """The same paper: a mask of a byte and dropped probabilities of two for each of a·s²·b scores."""

    def saved(hidden: float, attention: float) -> float:
        reading = dropped(hidden, attention).reading
        stack = catalog.load("stacks", "megatron-lm").but(allocator_slack=0.0)
        cluster = catalog.load("clusters", "dgx-h100").with_gpus(1)
        _, _, program = lowered(Config(reading.shape.model, cluster, reading.plan, reading.workload, stack))
        return element(program.ranks[0].kept, 0)

    scores, masks = 16 * 16 * 2048**2 * 4, (2 * 16 + 1) * 4 * 2048 * 2048
    assert saved(0.0, 0.1) - saved(0.0, 0.0) == pytest.approx(3 * scores)
    assert saved(0.1, 0.0) - saved(0.0, 0.0) == pytest.approx(masks)
    assert saved(0.1, 0.1) - saved(0.0, 0.0) == pytest.approx(3 * scores + masks)


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_dropout_is_written_where_the_framework_has_it(rate: float) -> None:
    reading = dropped(rate, rate).reading
    config = Config(
        reading.shape.model,
        catalog.load("clusters", "dgx-h100").with_gpus(1),
        reading.plan,
        reading.workload,
        reading.stack,
    )
    written = settings_of(config, FRAMEWORKS["megatron-lm"])
    assert (written.back.facts["hidden_dropout"], written.back.facts["attention_dropout"]) == (rate, rate)
    args = [word for name, value in written.settings.items() if value is not False for word in (name, str(value))]
    moved = migrate(FRAMEWORKS["megatron-lm"], {}, args, FRAMEWORKS["deepspeed"], gpus=1)
    lost = {key.key for key in moved.lost}
    assert {"--hidden-dropout", "--attention-dropout"} & lost == (
        {"--hidden-dropout", "--attention-dropout"} if rate else set()
    )
