"""Generate text on one GPU with a KV cache, beside what `meshwright estimate --decode` predicts; random weights in bf16.

    python benchmarks/gpu/decode.py predict                 before anything is measured; CLUSTER: the file of a calibration
    python benchmarks/gpu/decode.py measure llama3-8b

prefill   one sequence: seconds until the logits of its last token
token     one more token of each sequence behind the context, as a CUDA graph that is replayed at each position, which is what the prediction
          assumes, and as the host issues it. Sequences continue with different tokens, so that they choose different experts

Layers are compiled as `meshwright train` compiles them, all layers of a kind with the same graphs, unless --eager.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

CLUSTER = os.environ.get("CLUSTER", "dgx-h200")
DEVICE = os.environ.get("DEVICE", "cuda")
MODELS, BATCHES = ("llama3-8b", "deepseek-v2-lite"), (1, 8, 64)
ROOM = 64  # positions behind the context


def configuration(name: str, context: int, overrides: list[str]) -> Any:
    from meshwright.describe.config import Config

    words = ["plan.replicate=1", "workload.batch=1", f"workload.seq={context}", f"model.max_positions={context + ROOM}"]
    return Config.from_parts(model=name, cluster=CLUSTER, overrides=[*words, *overrides])


def predicted(name: str, context: int, batches: tuple[int, ...], overrides: list[str]) -> dict[str, Any]:
    from meshwright.predict.decode import decoding

    found = decoding(configuration(name, context, overrides))
    cache = sum(found.cache_bytes.values()) / 2**30
    out: dict[str, Any] = {"model": name, "prefill_s": found.prefill_s, "cache_gib_of_a_sequence": cache}
    for row in found.rows(batches):
        out[f"token_s, batch {row.sequences}"] = row.token_s
        out[f"parts_s, batch {row.sequences}"] = row.parts_s
    return out


def drawn(model: Any) -> Any:
    """The network with random weights on the card."""
    from meshwright.models import build
    from meshwright.parallel.pieces import materialise

    network = build(model).to(torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    materialise(network, DEVICE)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(0.0, 0.02)
    for buffer in network.buffers():
        assert not buffer.is_meta
    return network.requires_grad_(False)


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def median_s(work: Callable[[], Any], repeats: int) -> float:
    """Seconds of a call, the median after two calls."""
    seconds = []
    for _ in range(2 + repeats):
        wait()
        start = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def print_kernels(replay: Callable[[], Any]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        replay()
        wait()
    rows = [e for e in profile.key_averages() if e.device_time_total]
    for row in sorted(rows, key=lambda e: -e.device_time_total)[:14]:
        print(f"    {row.device_time_total / 1e3:8.3f} ms {row.count:5d} × {row.key[:110]}")


def measure(name: str, given: argparse.Namespace) -> None:
    """Times of a prompt and of a token of each batch. The first tokens, captured and not, give the same logits."""
    from meshwright.models.decode import decoding
    from meshwright.parallel.compile import compile_layer, graph_counts, prepare_compiler

    model, context = configuration(name, given.context, given.set).model, given.context
    network = drawn(model)
    ids = torch.randint(0, model.vocab, (1, context), device=DEVICE)
    found: dict[str, Any] = {"model": name, "compiled": not given.eager}
    with decoding(network, context + ROOM) as decoder:
        expected = decoder.prompt(ids).clone(), decoder.token(ids[:, -1]).clone()
        if not given.eager:
            prepare_compiler(torch.device(DEVICE))
            for layer in network.layers.values():
                compile_layer(layer)
        began = time.perf_counter()
        first_logits = decoder.prompt(ids).clone()
        wait()
        found |= {"first_prompt_s": time.perf_counter() - began, "graphs": graph_counts()[0]}
        prefill = median_s(lambda: decoder.prompt(ids), 5)
        size = decoder.bytes / 2**30 * context / (context + ROOM)
        print(json.dumps(found | {"prefill_s": prefill, "cache_gib_of_a_sequence": size}), flush=True)
        errors = [relative(first_logits, expected[0]), relative(decoder.token(ids[:, -1]), expected[1])]
        first = [tuple(x.clone() for x in g.kept) for g in decoder.geometries]
        for batch in given.batches:
            decoder.allocate(batch)
            for geometry, kept in zip(decoder.geometries, first, strict=True):
                for buffer, x in zip(geometry.kept, kept, strict=True):
                    buffer.copy_(x.expand_as(buffer))
            decoder.at = context
            last = torch.cat((ids[0, -1:], torch.randint(0, model.vocab, (batch - 1,), device=DEVICE)))
            issued = tokens_s(decoder, last, context, 10)
            row = found | {"batch": batch, "graphs": graph_counts()[0], "first_logits": errors, "issued_s": issued}
            if DEVICE == "cuda":
                decoder.at = context
                decoder.capture()
                again = relative(decoder.token(last)[:1], expected[1])
                row |= {"token_s": tokens_s(decoder, last, context, 20), "captured_logits": again}
            print(json.dumps(row), flush=True)
            if given.profile and DEVICE == "cuda":
                decoder.at = context
                print_kernels(partial(decoder.token, last))


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of logits over the largest logit."""
    return float((found - expected).abs().max() / expected.abs().max())


def tokens_s(decoder: Any, last: torch.Tensor, context: int, repeats: int) -> float:
    """Seconds of one more token."""
    decoder.at = context
    return median_s(lambda: decoder.token(last), repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("predict", "measure"))
    parser.add_argument("models", nargs="*", help=", ".join(MODELS))
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES)
    parser.add_argument("--set", nargs="*", default=[], help="fields of the run, such as model.layers=1")
    parser.add_argument("--eager", action="store_true", help="layers are not compiled")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    for name in given.models or MODELS:
        if given.part == "predict":
            print(json.dumps(predicted(name, given.context, tuple(given.batches), given.set)), flush=True)
        else:
            measure(name, given)


if __name__ == "__main__":
    main()
