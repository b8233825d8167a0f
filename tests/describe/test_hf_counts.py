"""Parameter counts of Hugging Face configs against Transformers, which builds each model on the meta device."""

import json
import os
import re
from functools import cache

import pytest

from meshwright.describe import hf
from meshwright.describe.catalog import load
from meshwright.errors import MeshwrightError

os.environ["TRANSFORMERS_VERBOSITY"] = "critical"
transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

# Layers of the small variant of a default config, where four are too few for its other fields.
LAYERS = {"gemma3n_text": 20}
# What a default config lacks: deepseek_v2 has no number of experts per token.
NEEDED = {"deepseek_v2": {"num_experts_per_tok": 6}}
TOWERS = {
    "gemma3",
    "gemma3n",
    "got_ocr2",
    "moss_transcribe_diarize",
}  # they count a tower as well, or need one that is not installed
READ = {"opt", "bloom", "falcon", "cohere", "cohere2", "glm4", "minimax_m2", "qwen3_5", "qwen3_5_moe", "gemma3n_text", "stablelm",
        "gpt_bigcode", "mpt", "phi", "gptj", "codegen", "glm"}  # fmt: skip


@cache
def text_models() -> tuple[str, ...]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return tuple(sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING_NAMES)))


def config_of(family: str, **keys) -> dict:
    """The config.json of a family's class with its defaults and some keys."""
    config = transformers.AutoConfig.for_model(family, **(NEEDED.get(family, {}) | keys))
    return {**json.loads(config.to_json_string()), "model_type": config.model_type}


def counted_by_transformers(family: str, config: dict) -> int:
    keys = {k: v for k, v in config.items() if k not in ("model_type", "time_step_limit")}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **keys))
    model.tie_weights()
    return sum(p.numel() for p in model.parameters())


def counted_by_us(config: dict) -> int:
    """Without the balancing biases of routers, which Transformers has as buffers and a note mentions."""
    model = hf.interpret(config)
    bias = model.experts * sum(model.parts_of(kind).channel == "experts" for kind in model.layer_kinds)
    return int(model.total) - (bias if model.balance_bias else 0)


def error_of(config: dict) -> MeshwrightError | None:
    try:
        hf.interpret(config)
    except MeshwrightError as error:
        return error
    return None


def test_every_text_model_is_read_or_refused_with_advice():
    for kind in text_models():
        error = error_of({"model_type": kind})
        if hf.ALIASES.get(kind, kind) in hf.FAMILIES:
            assert error is None or error.code in ("MW-HF-005", "MW-MODEL-001"), f"{kind}: {error}"
            continue
        assert error is not None, kind
        assert error.code in ("MW-HF-004", "MW-HF-008")
        assert "[model] table" in error.fix
        assert not error.valid
        assert not set(re.findall(r"\w+", error.fix)) & set(hf.FAMILIES), str(error)


@pytest.mark.slow
def test_every_text_model_that_is_read_is_counted_as_transformers_counts_it():
    read = set()
    for family in text_models():
        try:
            config = config_of(family)
            ours = counted_by_us(config)
            theirs = counted_by_transformers(family, config)
        except (
            Exception
        ):  # refused, a class without complete defaults, or one that needs a package that is not installed
            continue
        if family not in TOWERS:
            assert ours == theirs, family
            read.add(family)
    assert read >= READ
    assert len(read) > 45


def test_published_counts():
    bloom = {"model_type": "bloom", "n_embed": 14336, "n_layer": 70, "num_attention_heads": 112, "vocab_size": 250880}
    assert hf.interpret(bloom).total == load("models", "bloom-176b").total == 176_247_271_424


@pytest.mark.parametrize("kind", ["xglm", "openai-gpt", "glm5", "optimus", "gemma9", ""])
def test_no_other_family_is_offered(kind):
    with pytest.raises(MeshwrightError) as caught:
        hf.interpret(
            {"model_type": kind, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 90}
        )
    assert caught.value.code == "MW-HF-004"
    assert not caught.value.valid
    assert not set(re.findall(r"\w+", str(caught.value))) & (set(hf.FAMILIES) - {kind})


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(hf.FAMILIES))
def test_each_key_removed_or_changed(family):
    """A key that is absent means the class's default; a switch or a size that we read means what the class builds."""
    if family not in text_models():
        pytest.skip("not a text model of this version of Transformers")
    config = config_of(family, num_hidden_layers=LAYERS.get(family, 4))
    wrong = []
    for key, value in list(config.items()):
        if (
            key in ("model_type", "architectures", "num_hidden_layers")
            or key.startswith(("_", "transformers"))
            or "token" in key
        ):
            continue
        changes = [{k: v for k, v in config.items() if k != key}]
        if isinstance(value, bool):
            changes.append(config | {key: not value})
        elif isinstance(value, int) and value > 1:
            changes += [config | {key: 2 * value}, config | {key: value // 2}]
        elif value is None:
            changes += [config | {key: 4}, config | {key: True}]
        for changed in changes:
            try:
                ours = counted_by_us(changed)
                theirs = counted_by_transformers(family, changed)
            except Exception:  # refused by one of the two
                continue
            if ours != theirs:
                wrong.append((key, value, changed.get(key, "removed"), ours, theirs))
    assert not wrong
