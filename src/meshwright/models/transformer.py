"""The transformer: all presets are configurations of this class.

    x = tokens + positions                              (embedding, with a norm if the model has one)
    x = x + attention(norm(x));  x = x + ffn(norm(x))   (each layer; with four norms per layer, also a norm after each part)
    logits = project(norm(x))                           (head; with tied embeddings it uses the embedding's weight)

Variants of a layer: norms only after each part, x + norm(attention(x)) (`norm_position`); both parts read the same input, with one norm
each or one for both, x + attention(norm(x)) + ffn(norm(x)) (`parallel_residual`). Embeddings, what a part adds, and logits may be
multiplied by a constant; logits may be soft-capped.

attention: grouped queries (`attention`), or latent (`mla`); positions by rotation (RoPE), learned, or none. ffn: one network,
or experts (`moe`).

A dropout rate applies to the output of the embedding and to what attention and FFN add to x (`dropout`); the embedding may have
another rate, and attention probabilities have a separate one.

Legend: B batch, S sequence, H hidden, V vocabulary.
"""

import torch
from torch import Tensor, nn

from meshwright.describe import legality
from meshwright.describe.model import Model
from meshwright.describe.plan_fields import PlanFields
from meshwright.describe.variants import ATTENTIONS
from meshwright.errors import MeshwrightError
from meshwright.models.attention import Geometry, SelfAttention
from meshwright.models.dropout import make_dropout
from meshwright.models.loss import linear_cross_entropy
from meshwright.models.mla import LatentAttention
from meshwright.models.moe import MixtureOfExperts
from meshwright.models.parts import FeedForward, ProductLinear, make_norm, soft_cap
from meshwright.models.step_context import current

ATTENTIONS.provide("gqa", module=SelfAttention)
ATTENTIONS.provide("mla", module=LatentAttention)


class Layer(nn.Module):
    def __init__(self, model: Model, geometry: Geometry, index: int) -> None:
        super().__init__()
        expert = model.layer_kinds[index] == "moe"
        self.attention_norm = make_norm(model)
        self.attention = ATTENTIONS.part(model.attention, "module")(model, geometry, index)
        self.ffn_norm = make_norm(model) if model.norms_per_layer > 1 else nn.Identity()
        if expert:
            self.moe = MixtureOfExperts(model)
        else:
            self.ffn = FeedForward(model)
        self.attention_post_norm = make_norm(model) if model.norms_per_layer == 4 else nn.Identity()
        self.ffn_post_norm = make_norm(model) if model.norms_per_layer == 4 else nn.Identity()
        self.attention_drop = make_dropout(model.dropout_rate, f"layers.{index}.attention", geometry)
        self.ffn_drop = make_dropout(model.dropout_rate, f"layers.{index}.ffn", geometry)
        self.expert, self.scale = expert, model.residual_scale
        self.parallel, self.norms_after = model.parallel_residual, model.norm_position == "post"
        self.one_norm = model.norms_per_layer == 1

    def forward(self, x_BSH: Tensor) -> Tensor:
        normed_BSH = x_BSH if self.norms_after else self.attention_norm(x_BSH)
        added_BSH = x_BSH + self.attended(normed_BSH)
        if self.parallel:
            inputs_BSH = normed_BSH if self.one_norm else self.ffn_norm(x_BSH)
        else:
            inputs_BSH = added_BSH if self.norms_after else self.ffn_norm(added_BSH)
        # Called here and not in a method: experts divide the graph of a layer, and of each function around their call.
        y_BSH = self.moe(inputs_BSH) if self.expert else self.ffn(inputs_BSH)
        y_BSH = self.ffn_norm(y_BSH) if self.norms_after else self.ffn_post_norm(y_BSH)
        return added_BSH + self.scaled(self.ffn_drop(y_BSH))

    def attended(self, x_BSH: Tensor) -> Tensor:
        """Return the output of attention, which is added to the residual."""
        y_BSH = self.attention(x_BSH)
        y_BSH = self.attention_norm(y_BSH) if self.norms_after else self.attention_post_norm(y_BSH)
        return self.scaled(self.attention_drop(y_BSH))

    def scaled(self, y_BSH: Tensor) -> Tensor:
        return y_BSH if self.scale == 1 else y_BSH * self.scale


class LearnedPositions(nn.Module):
    """The first S rows of a learned table, or the rows at the positions of this rank."""

    def __init__(self, model: Model, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = geometry
        self.weight = nn.Parameter(torch.empty(model.max_positions, model.hidden))

    def forward(self, length: int) -> Tensor:
        position_ids = self.geometry.position_ids
        length = length if position_ids is None else self.geometry.length
        if length > self.weight.shape[0]:
            raise MeshwrightError(
                "MW-BUILD-003",
                f"the sequence length {length} exceeds the {len(self.weight)} learned positions",
                fix=f"--set workload.seq={self.weight.shape[0]}",
            )
        return self.weight[:length] if position_ids is None else self.weight[position_ids.to(self.weight.device)]


class Embedding(nn.Module):
    def __init__(self, model: Model, geometry: Geometry) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.padded_vocab, model.hidden)
        self.positions = LearnedPositions(model, geometry) if model.positions == "learned" else None
        self.norm = make_norm(model) if model.embedding_norm else nn.Identity()
        self.drop = make_dropout(model.embedding_rate, "embedding", geometry)
        self.scale = model.embedding_scale

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSH = self.tokens(ids_BS)
        if self.scale != 1:  # rounded to the dtype of the embeddings, as models that have it were trained
            x_BSH = x_BSH * float(torch.tensor(self.scale, dtype=x_BSH.dtype))
        if self.positions is not None:
            x_BSH = x_BSH + self.positions(ids_BS.shape[1])
        return self.drop(self.norm(x_BSH))


class Head(nn.Module):
    """Logits, or the loss itself where `fuses_loss` is set and a context names the targets (`loss`)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.fuses_loss = False
        self.norm = make_norm(model) if model.final_norm else nn.Identity()
        self.project = ProductLinear(model.hidden, model.padded_vocab, bias=False)
        self.scale, self.softcap = model.logit_scale, model.logit_softcap

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_BSH = self.norm(x_BSH)
        if self.scale != 1:  # of the logits: the projection is linear, and this tensor is smaller
            x_BSH = x_BSH * self.scale
        targets = current().targets if self.fuses_loss else None
        if targets is None:
            logits = self.project(x_BSH)
            return soft_cap(logits, self.softcap) if self.softcap else logits
        return linear_cross_entropy(x_BSH, self.project.weight, targets, self.softcap)


class Transformer(nn.Module):
    """The whole network, or the pipeline stage with `layers`. A tied head shares the embedding's weight if both are in
    the same stage."""

    def __init__(self, model: Model, layers: range) -> None:
        super().__init__()
        legality.check(PlanFields(), model, trainer=True)
        self.geometry = geometry = Geometry(model)
        self.embedding = Embedding(model, geometry) if layers.start == 0 else None
        self.layers = nn.ModuleDict({str(i): Layer(model, geometry, i) for i in layers})
        self.head = Head(model) if layers.stop == model.layers else None
        if model.tied and self.embedding is not None and self.head is not None:
            self.head.project.weight = self.embedding.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        x_BSH = self.body(self.embedding(x) if self.embedding is not None else x)
        return self.head(x_BSH) if self.head is not None else x_BSH

    def body(self, x_BSH: Tensor) -> Tensor:
        """All between the embedding and the head."""
        for layer in self.layers.values():
            x_BSH = layer(x_BSH)
        return x_BSH
