"""A user's module under tensor parallelism: Hugging Face models have the outputs and gradients of one device."""

from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

import ranks
import split_sums
from meshwright.errors import MeshwrightError
from meshwright.parallel.tensor import tables as families
from meshwright.parallel.tensor.cutting import cut_out
from meshwright.parallel.tensor.split import split

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 40,
    "max_position_embeddings": 16,
}
FUSED = {
    "gpt2": "transformer.h.1.attn.c_attn.weight",
    "phi3": "model.layers.1.self_attn.qkv_proj.weight",
    "falcon": "transformer.h.1.self_attention.query_key_value.weight",
}


def falcon(fused, counts, *norms):
    """A user's table: several layouts of one fused weight in one class."""
    layer = "transformer.h.*."
    return (
        ("transformer.word_embeddings", "vocabulary"),
        *((layer + norm, "between") for norm in norms or ("input_layernorm",)),
        (layer + "self_attention", "region"),
        (layer + "self_attention", f"counts:{counts}"),
        (layer + "self_attention.query_key_value", fused),
        (layer + "self_attention.dense", "row"),
        (layer + "mlp", "region"),
        (layer + "mlp.dense_h_to_4h", "column"),
        (layer + "mlp.dense_4h_to_h", "row"),
        ("transformer.ln_f", "between"),
        ("lm_head", "region"),
        ("lm_head", "column"),
        ("lm_head", "join"),
    )


MODELS = {  # class, KV heads, what else differs, table
    "llama": ("LlamaForCausalLM", 2, {"attention_bias": True, "pad_token_id": 3}, families.llama),
    "mistral": ("MistralForCausalLM", 1, {"sliding_window": 4}, families.llama),
    "qwen2": ("Qwen2ForCausalLM", 2, {"tie_word_embeddings": True}, families.llama),
    "qwen3": ("Qwen3ForCausalLM", 2, {"head_dim": 6}, families.qwen3),
    "gpt2": ("GPT2LMHeadModel", 4, {"vocab_size": 41, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, families.gpt2),
    "phi3": ("Phi3ForCausalLM", 2, {"pad_token_id": 3}, families.phi3),
    "falcon": ("FalconForCausalLM", 1, {}, lambda config: falcon("heads:4,1,1", "num_heads")),
    "falcon grouped": ("FalconForCausalLM", 2, {"new_decoder_architecture": True, "num_kv_heads": 2},
                       lambda config: falcon("column", "num_heads,num_kv_heads", "ln_attn", "ln_mlp")),
}  # fmt: skip
BOUND = 1e-13


def made(name):
    import transformers

    kind, kv_heads, more, table = MODELS[name]
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**{**SIZES, "num_key_value_heads": kv_heads, **more})
    torch.manual_seed(0)
    model = model_class(config).double()
    for parameter in model.parameters():  # no bias at zero, no norm at one
        nn.init.normal_(parameter, std=0.3)
    for part in model.modules():
        if type(part).__name__.endswith("RMSNorm"):  # theirs goes through float32 and would hide what float64 shows
            part.forward = partial(wide_norm, part)
    return model, config, table(config)


def wide_norm(part, x):
    return functional.rms_norm(x, part.weight.shape, part.weight, part.variance_epsilon)


def loss_of(logits, ids):
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def error_of(got, expected):
    return float((got - expected).abs().max() / expected.abs().max())


def compared(name, group, options):
    """The largest relative difference from one device: of logits, norm and every gradient."""
    plain, _, _ = made(name)
    model, config, table = made(name)
    values = config.to_dict()
    done = split(model, table, group, **options)
    assert config.to_dict() == values  # modules that read counts from it have separate configs
    ids = torch.arange(16).view(2, 8) * 7 % SIZES["vocab_size"]
    ids[0, 3] = 3
    errors = {}
    for _ in range(2):  # gradients accumulate, and are completed once
        expected, got = plain(input_ids=ids).logits, model(input_ids=ids).logits
        loss_of(expected, ids).backward()
        loss_of(got, ids).backward()
    split_sums.sum_gradients(done, model)
    errors["logits"] = error_of(got, expected)
    true = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    errors["norm"] = error_of(split_sums.norm(done, model), true)
    whole, names = dict(plain.named_parameters()), [n for n, _ in model.named_parameters()]
    assert names == list(whole)
    for n, p in model.named_parameters():
        full, cuts = whole[n].grad, done.cuts_of(n)
        errors[n] = error_of(p.grad, cut_out(cuts, full) if cuts else full)
        assert torch.equal(split_sums.whole(done, n, p), whole[n]), n
    return errors, {n: [cut.copies for cut in done.cuts_of(n)] for n in names}


CASES = [("llama", 2, {}), ("mistral", 2, {"form": "all-gather"}), ("llama", 4, {}), ("qwen2", 4, {"sequence": True}),
         ("qwen3", 4, {}), ("gpt2", 2, {"sequence": True}), ("gpt2", 4, {"form": "all-gather"}), ("phi3", 2, {}),
         ("phi3", 4, {"sequence": True}), ("falcon", 4, {}), ("falcon grouped", 2, {})]  # fmt: skip


