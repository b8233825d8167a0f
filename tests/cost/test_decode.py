"""Generating text: what a token reads, where its time goes, and published rates."""

import json
import statistics

import jsonschema_rs
import pytest

from meshwright import api
from meshwright.cli import main
from meshwright.cost.closed_forms import model_cache
from meshwright.cost.collective import CollectiveTimes
from meshwright.describe.catalog import load
from meshwright.errors import MeshwrightError
from meshwright.view.json_schema import output_schema


def decoded(model, cluster, gpus, tp, seq=128, *settings):
    words = [f"plan.tp={tp}", f"plan.replicate={gpus // tp}", *settings]
    return api.decode(model, cluster, gpus=gpus, seq=seq, set=words)


# pytorch-labs/gpt-fast, README.md at 0f925b5d: tokens/s of one sequence in bf16 after a short prompt, A100-80GB, compiled, by GPUs.
PUBLISHED = {
    ("llama2-7b", 1): 104.9, ("llama2-7b", 2): 168.84, ("llama2-7b", 4): 254.02, ("llama2-7b", 8): 328.43,
    ("llama2-70b", 2): 21.32, ("llama2-70b", 4): 38.01, ("llama2-70b", 8): 62.50,
}  # fmt: skip


def test_published_rates_of_one_sequence():
    errors = []
    for (model, tp), rate in PUBLISHED.items():
        errors.append(abs(1 / decoded(model, "dgx-a100", tp, tp).rows((1,))[0].token_s / rate - 1))
    assert statistics.median(errors) < 0.12
    assert max(errors) < 0.35


def test_published_bytes_of_a_token():
    """Zhao et al. 2025, "Insights into DeepSeek-V3" (arXiv 2505.09343), table 1: KV cache per token in bf16."""
    published = {"deepseek-v3": 70_272, "qwen2.5-72b": 327_680, "llama3.1-405b": 516_096}
    assert {name: model_cache(load("models", name), 1) for name in published} == published


# deepseek-ai/DeepEP, docs/legacy.md at 0297fc80: seconds of combining 128 tokens of 8 experts (bf16, 7168 wide) by its low-latency kernels, H800
# with a card of 400 Gb/s each, by expert-parallel ranks.
COMBINED = {8: 114e-6, 16: 195e-6, 32: 273e-6, 64: 314e-6, 128: 369e-6, 256: 360e-6}


def exchanges(ep, sequences, cluster="dgx-h800"):
    """DeepSeek-V3 by expert parallelism alone, and the seconds of one message of its tokens."""
    settings = [f"plan.replicate={ep}", f"plan.ep={ep}", "workload.precision=fp8"]
    d = api.decode("deepseek-v3", cluster, gpus=ep, seq=4096, set=settings)
    program = d.tokens_program((sequences,))
    network = CollectiveTimes(d.config.cluster, program.batch)
    combine = next(op for op in program.blocks["moe", "F"] if op.name == "combine")
    return d, float(d._message_time(network, combine)[0])


def test_published_times_of_exchanges_of_few_tokens():
    """Inside a node theirs goes through the network cards as well: ours is 30% faster."""
    errors = {ep: exchanges(ep, 128)[1] / seconds - 1 for ep, seconds in COMBINED.items()}
    assert errors.pop(8) == pytest.approx(-0.3, abs=0.05)
    assert max(map(abs, errors.values())) < 0.1


@pytest.mark.parametrize(("cluster", "ep", "limit_s"), [("dgx-h800", 256, 14.76e-3), ("gb200-nvl72", 64, 0.82e-3)])
def test_published_limit_of_decoding(cluster, ep, limit_s):
    """arXiv 2505.09343, section 2.3.2: twice 32 tokens of each device, an expert on each, 9 copies of 7K numbers, one byte there and two back, at
    the full rate of a 400 Gb/s card (50 GB/s) or of NVL72 (900 GB/s), in 61 layers. Our 64 tokens take no less: we send 8 copies, two bytes
    there and two back, in 58 layers, at the rate that links reach."""
    d, combine_s = exchanges(ep, 64, cluster)
    spent = d.rows((64,))[0].parts_s["communication"]
    assert spent > limit_s
    model, network = d.config.model, d.config.cluster
    inside = min(network.node_size, ep)
    level, peers = (0, ep - 1) if inside == ep else (1, ep - inside)
    rate, sent = network.device_bandwidth(level), 2 * 2 * 64 * model.top_k * model.hidden * peers / ep
    assert 58 * sent / rate < spent < 58 * (sent / rate + 4e-5)
    assert combine_s < 0.55 * spent / 58


def test_a_token_reads_the_weights_once_and_its_own_cache():
    """Against a count of parameters and elements: all weights but the rows of the embedding, and K and V of all positions."""
    d = decoded("llama2-7b", "dgx-a100", 1, 1, 4096)
    model, device = d.config.model, d.config.cluster.accelerator
    read = 2 * (model.total - model.vocab * model.hidden)
    cache = 2 * 2 * 4096 * 4096 * 32  # K and V, bytes, positions, width, layers
    one, many = d.rows((1, 16))
    bandwidth = device.efficiency.memory * device.memory_bandwidth
    assert d.cache_bytes == {"attention": cache}
    assert one.traffic_s * bandwidth == pytest.approx(read + cache, rel=2e-3)
    assert (many.traffic_s - one.traffic_s) * bandwidth == pytest.approx(15 * cache, rel=2e-2)
    assert many.arithmetic_s == pytest.approx(16 * one.arithmetic_s)
    assert sum(one.parts_s.values()) == pytest.approx(one.token_s)


