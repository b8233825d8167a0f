"""Generate text on one GPU with a KV cache, beside what `meshwright estimate --decode` predicts; random weights in bf16.

    python benchmarks/gpu/decode.py predict                 before anything is measured; CLUSTER: the file of a calibration
    python benchmarks/gpu/decode.py measure llama3-8b

prefill   one sequence: seconds until the logits of its last token, with compiled layers and eager
token     one more token of each sequence behind the context: the forward with compiled layers as a CUDA graph that is replayed at this
          position, which is what the prediction assumes, and the eager forward, which waits for the host
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
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


def captured(work: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a CUDA graph; the call itself on a CPU."""
    if DEVICE != "cuda":
        return work
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def print_kernels(replay: Callable[[], Any]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        replay()
        wait()
    rows = [e for e in profile.key_averages() if e.device_time_total]
    for row in sorted(rows, key=lambda e: -e.device_time_total)[:14]:
        print(f"    {row.device_time_total / 1e3:8.3f} ms {row.count:5d} × {row.key[:110]}")


def measure(name: str, context: int, batches: tuple[int, ...], overrides: list[str], profile: bool) -> None:
    from meshwright.models.decode import decoding
    from meshwright.parallel.compile import compile_experts, compiled, prepare_compiler

    model = configuration(name, context, overrides).model
    network = drawn(model)
    ids = torch.randint(0, model.vocab, (1, context), device=DEVICE)
    with decoding(network, context + ROOM) as decoder:
        for compiles in (False, True):
            if compiles:
                prepare_compiler(torch.device(DEVICE))
                for layer in network.layers.values():
                    if layer.expert:
                        compile_experts(layer.moe)
                    layer.forward = compiled(layer.forward, one_graph=False)  # attention is called between two graphs
            found: dict[str, Any] = {"model": name, "compiled": compiles}
            prefill = median_s(lambda: decoder.prompt(ids), 5)
            size = decoder.geometry.bytes / 2**30 * context / (context + ROOM)
            print(json.dumps(found | {"prefill_s": prefill, "cache_gib_of_a_sequence": size}), flush=True)
            first = decoder.geometry.caches
            for batch in batches:
                last = ids[0, -1:].expand(batch)
                decoder.geometry.caches = [tuple(x.repeat(batch, 1, 1, 1) for x in layer) for layer in first]  # type: ignore[misc]

                def token(last: torch.Tensor = last) -> None:
                    decoder.at = context
                    decoder.token(last)

                print(json.dumps(found | {"batch": batch} | token_times(token, compiles, profile)), flush=True)
            decoder.geometry.caches = first


def token_times(token: Callable[[], Any], compiles: bool, profile: bool) -> dict[str, Any]:
    """Seconds of one more token: as the host issues it, and with compiled layers as a CUDA graph."""
    found: dict[str, Any] = {"issued_s": median_s(token, 10)}
    if compiles:
        try:
            replay = captured(token)
            found["token_s"] = median_s(replay, 20)
            if profile:
                print_kernels(replay)
        except RuntimeError as error:
            found["not_captured"] = str(error)[:300]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("predict", "measure"))
    parser.add_argument("models", nargs="*", help=", ".join(MODELS))
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES)
    parser.add_argument("--set", nargs="*", default=[], help="fields of the run, such as model.layers=1")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    for name in given.models or MODELS:
        if given.part == "predict":
            print(json.dumps(predicted(name, given.context, tuple(given.batches), given.set)), flush=True)
        else:
            measure(name, given.context, tuple(given.batches), given.set, given.profile)


if __name__ == "__main__":
    main()
