"""A small training under torch.profiler, healthy or with a known fault: the programs whose traces the tests explain.

    torchrun --nproc-per-node 2 traced_training.py OUT --parallel ddp --fault slow-loader

Writes OUT/FAULT-rank-N.json.gz. On a GPU the model is Transformers' Llama (`--model llama`), on CPU processes a stack of linear layers.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset

FAULTS = ("none", "slow-rank", "item", "no-overlap", "slow-loader", "odd-shape")


class Samples(Dataset):
    """Random inputs; a slow loader sleeps for each batch."""

    def __init__(self, options, llama):
        self.options, self.llama = options, llama

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        if self.options.fault == "slow-loader" and index % self.options.batch == 0:
            time.sleep(self.options.delay)
        generator = torch.Generator().manual_seed(index)
        if self.llama:
            return torch.randint(0, 32000, (self.options.seq,), generator=generator)
        return torch.randn(self.options.hidden, generator=generator)


class Block(nn.Module):
    def __init__(self, hidden, ffn):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class ManySmallProducts(nn.Module):
    """One linear layer as thousands of tiny products: the same sum, at a small part of the rate."""

    def __init__(self, hidden, ffn, width=4):
        super().__init__()
        self.width, self.weight = width, nn.Parameter(torch.randn(hidden // width, width, ffn) / hidden**0.5)

    def forward(self, x):
        parts = x.view(len(x), -1, self.width).transpose(0, 1).contiguous()
        return torch.bmm(parts, self.weight).sum(0)


def build(options, device):
    if options.model == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        ffn = options.ffn - 171 if options.fault == "odd-shape" else options.ffn
        sizes = {"hidden_size": options.hidden, "intermediate_size": ffn, "num_hidden_layers": options.layers}
        config = LlamaConfig(vocab_size=32000, num_attention_heads=16, num_key_value_heads=8, use_cache=False, **sizes)
        with torch.device(device):
            model = LlamaForCausalLM(config).to(torch.bfloat16)
        return model, list(model.model.layers)
    blocks = [Block(options.hidden, options.ffn) for _ in range(options.layers)]
    if options.fault == "odd-shape":
        blocks[-1].up = ManySmallProducts(options.hidden, options.ffn)
    return nn.Sequential(*blocks).to(device), blocks


def plant(options, rank, blocks):
    """Put the faults of a layer in as hooks."""

    def synchronise(module, inputs, output):
        value = (output[0] if isinstance(output, tuple) else output).float().mean().item()
        if value == value and not torch.cuda.is_available():
            time.sleep(
                options.delay / 10
            )  # on a CPU reading a number waits for nothing: the host's work behind it does

    def work_twice(module, inputs):
        with torch.no_grad():
            for _ in range(options.extra):
                module.up(inputs[0])

    for block in blocks:
        if options.fault == "item":
            block.register_forward_hook(synchronise)
        if options.fault == "slow-rank" and rank == 1:
            block.register_forward_pre_hook(work_twice)


def shard(options, model, blocks):
    if options.parallel == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=10_000 if options.fault == "no-overlap" else options.bucket)
    if options.parallel == "fsdp2":
        for block in blocks:
            fully_shard(block)
        fully_shard(model)
    return model


def parsed():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--parallel", default="none", choices=("none", "ddp", "fsdp2", "deepspeed", "trainer"))
    parser.add_argument("--fault", default="none", choices=FAULTS)
    parser.add_argument("--model", default="linear", choices=("linear", "llama"))
    parser.add_argument("--name", default="")
    parser.add_argument("--stacks", action="store_true")
    sizes = {"hidden": 256, "ffn": 1024, "layers": 4, "batch": 256, "seq": 2048, "steps": 3, "bucket": 2, "extra": 8}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--delay", type=float, default=0.1)
    return parser.parse_args()


def plain_loop(options, model, optimizer, samples, device, profiler):
    batches = iter(DataLoader(samples, batch_size=options.batch))
    for _ in range(3 + options.steps):
        x = next(batches).to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = model(input_ids=x, labels=x).loss if options.model == "llama" else model(x).square().mean()
        loss.backward()
        optimizer.step()
        profiler.step()


def deepspeed_loop(options, model, optimizer, samples, device, profiler):
    """ZeRO-2 of DeepSpeed; on CPUs without its compiled collectives."""
    os.environ["DS_ACCELERATOR"] = device
    import sys

    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    batches = iter(DataLoader(samples, batch_size=options.batch))
    for _ in range(3 + options.steps):
        engine.backward(engine(next(batches).to(device)).square().mean())
        engine.step()
        profiler.step()


def trainer_loop(options, model, optimizer, samples, device, profiler):
    """Transformers' Trainer, whose callback marks the steps for the profiler."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Marks(TrainerCallback):
        def on_step_end(self, *_, **__):
            profiler.step()

    class Summed(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **_):
            x = inputs["x"]
            return model(input_ids=x, labels=x).loss if options.model == "llama" else model(x).square().mean()

    arguments = TrainingArguments(
        output_dir=str(options.out / "trainer"), max_steps=3 + options.steps, per_device_train_batch_size=options.batch, report_to=[],
        save_strategy="no", use_cpu=device == "cpu", remove_unused_columns=False, disable_tqdm=True, ddp_bucket_cap_mb=options.bucket,
    )  # fmt: skip
    trainer = Summed(
        model,
        arguments,
        train_dataset=samples,
        data_collator=lambda rows: {"x": torch.stack(rows)},
        callbacks=[Marks()],
    )
    trainer.train()


LOOPS = {"deepspeed": deepspeed_loop, "trainer": trainer_loop}


def main():
    options = parsed()
    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    rank = int(os.environ.get("RANK", 0))
    torch.manual_seed(rank)
    if not gpu:
        torch.set_num_threads(1)
    if options.parallel not in ("none", "trainer"):
        distributed.init_process_group("nccl" if gpu else "gloo")
    model, blocks = build(options, device)
    plant(options, rank, blocks)
    model = shard(options, model, blocks)
    optimizer = torch.optim.AdamW(model.parameters(), fused=gpu)
    samples = Samples(options, options.model == "llama")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    plan = schedule(wait=2, warmup=1, active=options.steps, repeat=1)
    with profile(activities=activities, record_shapes=True, with_stack=options.stacks, schedule=plan) as profiler:
        LOOPS.get(options.parallel, plain_loop)(options, model, optimizer, samples, device, profiler)
        if gpu:
            torch.cuda.synchronize()
    options.out.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(options.out / f"{options.name or options.fault}-rank-{rank}.json.gz"))
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
