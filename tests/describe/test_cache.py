"""The KV cache of every attention kind against the bytes that transformers keeps after a forward."""

import os

import pytest
from test_hf import ORACLE

from meshwright.cost.closed_forms import model_cache
from meshwright.describe import hf
from meshwright.describe.cache import cache_by_mixer
from meshwright.describe.catalog import load

os.environ["TRANSFORMERS_VERBOSITY"] = "critical"
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SEQ, BATCH = 45, 2
KINDS = [
    "llama",
    "mistral",
    "gemma3_text",
    "gemma3n_text",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "nemotron_h",
    "qwen3_next",
    "jamba",
]


def tensors_of(value) -> list:
    """All tensors that an object of transformers holds."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() and value.numel() else []
    inside = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple)
        else vars(value).values()
        if hasattr(value, "__dict__")
        else ()
    )
    return [tensor for one in inside for tensor in tensors_of(one)]


def kept_by_transformers(family: str, shape: dict, seq: int) -> int:
    """Bytes of the cache after a forward of `seq` tokens. Values that equal the keys are one vector, which some layers hold twice."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **shape)
    network = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        cache = network(
            torch.randint(0, 64, (BATCH, seq)), past_key_values=transformers.DynamicCache(config=network.config)
        ).past_key_values
    total = 0
    for layer in cache.layers:
        distinct: list = []
        for tensor in tensors_of(layer):
            if not any(tensor.shape == other.shape and torch.equal(tensor, other) for other in distinct):
                distinct.append(tensor)
        total += sum(tensor.numel() * tensor.element_size() for tensor in distinct)
    return total


@pytest.mark.parametrize("family", KINDS)
def test_bytes_equal_those_of_transformers(family):
    shape = ORACLE[family][0] | ({"sliding_window": 64} if family in ("mistral", "gemma3_text") else {})
    model = hf.interpret({"model_type": family, **shape})
    assert model_cache(model, SEQ, BATCH, 4) == kept_by_transformers(family, shape, SEQ)


def test_a_full_window_keeps_one_position_more():
    """transformers drops the oldest position of a full window at once: the next token replaces it, as ours does then."""
    shape = ORACLE["mistral"][0]
    model = hf.interpret({"model_type": "mistral", **shape})
    position = model_cache(model, 1, BATCH, 4)
    assert model_cache(model, SEQ, BATCH, 4) == kept_by_transformers("mistral", shape, SEQ) + position == 32 * position


def test_what_the_next_token_reads():
    """An indexer's keys are all read, of the latents only the selected ones; a state is read and written; reused keys are read, not kept."""
    ((number, cache),) = cache_by_mixer(load("models", "deepseek-v3.2"), 65536).values()
    assert (number, cache.elements) == (61, 65536 * (512 + 64 + 128))
    assert cache.read_whole == 2048 * (512 + 64) + 65536 * 128
    hybrid = cache_by_mixer(load("models", "nemotron-h-8b"), 65536)
    assert hybrid["linear"][1] == cache_by_mixer(load("models", "nemotron-h-8b"), 1)["linear"][1]
    assert hybrid["linear"][1].read_by_head == 2 * hybrid["linear"][1].elements
    reused = cache_by_mixer(hf.interpret({"model_type": "gemma3n_text", **ORACLE["gemma3n_text"][0]}), 10)[
        "query, window 512"
    ][1]
    assert reused.elements == 0 < reused.read_by_head
