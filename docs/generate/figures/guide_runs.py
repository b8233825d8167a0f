"""The guide, part 12: published training runs, and the closing table of volumes."""

from figures.cases import GB, MB, boundary, calls, layer_bytes, lowered, model, traffic, volume
from figures.figure import Figure, rows
from meshwright.describe.plan import Plan
from meshwright.lower.program import scalar

holds, _, convention, wrong = rows("guide")
PRINTED = {"llama-65b": 65.2, "llama2-70b": 70.0}  # billions, as in the tables of the papers

# GPU-hours as their makers published them: LLaMA (Touvron et al. 2023, table 15), Llama 2 (Touvron et al. 2023b, table 2), and
# DeepSeek-V2 (2024, section 3.2.3: 172.8 thousand H800 hours a trillion tokens).
GPU_HOURS = {
    "llama-7b": 82_432,
    "llama-13b": 135_168,
    "llama-33b": 530_432,
    "llama-65b": 1_022_362,
    "llama2-70b": 1_720_320,
}
DEEPSEEK_V2_HOURS = 172_800 * 8.1
H800_HOUR = 2.0  # US dollars, the price DeepSeek's reports assume


def gpt3() -> list[Figure]:
    shape = model("gpt3-175b")
    program = lowered("gpt3-175b", 2048, tp=8, pp=8)
    shards = shape.total / 64 * 2
    # fmt: off
    return [
        holds("12.1", "GPT-3: 175 billion parameters", "175", shape.total / 1e9, "B"),
        holds("12.1", "96 layers of 12,288, 96 heads: 175B", "96", shape.layers, "layers", "Brown et al. 2020, table 2.1"),
        convention("12.1", "TP: ≈ 400 MB a layer", "400", layer_bytes(program, "tp") / MB, "MB", "2 for the ring's 2(T−1)/T, as it prints",
                   4 * 2 * 2048 * 12288 * 2 / MB, "1.75 at T = 8; 9.5 prints 175 MB for the same layer"),
        holds("12.1", "PP: ≈ 50 MB per stage boundary", "50", boundary(program) / MB, "MB"),
        wrong("12.1", "DP: 175B / PP ≈ 22B parameters", "22", shape.total / 64 / 1e9, "B", "tensor parallelism divides them by 8 again; 22B is a whole stage of 8 GPUs"),
        wrong("12.1", "… ≈ 44 GB", "44", shards / GB, "GB", "gradients of one GPU in 16 bits; a ring sends 2(D−1)/D of it"),
    ]
    # fmt: on


def llama() -> list[Figure]:
    def days(name: str, gpus: int) -> float:
        return GPU_HOURS[name] / gpus / 24

    source = "Touvron et al. 2023, table 15"
    # fmt: off
    return [
        holds("12.2", "LLaMA-7B: 6.7B", "6.7", model("llama-7b").total / 1e9, "B"),
        holds("12.2", "LLaMA-13B: 13B", "13", model("llama-13b").total / 1e9, "B"),
        holds("12.2", "LLaMA-33B: 32.5B", "32.5", model("llama-33b").total / 1e9, "B"),
        convention("12.2", "LLaMA-65B: 65.2B", "65.2", model("llama-65b").total / 1e9, "B", "the size in its paper", PRINTED["llama-65b"],
                   "digits cut off, not rounded"),
        convention("12.2", "LLaMA-2 70B: 70B", "70", model("llama2-70b").total / 1e9, "B", "the size in its paper and name", PRINTED["llama2-70b"]),
        wrong("12.2", "LLaMA-7B: ~21 days on ~1,000 A100", "21", days("llama-7b", 1000), "days", f"82,432 GPU-hours; {source}"),
        wrong("12.2", "LLaMA-13B: ~29 days on ~1,000", "29", days("llama-13b", 1000), "days", f"135,168 GPU-hours; {source}"),
        wrong("12.2", "LLaMA-33B: ~53 days on ~1,000", "53", days("llama-33b", 1000), "days", f"530,432 GPU-hours; {source}"),
        holds("12.2", "LLaMA-65B: ~21 days on ~2,000", "21", days("llama-65b", 2000), "days", f"1,022,362 GPU-hours; {source}"),
        holds("12.2", "LLaMA-2 70B: ~1.7M GPU-hours", "1.7", GPU_HOURS["llama2-70b"] / 1e6, "M hours", "Touvron et al. 2023b, table 2"),
    ]
    # fmt: on


