"""Decoding token by token with a KV cache is the full forward, in every attention kind, and gives the tokens of transformers."""

import pytest
import torch

from hf_folders import IDS, opened, original, our_network, saved
from meshwright.cost.closed_forms import model_cache
from meshwright.errors import MeshwrightError
from meshwright.models.decode import decoding, generate

FAMILIES = ["llama", "mistral", "gpt2", "gpt_oss", "deepseek_v3", "gemma2", "gemma3", "llama4"]
TOKENS = 8


@pytest.mark.parametrize("case", FAMILIES)
def test_tokens_and_logits(case, tmp_path):
    """Logits of each step against the forward of the whole sequence in float64: rounding in another order. Then the tokens of transformers."""
    weights = opened(saved(case, tmp_path))
    network = our_network(weights, torch.float64)
    tokens = generate(network, IDS, TOKENS)
    whole = torch.cat((IDS, tokens), dim=1)
    with torch.no_grad():
        expected = network(whole)[:, IDS.shape[1] - 1 : -1]
    with decoding(network, whole.shape[1]) as decoder:
        steps = [decoder.prompt(IDS), *(decoder.token(tokens[:, i]) for i in range(TOKENS - 1))]
        kept = decoder.bytes
    difference = (torch.stack(steps, dim=1) - expected).abs().max() / expected.abs().max()
    assert difference < 64 * 2**-53
    assert torch.equal(expected.argmax(-1), tokens)
    with torch.no_grad():
        theirs = original(case).generate(
            IDS,
            attention_mask=torch.ones_like(IDS),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    assert torch.equal(generate(our_network(weights), IDS, TOKENS), theirs[:, IDS.shape[1] :])
    assert kept == model_cache(weights.model, whole.shape[1], len(IDS), 8)


def test_the_network_is_as_before(tmp_path):
    network = our_network(opened(saved("mistral", tmp_path))).train()
    before = network(IDS)
    with decoding(network, 16) as decoder:
        first = decoder.prompt(IDS)
        for _ in range(4):
            decoder.token(IDS[:, 0])
        with pytest.raises(MeshwrightError, match="MW-BUILD-006"):
            decoder.token(IDS[:, 0])
        assert torch.equal(decoder.prompt(IDS), first)  # new sequences
    assert network.training
    assert torch.equal(network(IDS), before)
    network.geometry.model = network.geometry.model.but(causal=False)
    with pytest.raises(MeshwrightError, match="MW-DEC-001"), decoding(network, 16):
        pass


def test_cases_have_what_the_cache_must_tell_apart(tmp_path):
    """Full and windowed layers, chunks, sinks, soft caps, learned positions, temperatures, latents."""
    models = [opened(saved(case, tmp_path / case)).model for case in FAMILIES]
    assert any(m.sinks for m in models)
    assert any(m.window_kind == "chunk" for m in models)
    assert any(m.temperature_scale for m in models)
    assert any(m.attention_softcap for m in models)
    assert {m.positions for m in models} == {"rope", "learned"}
    assert {m.attention for m in models} == {"gqa", "mla"}
