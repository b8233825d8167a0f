"""The guide, parts 7 and 8 (and the volumes of 4.5): data parallelism, compression, ZeRO."""

from figures.cases import GB, MB, compression_ratio, volume
from figures.figure import Figure, rows
from meshwright.cost import advice
from meshwright.cost.memory import largest_model, zero_state_bytes
from meshwright.describe.plan import Plan
from meshwright.lower.program import sent

holds, bound, convention, wrong = rows("guide")
NOMINAL = {
    "ResNet-50": (25e6, "200", "100", "0.5"),
    "BERT-Large": (340e6, "2.7", "1.4", "7"),
    "GPT-2 XL": (1.5e9, "12", "6", "30"),
    "Llama-7B": (7e9, "56", "28", "140"),
    "Llama-70B": (70e9, "560", "280", "1.4"),
}


def ddp() -> list[Figure]:
    many = 1024  # ranks: 2(P−1)/P is 2 to three digits

    def moved(parameters: float, width: int) -> float:
        return float(sent("all_reduce", parameters * width, many))

    out = []
    for name, (parameters, fp32, fp16, seconds) in NOMINAL.items():
        size, unit = (MB, "MB") if name == "ResNet-50" else (GB, "GB")
        scale, tick = (1.0, "s") if name == "Llama-70B" else (1e3, "ms")
        out += [
            holds("7.4", f"{name}: {fp32} {unit} in FP32", fp32, moved(parameters, 4) / size, unit),
            holds("7.4", f"{name}: {fp16} {unit} in FP16", fp16, moved(parameters, 2) / size, unit),
            holds(
                "7.4",
                f"{name}: ~{seconds} {tick} at 200 GB/s",
                seconds,
                scale * moved(parameters, 2) / (200 * GB),
                tick,
            ),
        ]
    # fmt: off
    return [
        *out,
        wrong("4.5", "DDP moves 2N bytes", 2.0, 2 * volume("tiny-gpt", replicate=many), "N bytes", "2N elements, as its own 7.4 says: 4N bytes in 16 bits"),
        holds("7.4", "DDP moves 2 · N · sizeof(dtype)", "2", volume("tiny-gpt", replicate=many), "N elements"),
        holds("7.2, 7.3", "buckets of 25 MB by default", "25", Plan().bucket / MB, "MB", "PyTorch's bucket_cap_mb; ours"),
        holds("7.4", "FP32 Adam: ~16N bytes", "16", zero_state_bytes(1, 1, 0, 4, 4, 8), "B"),
        convention("7.4", "mixed precision: ~18–20N bytes", "18–20", zero_state_bytes(1, 1, 0), "B",
                   "gradients kept in fp32, as in Megatron-LM", zero_state_bytes(1, 1, 0, grad=4), "20 with a 16-bit copy of them; its own 1.2 counts 16"),
        convention("7.4, 8.1", "a 7B model needs ~140 GB per GPU under DDP", "140", zero_state_bytes(7e9, 1, 0) / GB, "GB",
                   "20 bytes per parameter, the upper end of its 18–20N", zero_state_bytes(7e9, 1, 0, grad=6) / GB),
        wrong("7.7", "DDP limit ~5B at 40 GB", "5", largest_model(40e9) / 1e9, "B", "by the 16N bytes that the figure prints"),
        wrong("7.7", "DDP limit ~10B at 80 GB", "10", largest_model(80e9) / 1e9, "B", "by the 16N bytes that the figure prints"),
    ]
    # fmt: on


def compression() -> list[Figure]:
    # fmt: off
    return [
        holds("7.5", "FP32 → FP16: 2×", "2", compression_ratio("fp16"), "×"),
        holds("7.5", "FP32 → INT8: 4×", "4", compression_ratio("int8"), "×", "less its scales"),
        holds("7.5", "FP32 → INT4: 8×", "8", compression_ratio("int4"), "×", "less its scales"),
        convention("7.5", "top-1%: 100×", "100", advice.topk_compression(0.01), "×", "values without indices",
                   advice.topk_compression(0.01, index_bytes=0), "its code also sends int64 indices"),
        bound("7.5", 'all-gathering the top 1% is "much smaller" than the all-reduce', "1+", advice.topk_compression(0.01, ranks=8), "× less",
              "on 8 ranks; the all-gather grows with P and saves nothing from 67 ranks on"),
        holds("7.5", "PowerSGD: 10–100×", "10–100", compression_ratio("powersgd", 4096, 32), "×", "4096² at rank 32; 512× at rank 4"),
    ]
    # fmt: on


def zero() -> list[Figure]:
    def state(stage: int, **bytes_: float) -> float:
        return zero_state_bytes(7e9, 8, stage, **bytes_) / GB

    def old(fixed: float, shared: float) -> float:
        return (fixed + shared / 8) * 7

    three, two = volume("tiny-gpt", zero=3, shard=1024), volume("tiny-gpt", zero=2, shard=1024)
    ddp_volume = volume("tiny-gpt", replicate=1024)
    at, full = "7B on 8 GPUs", "gradients kept in fp32, as in 7.4"
    # fmt: off
    return [
        wrong("8.2", "DDP: 4N + 2N + 12N = 18N bytes", "18", zero_state_bytes(1, 1, 0), "B", "the legend of the same figure counts 2N for parameters"),
        wrong("8.2", "DDP: 140 GB (14 + 14 + 112)", "140", state(0), "GB", f"{at}: 14 + 14 + 84"),
        wrong("8.2", "ZeRO-1: 42 GB (14 + 14 + 14)", "42", state(1), "GB", f"{at}: 14 + 14 + 10.5"),
        wrong("8.2", "ZeRO-2: 30 GB (14 + 1.75 + 14)", "30", state(2), "GB", f"{at}: 14 + 1.75 + 10.5"),
        wrong("8.1, 8.2", "ZeRO-3: 18 GB (1.75 + 1.75 + 14)", "18", state(3), "GB", f"{at}: 1.75 + 1.75 + 10.5"),
        wrong("8.2", "an eighth of the optimizer state: 14 GB", "14", state(1, param=0, grad=0), "GB", f"{at}; it divides the whole state, 112 GB"),
        holds("8.2", "an eighth of the gradients: 1.75 GB", "1.75", state(2, param=0, optimizer=0), "GB", at),
        convention("8.4", "ZeRO-1: ~6N + 12N/P", old(6, 12), state(1), "GB", full, state(1, grad=4), f"{at}; 4N + 12N/P with 16-bit gradients"),
        wrong("8.4", "ZeRO-2: ~4N + 14N/P", old(4, 14), state(2), "GB", f"{at}; 2N + 14N/P, or 2N + 16N/P with fp32 gradients"),
        convention("8.4", "ZeRO-3: ~18N/P", old(0, 18), state(3), "GB", full, state(3, grad=4), f"{at}; 16N/P with 16-bit gradients"),
        holds("8.2, 8.4", "ZeRO-1 moves 2N, as DDP", "2", volume("tiny-gpt", zero=1, shard=1024), "N elements"),
        holds("8.2, 8.4", "ZeRO-2 moves 2N", "2", two, "N elements", "with one micro-batch; it reduces after every micro-batch"),
        holds("8.4", "FSDP moves 3N in all", "3", three, "N elements"),
        wrong("4.5, 8.2", "FSDP moves 3N per layer × layers", "18", three, "N elements",
              "3N over all layers together (here 6): a layer moves its own weights"),
        holds("8.4", "1.5× more than DDP", "1.5", three / ddp_volume, "×"),
    ]
    # fmt: on


def table() -> list[Figure]:
    return [*ddp(), *compression(), *zero()]
