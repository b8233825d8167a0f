"""The networks in plain float64 operations: what `models` computes, written a second time, for whole tensors on one device.

    transformer   x + attention(norm(x)), x + ffn(norm(x)), with every option of `describe.shape`
    experts       every expert on the tokens that chose it, one expert after the other; `Σ_e w_e·FFN_e(x)`
    losses        −log softmax(z)[target] over the valid tokens;  α·E·Σ_e f_e·P_e and β·mean(log Σ exp z)² of each router,
                  averaged over micro-batches

Nothing is fused, cached, sorted or exchanged here, so that each line can be compared with the formula it comes from. The parameters are a
dictionary from names to tensors; autograd computes the gradients. This file imports nothing from `models`, `parallel` or `training`.

Legend: B batch, S sequence, T = B·S tokens, H hidden, N heads, K KV heads, D head dim, E experts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, pi, sqrt

import torch
from torch.nn import functional as F

from meshwright.describe.model import Model
from meshwright.proof.oracle.positions import dropout_factor, magnitude, rotated, visible
from meshwright.proof.records import Activations

Function = Callable[[torch.Tensor], torch.Tensor]
IGNORED = -100


def gelu(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + torch.erf(x / sqrt(2))) / 2


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + torch.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2


ACTIVATIONS: dict[str, Function] = {
    "gelu": gelu,
    "gelu-tanh": gelu_tanh,
    "quick-gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "swiglu": lambda x: x / (1 + torch.exp(-x)),
    "geglu": gelu,
    "geglu-tanh": gelu_tanh,
}
ATTENTIONS = ("gqa", "mla")


def missing(model: Model) -> str:
    """The part of a model that has no formula here, because a plug-in added it; empty if there is none."""
    if model.kind == "transformer" and model.attention not in ATTENTIONS:
        return f"attention {model.attention}"
    return "" if model.activation in ACTIVATIONS else f"activation {model.activation}"


@dataclass
class Network:
    """A model with its weights, in one micro-batch of one step; `added` and `loads` collect the losses and the loads of the routers."""

    model: Model
    weights: Mapping[str, torch.Tensor]
    seed: int
    step: int
    samples: Sequence[int]
    documents_BS: torch.Tensor | None = None
    added: list[torch.Tensor] = field(default_factory=list)
    loads: dict[str, torch.Tensor] = field(default_factory=dict)
    noted: Activations | None = None  # records what each part returns

    def note(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if self.noted is not None:
            self.noted.note(name, self.samples, x)
        return x

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of the micro-batch, summed over its valid targets."""
        if self.model.kind == "mlp":
            valid = ~targets.isnan()
            return ((self.mlp(inputs) - targets)[valid] ** 2).sum() / self.model.hidden
        output = self.resnet(inputs) if self.model.resnet.stages else self.transformer(inputs).flatten(0, 1)
        targets = targets.flatten()
        valid = targets != IGNORED
        return -output.log_softmax(-1)[valid].gather(1, targets[valid, None]).sum()

    # Parts of every network

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y, bias = x @ self.weights[f"{name}.weight"].mT + self.adapter(x, name), self.weights.get(f"{name}.bias")
        return self.note(name, y if bias is None else y + bias)

    def adapter(self, x: torch.Tensor, name: str, expert: int | None = None) -> torch.Tensor | float:
        """What a low-rank adapter adds to a product: alpha / rank · B A dropout(x)."""
        a, b, options = (
            self.weights.get(f"{name}.lora_a.weight"),
            self.weights.get(f"{name}.lora_b.weight"),
            self.model.adapter,
        )
        if a is None or b is None:
            return 0.0
        rank = a.shape[-2]
        factor = (options.alpha or rank) / (sqrt(rank) if options.scaling == "root" else rank)
        if expert is not None:
            return factor * (x @ a[expert].mT) @ b[expert].mT
        return factor * (self.dropped(x, options.dropout, f"{name}.lora") @ a.mT) @ b.mT

    def dropped(self, x: torch.Tensor, rate: float, site: str) -> torch.Tensor:
        if not rate:
            return x
        sizes = x.shape[1:] if x.ndim > 2 else (1, x.shape[1])
        return x * dropout_factor(self.seed, self.step, site, self.samples, rate, *sizes).view_as(x)

    def mlp(self, x_BH: torch.Tensor) -> torch.Tensor:
        activation = ACTIVATIONS["relu" if self.model.activation == "swiglu" else self.model.activation]
        last = self.model.layers - 1
        for i in range(last):
            x_BH = self.dropped(
                activation(self.linear(x_BH, f"layers.{i}.linear")), self.model.dropout_rate, f"layers.{i}"
            )
        return self.linear(x_BH, f"layers.{last}.linear")

    def resnet(self, x: torch.Tensor) -> torch.Tensor:
        """Bottleneck blocks; the first block of each stage but the first halves the image."""

        def convolved(x: torch.Tensor, conv: str, norm: str, stride: int) -> torch.Tensor:
            weight = self.weights[f"{conv}.weight"]
            y = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
            centred = y - y.mean((0, 2, 3), keepdim=True)
            scaled = centred / (centred.square().mean((0, 2, 3), keepdim=True) + 1e-5).sqrt()
            return scaled * self.weights[f"{norm}.weight"][:, None, None] + self.weights[f"{norm}.bias"][:, None, None]

        x, block = F.max_pool2d(convolved(x, "stem.conv", "stem.norm", 2).relu(), 3, 2, 1), 0
        for stage, count in enumerate(self.model.resnet.stages):
            for first in [True] + [False] * (count - 1):
                at, stride = f"layers.{block}", 2 if stage and first else 1
                y = convolved(x, f"{at}.conv1", f"{at}.norm1", 1).relu()
                y = convolved(y, f"{at}.conv2", f"{at}.norm2", stride).relu()
                y = convolved(y, f"{at}.conv3", f"{at}.norm3", 1)
                x = (y + (convolved(x, f"{at}.shortcut", f"{at}.norm4", stride) if first else x)).relu()
                block += 1
        return self.linear(x.mean((2, 3)), "head.project")

    # The transformer

    def transformer(self, ids_BS: torch.Tensor) -> torch.Tensor:
        """The logits."""
        m = self.model
        x_BSH = self.weights["embedding.tokens.weight"][ids_BS] * m.embedding_scale
        if m.positions == "learned":
            x_BSH = x_BSH + self.weights["embedding.positions.weight"][: ids_BS.shape[1]]
        x_BSH = self.norm(x_BSH, "embedding.norm") if m.embedding_norm else x_BSH
        x_BSH = self.dropped(x_BSH, m.dropout_rate if m.embedding_dropout is None else m.embedding_dropout, "embedding")
        x_BSH = self.note("embedding", x_BSH)
        for i in range(m.layers):
            x_BSH = self.layer(x_BSH, i)
        x_BSH = self.norm(x_BSH, "head.norm") if m.final_norm else x_BSH
        project = self.weights["embedding.tokens.weight" if m.tied else "head.project.weight"]
        return capped(x_BSH @ project.mT * m.logit_scale, m.logit_softcap)

    def layer(self, x_BSH: torch.Tensor, i: int) -> torch.Tensor:
        m, at = self.model, f"layers.{i}"
        before, after = m.norm_position == "pre", m.norm_position == "post"

        def added(part: Function, x: torch.Tensor, name: str) -> torch.Tensor:
            """What attention or FFN adds to the residual."""
            y = part(x)
            y = self.norm(y, f"{at}.{name}_norm") if after else y
            y = self.norm(y, f"{at}.{name}_post_norm") if m.norms_per_layer == 4 else y
            return m.residual_scale * self.dropped(y, m.dropout_rate, f"{at}.{name}")

        routes = m.experts and i >= m.dense_layers and (i - m.dense_layers + 1) % m.moe_every == 0
        channel = (lambda x: self.experts(x, f"{at}.moe")) if routes else (lambda x: self.ffn(x, f"{at}.ffn"))
        normed = self.norm(x_BSH, f"{at}.attention_norm") if before else x_BSH
        attended = x_BSH + added(lambda x: self.attention(x, i), normed, "attention")
        if m.norms_per_layer > 1:
            source = x_BSH if m.parallel_residual else attended
            normed = self.norm(source, f"{at}.ffn_norm") if before else source
        return self.note(at, attended + added(channel, normed, "ffn"))

    def norm(self, x: torch.Tensor, name: str, epsilon: float = 0.0, rms: bool = False) -> torch.Tensor:
        """(x − mean) / √(variance + ε), or x / √(mean of squares + ε), times the weight."""
        m = self.model
        centred = x - x.mean(-1, keepdim=True) if m.norm == "layernorm" and not rms else x
        y = centred / (centred.square().mean(-1, keepdim=True) + (epsilon or m.norm_epsilon)).sqrt()
        weight, bias = self.weights.get(f"{name}.weight"), self.weights.get(f"{name}.bias")
        y = y if weight is None else y * (weight + m.norm_offset)
        return self.note(name, y if bias is None else y + bias)

    def attention(self, x_BSH: torch.Tensor, i: int) -> torch.Tensor:
        m, at = self.model, f"layers.{i}.attention"
        turns = m.positions == "rope" and i not in m.nope_layers and not (m.nope_every and (i + 1) % m.nope_every == 0)
        q, k, v = (self.latent if m.attention == "mla" else self.grouped)(x_BSH, i, at, turns)
        at = f"{at}.heads" if m.attention == "mla" else at
        if m.temperature_scale and not turns:
            position_S = torch.arange(1, q.shape[-2] + 1)
            q = q * (1 + m.temperature_scale * torch.log1p((position_S // m.temperature_floor).double()))[:, None]
        scale = m.attention_scale or 1 / sqrt(q.shape[-1])
        if m.attention == "mla" and m.positions == "rope" and m.rope.kind != "default":
            scale *= magnitude(m, m.rope.mscale_all_dim) ** 2
        scores = capped(q @ k.mT * scale / (i + 1 if m.attention_scale_by_layer else 1), m.attention_softcap)
        scores = scores.masked_fill(~visible(m, i, q.shape[-2], self.documents_BS), -torch.inf)
        if m.sinks:
            sink_BNS1 = self.weights[f"{at}.sinks.weight"][:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sink_BNS1), dim=-1)
        share = scores.softmax(-1)[..., : k.shape[-2]]
        share = self.dropped(share, m.attention_dropout, f"layers.{i}.probabilities")
        return self.linear((share @ v).transpose(1, 2).flatten(2), f"{at}.o")

    def grouped(self, x_BSH: torch.Tensor, i: int, at: str, turns: bool) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values [B, N, S, D] of grouped-query attention."""
        m = self.model
        width = m.head_dim or m.hidden // m.heads

        def heads(name: str) -> torch.Tensor:
            x_BSX, norm = self.linear(x_BSH, f"{at}.{name}"), f"{at}.{name}_norm"
            learned, whole = m.qk_norm and name != "v" and m.qk_norm_weights, m.qk_norm_width == "projection"
            x_BSX = self.norm(x_BSX, norm, rms=True) if learned and whole else x_BSX
            x_BSND = x_BSX.unflatten(-1, (-1, width))
            x_BNSD = (self.norm(x_BSND, norm, rms=True) if learned and not whole else x_BSND).transpose(1, 2)
            if turns and name != "v":
                x_BNSD = rotated(x_BNSD, m, i)
                x_BNSD = x_BNSD if learned or not m.qk_norm else self.norm(x_BNSD, "", rms=True)
            return x_BNSD.repeat_interleave(m.heads // x_BNSD.shape[1], dim=1)

        return heads("q"), heads("k"), heads("v")

    def latent(self, x_BSH: torch.Tensor, i: int, at: str, turns: bool) -> tuple[torch.Tensor, ...]:
        """The same of latent attention: keys and values of all heads from one vector c of each token, and one rotated key for all heads."""
        m, epsilon = self.model, self.model.latent_norm_epsilon
        turn: Function = (lambda x: rotated(x, m, i)) if turns and m.rope_dim else (lambda x: x)
        if m.q_rank:
            q = self.linear(self.norm(self.linear(x_BSH, f"{at}.q_a"), f"{at}.q_a_norm", epsilon), f"{at}.heads.q_b")
        else:
            q = self.linear(x_BSH, f"{at}.heads.q")
        c, key = self.linear(x_BSH, f"{at}.kv_a").split((m.kv_rank, m.rope_dim), dim=-1)
        kv = self.linear(self.norm(c, f"{at}.kv_a_norm", epsilon), f"{at}.heads.kv_b")
        q_BNSD, kv_BNSD = (x.unflatten(-1, (m.heads, -1)).transpose(1, 2) for x in (q, kv))
        key_BNSD = turn(key[:, None]).expand(-1, m.heads, -1, -1)
        k_BNSD = torch.cat((kv_BNSD[..., : m.nope_dim], key_BNSD), dim=-1)
        q_BNSD = torch.cat((q_BNSD[..., : m.nope_dim], turn(q_BNSD[..., m.nope_dim :])), dim=-1)
        return q_BNSD, k_BNSD, kv_BNSD[..., m.nope_dim :]

    def ffn(self, x: torch.Tensor, name: str, expert: int | None = None) -> torch.Tensor:
        """σ(W₁x)·W₂, or gated; of one of a stack of experts if its number is given."""
        m, activation = self.model, ACTIVATIONS[self.model.activation]

        def product(x: torch.Tensor, part: str) -> torch.Tensor:
            if expert is None:
                return self.linear(x, f"{name}.{part}")
            path = f"{name}.{part}"
            y, bias = x @ self.weights[f"{path}.weight"][expert].mT, self.weights.get(f"{path}.bias")
            y = y + self.adapter(x, path, expert)
            return y if bias is None else y + bias[expert]

        if f"{name}.gate.weight" not in self.weights:
            return product(activation(product(x, "up")), "down")
        gate, up = product(x, "gate"), product(x, "up")
        if m.swiglu_limit:
            gate, up = gate.clamp(max=m.swiglu_limit), up.clamp(-m.swiglu_limit, m.swiglu_limit)
        if m.activation == "swiglu":
            return product(gate * torch.sigmoid(m.swiglu_alpha * gate) * (up + m.swiglu_shift), "down")
        return product(activation(gate) * up, "down")

    # Experts

    def experts(self, x_BSH: torch.Tensor, name: str) -> torch.Tensor:
        m, x_TH = self.model, x_BSH.flatten(0, 1)
        weight_TE, kept_TE = self.routed(x_TH, name, len(x_BSH))
        y_TH = torch.zeros_like(x_TH)
        for e in range(m.experts):
            tokens = kept_TE[:, e].nonzero().flatten()
            x, w = x_TH[tokens], weight_TE[tokens, e, None]
            y = (
                self.ffn(x * w, f"{name}.experts", e)
                if m.router.weigh_inputs
                else self.ffn(x, f"{name}.experts", e) * w
            )
            y_TH = y_TH.index_add(0, tokens, y)
        if m.shared_experts:
            shared = self.ffn(x_TH, f"{name}.shared")
            y_TH = y_TH + (self.linear(x_TH, f"{name}.shared_scale").sigmoid() * shared if m.shared_gate else shared)
        return self.note(name, y_TH.view_as(x_BSH))

    def routed(self, x_TH: torch.Tensor, name: str, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, E]: the weight of each expert for each token, and whether the expert computes the token."""
        m, r = self.model, self.model.router
        logits_TE = self.linear(x_TH, f"{name}.router")
        sigmoid = r.score == "sigmoid" or (not r.score and m.balance_bias)
        score_TE = logits_TE.sigmoid() if sigmoid else logits_TE.softmax(-1)
        most = min(len(x_TH), max(1, ceil((r.capacity or 1.0) * len(x_TH) * m.top_k / m.experts)))
        if r.choice == "expert":
            chosen_TE = kept_TE = first(score_TE.detach().T, most).T
        else:
            bias_E = self.weights[f"{name}.router.balance_bias"] if m.balance_bias else 0.0
            chosen_TE = first(self.limited(score_TE.detach() + bias_E), m.top_k)
            kept_TE = chosen_TE
            if r.capacity:
                kept_TE = chosen_TE & first(score_TE.detach().masked_fill(~chosen_TE, -1.0).T, most).T
        self.loads[f"{name}.router.balance_bias"] = chosen_TE.sum(0).double()
        weight_TE = score_TE * chosen_TE
        if r.choice == "token" and (m.top_k > 1 if r.normalise is None else r.normalise):
            weight_TE = weight_TE / weight_TE.sum(-1, keepdim=True)
        parts = sequences if r.aux_scope == "sequence" else 1
        share_TE = score_TE / score_TE.sum(-1, keepdim=True)
        for choices, shares in zip(chosen_TE.chunk(parts), share_TE.chunk(parts), strict=True):
            f_E, p_E = choices.sum(0) / choices.sum(), shares.mean(0)
            self.added.append(r.aux * m.experts * (f_E * p_E).sum() / parts)
        self.added.append(r.z * logits_TE.logsumexp(-1).square().mean())
        return weight_TE * r.scale, kept_TE

    def limited(self, score_TE: torch.Tensor) -> torch.Tensor:
        """The scores; −∞ for experts outside the best groups of a token. A group is as good as its best expert, with a balancing bias as its
        best two together."""
        r = self.model.router
        if r.groups == 1:
            return score_TE
        score_TGX = score_TE.unflatten(1, (r.groups, -1))
        best = score_TGX.sort(dim=-1, descending=True).values[..., : 2 if self.model.balance_bias else 1].sum(-1)
        return score_TGX.masked_fill(~first(best, r.groups_kept or r.groups)[..., None], -torch.inf).flatten(1)


def first(score: torch.Tensor, count: int) -> torch.Tensor:
    """A mask of the `count` largest numbers of each row; of equal ones the earlier."""
    rank = score.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
    return rank < count


def capped(x: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(x / cap) if cap else x


@dataclass
class PlainStep:
    """Loss and gradients of one step, and the number of tokens that chose each expert, by the name of its router's bias."""

    loss: float
    gradients: dict[str, torch.Tensor]
    loads: dict[str, torch.Tensor]


def plain_step(
    model: Model,
    weights: Mapping[str, torch.Tensor],
    batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    samples: Sequence[int],
    size: int,
    seed: int,
    step: int,
    noted: Activations | None = None,
) -> PlainStep:
    """The loss is a sum over valid targets divided by their number in the whole batch; the losses of routers are averaged over the micro-batches of
    `size` samples, and are not part of the reported loss."""
    inputs, targets, documents_BS = batch
    leaves = {name: w.detach().double().requires_grad_() for name, w in weights.items()}
    mask = targets[:, 0].isfinite() if targets.is_floating_point() else targets != IGNORED
    total, loads, starts = 0.0, dict[str, torch.Tensor](), range(0, len(inputs), size)
    for start in starts:
        rows = slice(start, start + size)
        documents = None if documents_BS is None else documents_BS[rows]
        network = Network(model, leaves, seed, step, samples[rows], documents, noted=noted)
        x = inputs[rows].double() if inputs.is_floating_point() else inputs[rows]
        loss = network.loss(x, targets[rows]) / max(int(mask.sum()), 1)
        (loss + sum(network.added) / len(starts)).backward()
        total += float(loss)
        loads = {name: loads.get(name, 0) + load for name, load in network.loads.items()}
    zeros = {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in leaves.items()}
    return PlainStep(total, zeros, loads)
