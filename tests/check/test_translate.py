"""A Transformers model as the reference of a model with the names and layouts of another framework.

The other model computes what its layout means (pairs of rows in the rotary embedding, queries, keys and values by groups), with torch alone.
Only if every translated weight is in its place do both have the same gradients."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hf_folders
from meshwright.check.compare import compare
from meshwright.check.folder import Recording
from meshwright.check.recorder import StepRecorder
from meshwright.check.translate import naming_of
from ranks import soak

HIDDEN, HEADS, KEYS, WIDTH, FFN, VOCAB = 32, 4, 2, 8, 48, 40
IDS = torch.arange(24).view(2, 12) * 7 % VOCAB


def rope(x: torch.Tensor, pairs: bool) -> torch.Tensor:
    """x [B, N, S, D], rotated with base 10,000: neighbours (torchtitan) or the two halves (Megatron)."""
    angles = torch.outer(torch.arange(x.shape[2]), 10000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH)).to(x)
    if pairs:
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(turned).flatten(-2)
    first, second = x.chunk(2, -1)
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pairs: bool) -> torch.Tensor:
    q, k, v = (x.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(rope(q, pairs), rope(k, pairs), v, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2).flatten(2)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, dtype=torch.float64)


def norm() -> nn.RMSNorm:
    return nn.RMSNorm(HIDDEN, eps=1e-6, dtype=torch.float64)


class TitanAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = linear(HIDDEN, HEADS * WIDTH), linear(HEADS * WIDTH, HIDDEN)
        self.wk, self.wv = linear(HIDDEN, KEYS * WIDTH), linear(HIDDEN, KEYS * WIDTH)

    def forward(self, x):
        return self.wo(attend(self.wq(x), self.wk(x), self.wv(x), pairs=True))


class TitanFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = linear(HIDDEN, FFN), linear(HIDDEN, FFN), linear(FFN, HIDDEN)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TitanLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(), TitanAttention()
        self.ffn_norm, self.feed_forward = norm(), TitanFeedForward()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Titan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, HIDDEN, dtype=torch.float64)
        self.layers = nn.ModuleDict({str(i): TitanLayer() for i in range(2)})
        self.norm, self.output = norm(), linear(HIDDEN, VOCAB)

    def forward(self, ids):
        x = self.tok_embeddings(ids)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Row by row, as torchtitan's own conversion describes it: neighbours 2i and 2i + 1 are rows i and i + d/2 of a head."""
        order = [h * WIDTH + i + half * WIDTH // 2 for h in range(HEADS) for i in range(WIDTH // 2) for half in (0, 1)]
        own = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
        for i in range(2):
            here, there = f"layers.{i}.", f"model.layers.{i}."
            own |= {
                here + "attention_norm": there + "input_layernorm",
                here + "ffn_norm": there + "post_attention_layernorm",
            }
            own |= {f"{here}attention.w{x}": f"{there}self_attn.{x}_proj" for x in "qkvo"}
            own |= {
                f"{here}feed_forward.{a}": f"{there}mlp.{b}_proj"
                for a, b in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
            }
        for mine, theirs in own.items():
            value = state[theirs + ".weight"]
            if mine.endswith((".wq", ".wk")):
                value = torch.stack([value[r] for r in order if r < len(value)])
            self.get_submodule(mine).weight.data.copy_(value)  # type: ignore[union-attr]


class MegatronAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv, self.linear_proj = linear(HIDDEN, (HEADS + 2 * KEYS) * WIDTH), linear(HEADS * WIDTH, HIDDEN)

    def forward(self, x):
        groups = self.linear_qkv(x).unflatten(-1, (KEYS, HEADS // KEYS + 2, WIDTH))
        q, k, v = groups[..., :-2, :].flatten(2), groups[..., -2, :].flatten(2), groups[..., -1, :].flatten(2)
        return self.linear_proj(attend(q, k, v, pairs=False))


class MegatronMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = linear(HIDDEN, 2 * FFN), linear(FFN, HIDDEN)

    def forward(self, x):
        gate, up = self.linear_fc1(x).chunk(2, -1)
        return self.linear_fc2(F.silu(gate) * up)


class MegatronLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.self_attention = norm(), MegatronAttention()
        self.pre_mlp_layernorm, self.mlp = norm(), MegatronMlp()

    def forward(self, x):
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.pre_mlp_layernorm(x))


class Megatron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.ModuleDict({"word_embeddings": nn.Embedding(VOCAB, HIDDEN, dtype=torch.float64)})
        layers = nn.ModuleList([MegatronLayer(), MegatronLayer()])
        self.decoder = nn.ModuleDict({"layers": layers, "final_layernorm": norm()})
        self.output_layer = linear(HIDDEN, VOCAB)

    def forward(self, ids):
        x = self.embedding["word_embeddings"](ids)
        for layer in self.decoder["layers"]:  # type: ignore[union-attr]
            x = layer(x)
        return self.output_layer(self.decoder["final_layernorm"](x))

    def load(self, state: dict[str, torch.Tensor]) -> None:
        put = lambda mine, value: self.get_submodule(mine).weight.data.copy_(value)  # noqa: E731
        put("embedding.word_embeddings", state["model.embed_tokens.weight"])
        put("decoder.final_layernorm", state["model.norm.weight"])
        put("output_layer", state["lm_head.weight"])
        for i in range(2):
            here, there = f"decoder.layers.{i}.", f"model.layers.{i}."
            q, k, v = (state[f"{there}self_attn.{x}_proj.weight"].split(WIDTH) for x in "qkv")
            per = HEADS // KEYS
            rows = [x for g in range(KEYS) for x in (*q[g * per : (g + 1) * per], k[g], v[g])]
            put(here + "self_attention.linear_qkv", torch.cat(rows))
            put(here + "self_attention.linear_proj", state[there + "self_attn.o_proj.weight"])
            put(here + "input_layernorm", state[there + "input_layernorm.weight"])
            put(here + "pre_mlp_layernorm", state[there + "post_attention_layernorm.weight"])
            put(here + "mlp.linear_fc1", torch.cat([state[f"{there}mlp.{x}_proj.weight"] for x in ("gate", "up")]))
            put(here + "mlp.linear_fc2", state[there + "mlp.down_proj.weight"])


def transformers_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KEYS, tie_word_embeddings=False, rms_norm_eps=1e-6,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double()
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.double()
    return model


def train(model: nn.Module, out: Path, bug: str) -> None:
    recorder = StepRecorder(str(out))
    recorder.attach()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        output = model(IDS)
        logits = getattr(output, "logits", output)
        F.cross_entropy(logits.flatten(0, 1), IDS.roll(-1, 1).flatten()).backward()
        if bug:
            model.get_submodule(bug).weight.grad.mul_(2)  # type: ignore[union-attr]
        optimizer.step()
    recorder.close()


def trained(model: nn.Module, out: Path, bug: str = "") -> Recording:
    with hf_folders.in_float64():
        train(model, out, bug)
    return Recording.read(out)


@pytest.mark.parametrize(
    ("other", "fused"), [(Megatron, "self_attention.linear_qkv"), *soak([(Titan, "attention.wq")])]
)
def test_another_framework_is_compared_with_transformers(tmp_path: Path, other: type, fused: str) -> None:
    with hf_folders.in_float64():
        reference = transformers_model()
    state = {name: value.clone() for name, value in reference.state_dict().items()}
    one = trained(reference, tmp_path / "one")
    candidates = []
    for bug in ("", next(n for n, _ in other().named_modules() if n.endswith(f"1.{fused}"))):
        candidate = other()
        candidate.load(state)
        candidates.append((bug, trained(candidate, tmp_path / f"many{bool(bug)}", bug)))
    (_, healthy), (where, wrong) = candidates
    comparison = compare(one, healthy)
    assert comparison.verdict == "equal within rounding", comparison.differences[:3]
    assert comparison.compared["gradient"] == 2 * len(list(other().parameters()))
    assert not comparison.unmapped, comparison.unmapped
    assert len(comparison.modules) >= 6  # of the layers, embedding and head at the least
    comparison = compare(one, wrong)
    assert {d.name for d in comparison.differences if d.kind == "gradient"} == {f"{where}.weight"}
    assert comparison.diagnosis is not None
    assert "× 2" in comparison.diagnosis.pattern.detail


@pytest.mark.parametrize("case", ["mixtral", *soak(["llama", "gpt_neox", "gpt2", "qwen3_moe"])])
def test_our_model_is_compared_with_transformers(tmp_path: Path, case: str) -> None:
    """Of each layout of weights: separate, stacked experts, by groups of heads, transposed."""
    pytest.importorskip("transformers")
    folder = hf_folders.saved(case, tmp_path / "folder")  # of a model that other tests share, in float32
    with hf_folders.in_float64():
        theirs = hf_folders.loaded(folder).double()
    theirs.config._experts_implementation = "eager"  # its grouped products take no float64
    ours = hf_folders.our_network(hf_folders.opened(tmp_path / "folder"), torch.float64)
    comparison = compare(trained(theirs, tmp_path / "theirs"), trained(ours, tmp_path / "ours"))
    assert comparison.verdict == "equal within rounding", comparison.differences[:3]
    assert comparison.compared["gradient"] == 2 * len(list(ours.parameters()))


def test_frameworks_are_known_by_their_names() -> None:
    names = {"Megatron": Megatron(), "torchtitan": Titan()}
    for name, model in names.items():
        naming = naming_of([n for n, _ in model.named_parameters()])
        assert naming is not None
        assert naming.name == name
    assert naming_of(["a.weight", "b.weight"]) is None