def test_frozen_weights_are_weights():
    """Adapters are merged into a plain base. One in nf4 has 4.5 bits per number of the layers: 4 and a 32-bit scale for each 64."""
    plain, merged, packed = (
        decoded("llama3-8b", "dgx-h100", 8, 8, 4096, *settings)
        for settings in ((), ("adapter.rank=16",), ("adapter.rank=16", "adapter.base=nf4", "adapter.targets=q_proj"))
    )
    assert merged.table[0] == plain.table[0]
    attention, ffn = 4096 * (2 * 4096 + 2 * 1024), 3 * 4096 * 14336
    layers, adapters = 32 * (attention + ffn), 32 * 16 * (4096 + 4096 / 8)  # B is cut, A is whole
    expected = plain.weights_gib * 2**30 + layers / 8 * (4.5 / 8 - 2) + adapters * 2
    assert packed.weights_gib * 2**30 == pytest.approx(expected, rel=1e-12)


def test_one_token_reads_only_its_experts():
    """Mixtral reads 2 of 8 experts for one token, and all of them for many."""
    d = decoded("mixtral-8x7b", "dgx-h100", 8, 8)
    experts = d.config.model.parameters()["experts"]
    other = d.config.model.active - 2 / 8 * experts - 32000 * 4096
    device = d.config.cluster.accelerator
    one, many = (row.traffic_s * 8 * device.efficiency.memory * device.memory_bandwidth / 2 for row in d.rows((1, 256)))
    assert one == pytest.approx(other + 2 / 8 * experts, rel=0.02)
    assert many == pytest.approx(other + experts, rel=0.15)


def test_tensor_parallelism_divides_heads_and_not_latents():
    bytes_of_rank = [decoded("llama3-70b", "dgx-h100", 16, tp, 4096)._cache_of_rank() for tp in (1, 8, 16)]
    assert bytes_of_rank == [bytes_of_rank[0], bytes_of_rank[0] / 8, bytes_of_rank[0] / 8]  # 8 groups of heads
    latent = [decoded("deepseek-v2", "dgx-h100", 8, tp, 4096)._cache_of_rank() for tp in (1, 8)]
    assert latent[0] == latent[1]


def test_the_batch_at_which_decoding_is_bound_by_compute():
    d = decoded("llama2-7b", "dgx-h100", 1, 1, 16)
    at = d.compute_bound_sequences
    before, after = d.rows((at - 1, at))
    assert (before.bound_by, after.bound_by) == ("memory", "compute")
    assert decoded("llama2-7b", "dgx-h100", 1, 1, 32768).compute_bound_sequences is None
    short, long = (
        decoded("nemotron-h-8b", "dgx-h100", 1, 1, seq).rows((1,))[0].parts_s["cache"] for seq in (1024, 131072)
    )
    assert long < 16 * short  # its states do not grow


def test_more_sequences_do_not_fit_and_prompts_are_forwards():
    d = decoded("llama3-8b", "dgx-h100", 1, 1, 8192)
    assert [row.fits for row in d.rows((d.most_sequences, d.most_sequences + 1))] == [True, False]
    flops = 2 * (d.config.model.total - d.config.model.vocab * d.config.model.hidden) * 8192
    peak = d.config.cluster.accelerator.peak_for("bf16")
    assert 0.35 < flops / peak / d.prefill_s < 0.8


@pytest.mark.parametrize(("arguments", "code"), [
    (["resnet-50"], "MW-DEC-001"), (["bert-large"], "MW-DEC-001"), (["llama3-8b", "--set", "plan.pp=8"], "MW-DEC-002"),
    (["llama3-8b", "--set", "plan.tp=3"], "MW-PLAN-005"), (["llama3-8b", "--html", "x.html"], "MW-CLI-003"),
    (["llama3-8b", "--batch", "8"], "MW-CLI-003"),
])  # fmt: skip
def test_bad_questions(arguments, code, capsys):
    with pytest.raises(SystemExit):
        main(["estimate", *arguments, "--cluster", "dgx-h100", "--gpus", "8", "--decode", "--json"])
    output = capsys.readouterr()
    assert code in output.out + output.err
    if code == "MW-DEC-002":
        assert "plan.replicate=8" in output.out


def test_the_output_follows_its_schema(capsys):
    with pytest.raises(SystemExit):
        main(
            [
                "estimate",
                "deepseek-v2-lite",
                "--cluster",
                "dgx-h100",
                "--gpus",
                "2",
                "--seq",
                "4096",
                "--decode",
                "--json",
            ]
        )
    found = json.loads(capsys.readouterr().out)
    jsonschema_rs.validate(output_schema("decode"), found)
    assert {(one["tp"], one["ep"]) for one in found["alternatives"]} == {(1, 1), (2, 1), (1, 2), (2, 2)}
    with pytest.raises(SystemExit):
        main(["estimate", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "1", "--decode"])
    assert "does not fit" not in capsys.readouterr().out


def test_a_model_that_fits_nowhere_says_so():
    d = api.decode("llama3.1-405b", "dgx-h100", gpus=1, seq=1024)
    assert d.most_sequences == 0
    assert not d.table[0].fits
    with pytest.raises(MeshwrightError):
        api.decode("llama3-8b", "dgx-h100", gpus=8, set=["plan.cp=8"])
