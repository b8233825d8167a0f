"""Train adapters on one GPU through our trainer, side by side with PEFT on Transformers (and bitsandbytes), on random weights.

    python benchmarks/gpu/adapters.py predict                       before anything is measured; CLUSTER: the file of a calibration
    python benchmarks/gpu/adapters.py ours lora-8b                  LoRA beside a base in bf16
    python benchmarks/gpu/adapters.py peft lora-8b [--compile]      the same with PEFT
    python benchmarks/gpu/adapters.py ours lora-8b-fp8              the base in fp8, which its products take as it is; PEFT has nothing like it
    python benchmarks/gpu/adapters.py ours qlora-70b                QLoRA: the base in nf4 with double quantisation
    python benchmarks/gpu/adapters.py ours qlora-70b-part           the same; 20 of 80 layers are recomputed. PEFT recomputes all or none
    python benchmarks/gpu/adapters.py peft qlora-70b [--compile]

Weights are drawn on the card, those of a quantised base one matrix after the other. Each call prints one JSON line; `--profile` also the kernels of
one more step. PEFT keeps its adapters in fp32 and runs under autocast, as `Trainer(bf16=True)` does; `--compile` compiles each layer.
"""

import argparse
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

CLUSTER = os.environ.get("CLUSTER", "dgx-h200")
DEVICE = os.environ.get("DEVICE", "cuda")
WARMUP = 3


@dataclass(frozen=True)
class Case:
    """What both train: a model of the catalog, its adapter, and sequences of a step."""

    model: str
    batch: int
    seq: int
    targets: tuple[str, ...] = ()  # empty: q and v, PEFT's default for Llama
    base: str = "plain"
    recompute: str = "none"
    layers: int = 0  # that are recomputed; 0: all
    rank: int = 16


CASES = {
    "lora-8b": Case("llama3-8b", 2, 4096),
    "lora-8b-fp8": Case("llama3-8b", 2, 4096, base="fp8"),
    "lora-8b-all": Case("llama3-8b", 2, 4096, ("all-linear",)),
    "qlora-70b": Case("llama3-70b", 1, 4096, ("all-linear",), "nf4", "full"),
    "qlora-70b-part": Case("llama3-70b", 1, 4096, ("all-linear",), "nf4", "full", layers=20),
    "qlora-70b-kept": Case("llama3-70b", 1, 4096, ("all-linear",), "nf4"),
}


def measured(step: Callable[[], Any], steps: int, tokens: int) -> dict[str, Any]:
    """The median step after the warm-up, and the peak of tensors since."""
    seconds = []
    for i in range(WARMUP + steps):
        if i == WARMUP and DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[WARMUP:])
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0
    found = {"step_s": median, "tokens_per_s": tokens / median, "peak_gib": peak}
    return found | {"first_s": seconds[0], "steps_s": [round(s, 4) for s in seconds[WARMUP:]]}


def print_kernels(step: Callable[[], Any]) -> None:
    """The kernels of one step: the time of each group, and the longest ones."""
    from meshwright.explain.kernels import group_of

    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    times, counts = Counter[str](), Counter[str]()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Pro"):
            times[event.name] += event.device_time_total
            counts[event.name] += 1
    groups = Counter[str]()
    for name, us in times.items():
        groups[group_of(name)] += us
    print("    " + ", ".join(f"{name} {us / 1e3:.1f} ms" for name, us in groups.most_common()))
    for name, us in times.most_common(22):
        print(f"    {us / 1e3:9.2f} ms {counts[name]:6d} × {name[:110]}")


# Ours


class CardWeights:
    """Weights drawn on the card."""

    def read(self, name: str, full: Sequence[int], start: Sequence[int], shape: Sequence[int]) -> Tensor:
        value = torch.empty(tuple(full), dtype=torch.float32 if "lora" in name else torch.bfloat16, device=DEVICE)
        if name.endswith("lora_b.weight"):
            return value.zero_()
        return value.fill_(1.0) if len(full) == 1 else value.normal_(0.0, 0.02)


class RandomTokens:
    def __init__(self, vocabulary: int, seq: int) -> None:
        self.vocabulary, self.seq = vocabulary, seq

    def sample(self, step: int, index: int) -> tuple[np.ndarray, ...]:
        tokens = np.random.default_rng((step, index)).integers(0, self.vocabulary, self.seq + 1)
        return tokens[:-1], tokens[1:]


def configuration(case: Case, overrides: list[str]) -> Any:
    """The run of a case with our trainer."""
    from meshwright.describe.config import Config
    from meshwright.training.run import completed

    words = [f"adapter.rank={case.rank}", f"plan.microbatch={case.batch}", f"plan.recompute={case.recompute}"]
    words += [f"workload.batch={case.batch}", f"workload.seq={case.seq}", f"model.max_positions={case.seq}"]
    words += [f"adapter.targets={','.join(case.targets)}"] if case.targets else []
    words += {
        "nf4": ["adapter.base=nf4", "adapter.double_quantised=true"],
        "fp8": ["adapter.base=fp8", "workload.precision=fp8", "workload.scaling=row"],
    }.get(case.base, [])
    words += [f"plan.recompute_layers={case.layers}"] if case.layers else []
    words += ["plan.grad_dtype=bf16", "checkpoint.keep=0", *overrides]
    return completed(Config.from_parts(model=case.model, cluster=CLUSTER, overrides=words), WARMUP + 8)


