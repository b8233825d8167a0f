"""`data prepare` against the tokenizer alone, and how often a training step waits for its batch.

Preparation: the same text through `tokenizers` alone, in one process with as many threads as there are cores (`encode_batch`, the
texts in memory), and through `data prepare` from a file of JSON lines to a token file. Pairs alternate; the median of the
ratios is printed. The goal is at least half the speed.

Loading: a small model trains on the token file without and with the prefetching thread, in turns, since another process on the machine
may double the time of a step. The median time of a step is printed with its CPU time, and that of reading a batch. A step waits if its
batch is not ready when it is asked for; the first step always waits, and is not counted.
"""

import json
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

PAIRS, REPEAT = 3, 2
VOCABULARY = 8192


def texts() -> list[str]:
    """The source files of the standard library, as documents."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.glob("*.py")) + sorted(p for p in root.glob("*/*.py") if "test" not in p.parts[-2])
    return [p.read_text("utf-8", errors="replace") for p in files[:500]]


def train_tokenizer(documents: list[str], path: Path) -> None:
    """A byte-level BPE tokenizer, as GPT-2 and Llama 3 use."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(documents[:150], trainer)
    made.save(str(path))


def tokenize_alone(documents: list[str], tokenizer: Path) -> float:
    import tokenizers

    made = tokenizers.Tokenizer.from_file(str(tokenizer))
    encode = getattr(made, "encode_batch_fast", made.encode_batch)
    start = time.perf_counter()
    for i in range(0, len(documents), 256):
        encode(documents[i : i + 256], add_special_tokens=False)
    return time.perf_counter() - start


def prepared(source: Path, tokenizer: str, out: Path) -> float:
    from meshwright.training.data.prepare.run import prepare

    start = time.perf_counter()
    prepare([source], out, tokenizer)
    return time.perf_counter() - start


def preparation(folder: Path) -> Path:
    documents = texts()
    train_tokenizer(documents, folder / "tokenizer.json")
    documents = documents * REPEAT
    size = sum(len(text.encode("utf-8")) for text in documents) / 1e6
    with (folder / "text.jsonl").open("w", encoding="utf-8") as file:
        for text in documents:
            file.write(json.dumps({"text": text}) + "\n")
    ratios = []
    print(
        f"{size:.1f} MB of text, {len(documents):,} documents, vocabulary {VOCABULARY}, {len(os.sched_getaffinity(0))} cores"
    )
    for i in range(PAIRS):
        alone = tokenize_alone(documents, folder / "tokenizer.json")
        whole = prepared(folder / "text.jsonl", str(folder / "tokenizer.json"), folder / f"tokens-{i}")
        ratios.append(alone / whole)
        print(
            f"  tokenizer alone {size / alone:6.2f} MB/s   data prepare {size / whole:6.2f} MB/s   ratio {ratios[-1]:.2f}"
        )
    plain = prepared(folder / "text.jsonl", "bytes", folder / "bytes")
    print(
        f"data prepare runs at {statistics.median(ratios):.2f} of the speed of the tokenizer alone (goal: at least 0.50)"
    )
    print(f"with bytes in place of a tokenizer: {size / plain:.0f} MB/s")
    return folder / "bytes"


def loading(tokens: Path, steps: int = 60) -> None:
    import torch
    from torch import distributed

    from meshwright.describe.config import Config
    from meshwright.parallel.apply import apply
    from meshwright.training.data.samples import batch_of, training_samples
    from meshwright.training.loop import Trainer

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    plan = {"microbatch": 8, "param_dtype": "fp32", "master": False}
    parts: dict[str, Any] = {
        "model": "nano",
        "cluster": "laptop",
        "workload": {"batch": 16, "seq": 64, "precision": "fp32"},
        "plan": plan,
    }
    config = Config.from_parts(**parts, data={"path": str(tokens), "document_mask": True})
    samples, trainers = training_samples(config, 0), {}
    for ahead in (0, 2):
        parallel = apply(config.model, config.plan, config.workload, 0)
        trainers[ahead] = Trainer(parallel, samples, ahead=ahead)
        trainers[ahead].train(5)
    waits = {ahead: trainer.loader.waits for ahead, trainer in trainers.items()}
    times: dict[int, list[tuple[float, float]]] = {ahead: [] for ahead in trainers}
    for _ in range(steps):
        for ahead, trainer in trainers.items():
            start, used = time.perf_counter(), time.process_time()
            trainer.train(1)
            times[ahead].append((time.perf_counter() - start, time.process_time() - used))
    for ahead, trainer in trainers.items():
        seconds, used = (1e3 * statistics.median(column) for column in zip(*times[ahead], strict=True))
        waited = trainer.loader.waits - waits[ahead]
        words = f"{waited} of {steps} steps waited for their batch" if ahead else "every step reads its batch"
        print(f"{ahead} steps ahead: {seconds:6.1f} ms per step ({used:.1f} ms of CPU time), {words}")
        trainer.loader.close()
    start = time.perf_counter()
    for step in range(steps):
        batch_of(samples, step, range(config.workload.batch), "cpu", torch.float32)
    print(f"reading a batch: {1e3 * (time.perf_counter() - start) / steps:.2f} ms")
    distributed.destroy_process_group()


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        loading(preparation(Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
