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
from meshwright.interop.recipes import check
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