def predicted(case: Case, overrides: list[str]) -> dict[str, Any]:
    from meshwright.predict.prediction import predict

    p = predict(configuration(case, overrides))
    left_out = ("context", "slack")
    stages = [sum(v for k, v in stage.items() if k not in left_out) for stage in p.memory_by_stage]
    return {"predicted_s": p.step_time_s, "predicted_gib": max(stages), "parts_s": dict(p.exposed_s)}


def ours(case: Case, steps: int, profile: bool, overrides: list[str]) -> dict[str, Any]:
    import torch.distributed as dist

    from meshwright.parallel.apply import apply
    from meshwright.parallel.numerics.precision import DTYPES
    from meshwright.training.loop import Trainer

    config = configuration(case, overrides)
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    dtype, device = DTYPES[config.plan.param_dtype], "cuda:0" if DEVICE == "cuda" else DEVICE
    began = time.perf_counter()
    options: dict[str, Any] = {"device": device, "dtype": dtype, "weights": CardWeights()}
    parallel = apply(config.model, config.plan, config.workload, 0, compile=config.run.compile, **options)
    built = time.perf_counter() - began
    trainer = Trainer(parallel, RandomTokens(config.model.vocab, case.seq), config.optimizer, ahead=2)
    found = measured(trainer.train_step, steps, case.batch * case.seq) | {"built_s": built}
    if profile:
        print_kernels(trainer.train_step)
    trainer.loader.close()
    return found


# PEFT


def peft_model(case: Case, compile_layers: bool, recompute: bool, overrides: list[str]) -> Any:
    """A Llama of Transformers with PEFT's adapters; a quantised base is built layer by layer."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    m = configuration(case, overrides).model
    settings: dict[str, Any] = {
        "hidden_size": m.hidden, "intermediate_size": m.ffn, "num_hidden_layers": m.layers, "vocab_size": m.vocab,
        "num_attention_heads": m.heads, "num_key_value_heads": m.kv_heads, "max_position_embeddings": case.seq,
        "tie_word_embeddings": False, "attn_implementation": "sdpa", "use_cache": False,
    }  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model = LlamaForCausalLM(LlamaConfig(**settings | ({"num_hidden_layers": 1} if case.base == "nf4" else {})))
        if case.base == "nf4":
            made = [quantised(LlamaDecoderLayer(model.config, i)) for i in range(m.layers)]
            model.model.layers = nn.ModuleList(made)
            model.config.num_hidden_layers, model.is_loaded_in_4bit = m.layers, True
    torch.set_default_dtype(torch.float32)
    targets: Any = case.targets[0] if case.targets else ["q_proj", "v_proj"]
    wrapped = get_peft_model(model, LoraConfig(r=case.rank, lora_alpha=case.rank, target_modules=targets))
    if recompute:
        wrapped.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        wrapped.enable_input_require_grads()
    if compile_layers:
        for layer in model.model.layers:
            layer.compile()
    wrapped.train()
    return wrapped


def quantised(layer: nn.Module) -> nn.Module:
    """A layer whose linear modules are bitsandbytes' in nf4 with double quantisation."""
    import bitsandbytes as bnb

    for parent in [*layer.modules()]:
        for name, child in [*parent.named_children()]:
            if isinstance(child, nn.Linear):
                kind = {"quant_type": "nf4", "compress_statistics": True}
                new = bnb.nn.Linear4bit(
                    child.in_features, child.out_features, False, torch.bfloat16, device="meta", **kind
                )
                data = child.weight.data.normal_(0.0, 0.02)
                new.weight = bnb.nn.Params4bit(data, requires_grad=False, module=new, **kind).to(DEVICE)
                setattr(parent, name, new)
    return layer


def peft(case: Case, given: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    torch.set_float32_matmul_precision("high")
    model = peft_model(case, given.compile, case.recompute == "full" or given.checkpointing, overrides)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    vocabulary = model.config.vocab_size

    def step() -> None:
        ids = torch.randint(0, vocabulary, (case.batch, case.seq), device=DEVICE)
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    found = measured(step, given.steps, case.batch * case.seq) | {"trained": sum(p.numel() for p in trained)}
    if given.profile:
        print_kernels(step)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contender", choices=("predict", "ours", "peft"))
    parser.add_argument("cases", nargs="*", help=", ".join(CASES))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=0, help="fewer layers: to fill the compiler's cache")
    parser.add_argument("--set", nargs="*", default=[], help="fields of the run, such as plan.recompute=full")
    parser.add_argument("--compile", action="store_true", help="PEFT: compile each layer")
    parser.add_argument("--checkpointing", action="store_true", help="PEFT: recompute each layer")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    overrides = [*given.set, *([f"model.layers={given.layers}"] if given.layers else [])]
    for name in given.cases or CASES:
        case = CASES[name]
        if given.contender == "predict":
            found = predicted(case, overrides)
        elif given.contender == "ours":
            found = ours(case, given.steps, given.profile, overrides)
        else:
            found = peft(case, given, overrides)
        options = [o for o in ("compile", "checkpointing") if getattr(given, o)] + overrides
        print(json.dumps({"contender": given.contender, "case": name, "options": options} | found), flush=True)


if __name__ == "__main__":
    main()