def experts() -> list[Figure]:
    mixtral, deepseek = model("mixtral-8x7b"), model("deepseek-v2")
    expert = mixtral.parameters()["experts"] / 8
    active = deepseek.active - deepseek.padded_vocab * deepseek.hidden
    routed = lowered("mixtral-8x7b", 4096, 8, ep=8, replicate=8)
    dispatch = next(op for phase, op in routed.ops("moe") if op.name == "dispatch")
    # fmt: off
    return [
        convention("12.3", "Mixtral: 8 experts of ~7B each", "7", expert / 1e9, "B",
                   "one expert with the layers that all experts share, as in the model's name", (mixtral.total - 7 * expert) / 1e9),
        holds("12.3", "Mixtral: 46.7B in total", "46.7", mixtral.total / 1e9, "B"),
        holds("12.3", "Mixtral: 12.9B active", "12.9", mixtral.active / 1e9, "B"),
        holds("12.3", "Mixtral: EP = 8, one expert a GPU", "1", mixtral.experts / Plan(ep=8, replicate=8).ep, "expert"),
        wrong("12.3", "Mixtral: ~4 · B·S·H per MoE layer", "4", layer_bytes(routed, "ep", "moe") / (2 * 4096 * mixtral.hidden), "B·S·H",
              "its top-2 routing, stated two lines above, sends twice that"),
        wrong("12.3", "dispatch is ~B·S·H bytes", 1.0, scalar(dispatch.message_bytes) / (4096 * mixtral.hidden), "B·S·H bytes",
              "two experts per token, two bytes per element"),
        holds("12.4", "DeepSeek-V2: 236B", "236", deepseek.total / 1e9, "B"),
        holds("12.4", "DeepSeek-V2: 21B active", "21", active / 1e9, "B", "without the input embedding"),
        wrong("12.4", "DeepSeek-V2: training cost ~$5.5M", "5.5", DEEPSEEK_V2_HOURS * H800_HOUR / 1e6, "M$",
              "172,800 H800 hours a trillion tokens (its report) × 8.1T × $2; 5.5 is V3's"),
        wrong("12.4", "DeepSeek-V2: pipeline_parallel 1", "1", 16, "stages",
              "16-way zero-bubble pipeline, 8-way experts, ZeRO-1 (its report, section 3.1.3)"),
    ]
    # fmt: on


def volumes() -> list[Figure]:
    program = lowered("gpt3-175b", 2048, tp=8, pp=8)
    element = 2 * 2048 * 12288
    untied = model("gpt3-175b").but(tied=False)  # the first and the last stage would sum the embedding's gradient
    middle = traffic("pp", untied, 2048, 32, pp=8) / (32 * element)
    # fmt: off
    return [
        holds("12.6", "DDP 2N", "2", volume("tiny-gpt", replicate=1024), "N elements"),
        holds("12.6", "FSDP 3N", "3", volume("tiny-gpt", zero=3, shard=1024), "N elements"),
        convention("12.6", "tensor parallel 4 × L × BSH", "4", layer_bytes(program, "tp") / element, "L·BSH",
                   "bytes reduced, without the ring's factor 2(T−1)/T, as in 12.1", calls(program, "FI"),
                   "4 · 2(T−1)/T in 9.5, here T = 8; the DDP row of the same table counts the factor"),
        holds("12.6", "pipeline 2 × M × BSH", "2", middle, "M·BSH", "a middle stage sends one message each way"),
    ]
    # fmt: on


def table() -> list[Figure]:
    return [*gpt3(), *llama(), *experts(), *volumes()]