def compared_all(context):
    from torch import distributed

    pairs = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    groups = {2: pairs[context.rank // 2], 4: distributed.group.WORLD}
    return [compared(name, groups[world], options) for name, world, options in CASES]


@cache
def by_rank():
    """One set of ranks for all cases: importing transformers takes longer than the training."""
    return ranks.run(4, compared_all)


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{name}-{world}" for name, world, _ in CASES])
def test_a_hugging_face_model_equals_one_device(case):
    name, world, _ = CASES[case]
    for rank in by_rank():
        errors, copies = rank[case]
        assert not {what: error for what, error in errors.items() if not error < BOUND}  # nor what is no number
        shared = max(1, world // MODELS[name][1])
        if name in FUSED:
            assert copies[FUSED[name]] == [1, shared, shared]
        elif "falcon" not in name:
            assert copies["model.layers.1.self_attn.k_proj.weight"] == [shared]
            assert copies["model.layers.1.self_attn.q_proj.weight"] == [1]


class Ranks:
    """A group that has only a size: errors are raised before anything is sent."""

    def __init__(self, size):
        self.size, self.rank = lambda: size, lambda: 0


LLAMA = families.llama(SimpleNamespace(head_dim=8))


def other(pattern, style):
    """Llama's table with one row changed."""
    return tuple((p, style if p == pattern else s) for p, s in LLAMA)


@pytest.mark.parametrize(
    ("table", "world", "head", "words"),
    [
        (
            (*LLAMA, ("model.layers.*.attention", "region")),
            2,
            8,
            r"MW-TP-003: pattern 'model\.layers\.\*\.attention' of the table matches no module",
        ),
        (LLAMA[1:], 2, 8, r"MW-TP-001: 'model\.embed_tokens' holds weight"),
        (other("model.norm", "column"), 2, 8, "MW-TP-004: 'model.norm' is a LlamaRMSNorm, not a Linear"),
        (other("model.norm", "whole"), 2, 8, "MW-TP-004: the table gives 'model.norm' the style 'whole'"),
        (
            other("model.layers.*.self_attn.[kv]_proj", "keys"),
            2,
            0,
            "MW-TP-002: 'model.layers.0.self_attn.k_proj' has 16 columns in heads of 0",
        ),
        (
            other("model.layers.*.mlp.up_proj", "column:1,x"),
            2,
            8,
            "MW-TP-005: 'model.layers.0.mlp.up_proj.weight' has 48 columns",
        ),
        (
            other("model.layers.*.mlp.up_proj", "column:1,4"),
            2,
            8,
            "MW-TP-005: 'model.layers.0.mlp.up_proj.weight' has 48 columns",
        ),
        (
            other("model.layers.*.self_attn.q_proj", "heads:2,1,1"),
            4,
            8,
            "MW-TP-002: a part of 2 heads of 'model.layers.0.self_attn",
        ),
        (
            other("model.layers.*.self_attn.q_proj", "column:31,1"),
            2,
            8,
            "MW-TP-002: a part of 31 columns of 'model.layers.0.self_attn",
        ),
        (other("model.norm", "parts:1,1"), 2, 8, "MW-TP-004: the table gives 'model.norm' the style 'parts:1,1'"),
        (
            (*LLAMA, ("model.layers.*.mlp", "counts:width")),
            2,
            8,
            "MW-TP-005: 'model.layers.0.mlp' counts width = None",
        ),
        (
            LLAMA,
            3,
            8,
            "MW-TP-002: dimension 0 of 'model.layers.0.self_attn.q_proj.weight', 32, does not divide over tp=3",
        ),
    ],
)
def test_a_table_that_does_not_match_gives_a_clear_error(table, world, head, words):
    with pytest.raises(MeshwrightError, match=words):
        split(made("llama")[0], table, Ranks(world), head=head)


def test_the_size_of_a_module_follows_its_weight():
    model, _, table = made("qwen2")
    split(model, table, Ranks(2), head=8)
    attention, embedding = model.model.layers[0].self_attn, model.model.embed_tokens
    assert (attention.q_proj.out_features, attention.o_proj.in_features, embedding.num_embeddings) == (16, 16, 20)
    assert model.lm_head.weight is embedding.weight


def test_sequence_parallelism_without_a_row_that_splits_is_refused():
    """Every rank would see all tokens, and gradients of modules between the regions would be summed too often."""
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1, enable_nested_tensor=False
    )
    table = tuple(row for row in families.transformer_encoder(encoder) if not row[1].endswith("_sequence"))
    with pytest.raises(MeshwrightError, match="MW-TP-008: sp=true, and no row of the table divides the sequence"):
        split(encoder, table, Ranks(2), True)


def test_experts_that_are_not_ours_must_be_cut_by_the_table():
    import transformers

    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_key_value_heads=2)
    table = tuple(row for row in families.mixtral(config) if not row[1].startswith("cut:"))
    with pytest.raises(
        MeshwrightError, match=r"MW-TP-001: 'model\.layers\.0\.mlp\.experts' holds gate_up_proj, down_proj"
    ):
        split(transformers.MixtralForCausalLM(config), table, Ranks(2), True)


def test_the_error_for_a_missing_table_shows_how_to_write_one():
    with pytest.raises(MeshwrightError, match=r"MW-TP-009: .* needs a sharding table for Sequential.* table=\[\(\"0\""):
        families.table_for(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(MeshwrightError, match="MW-TP-003: pattern 'x' of the table matches no parameter"):
        split(nn.Sequential(nn.Linear(2, 2)), (("0", "column"), ("x", "cut:1")), Ranks(2))
    with pytest.raises(MeshwrightError, match=r"MW-TP-005: 'cut:2' does not fit '0\.weight', which has 2 dimensions"):
        split(nn.Sequential(nn.Linear(2, 2)), (("0.*", "cut:2"),), Ranks(2))


def test_a_recomputed_layer_with_a_cache_is_refused_with_the_right_fix():
    from meshwright.parallel.recompute import recompute

    model = made("llama")[0]
    recompute(model.model.layers)
    ids = torch.arange(8)[None]
    with pytest.raises(
        MeshwrightError, match=r"MW-PAR-008: .*\(DynamicCache\).* Fix: model\.config\.use_cache = False"
    ):
        model(input_ids=ids)
    model.config.use_cache = False
    model(input_ids=ids).logits.sum().backward()
