"""What the training scripts share: their arguments, a small model in plain PyTorch, the tokens of a step.

    python SCRIPT.py [LAYOUT] --dtype fp32 --accumulate 1 --clip 0 --bug NAME

A script trains two steps, or STEPS, with one global batch of 8 sequences, whatever its layout is. `--accumulate` cuts the batch of a rank
into micro-batches.
"""

import argparse
import os

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, HIDDEN, HEADS, SEQ, BATCH = 96, 32, 4, 16, 8
STEPS = int(os.environ.get("STEPS", "2"))
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("layout", nargs="*", help="what the script's framework offers: tp2 dp2 …")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--bug", default="")
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "sgd"))
    chosen = parser.parse_intermixed_args()
    chosen.type = DTYPES[chosen.dtype]
    chosen.rank, chosen.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    return chosen


def degree(layout, axis):
    """The number in a word such as tp2; 1 if there is none."""
    return next((int(word[len(axis) :]) for word in layout if word.startswith(axis) and word[len(axis) :].isdigit()), 1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x):
        batch, seq, _ = x.shape
        q, k, v = (part(x).view(batch, seq, -1, HIDDEN // HEADS).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(batch, seq, -1))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(HIDDEN), Attention()
        self.norm2, self.mlp, self.drop = nn.LayerNorm(HIDDEN), Mlp(), nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.drop(self.mlp(self.norm2(x)))


class Gpt(nn.Module):
    def __init__(self, layers=2, tied=False, dropout=0.0):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(SEQ, HIDDEN)
        self.layers = nn.ModuleList([Block(dropout) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def model_of(chosen, **more):
    torch.manual_seed(0)
    return Gpt(**more).to(chosen.type)


def optimizer_of(chosen, parameters):
    if chosen.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.1)
    return torch.optim.AdamW(parameters, lr=1e-3)


def tokens(step):
    """The sequences of one step and their next tokens, the same on every rank."""
    drawn = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(1000 + step))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def micro_batches(chosen, step, place=0, ranks=1):
    """The micro-batches of a data-parallel rank: its share of the global batch, cut."""
    share = [part.chunk(ranks)[place] for part in tokens(step)]
    return list(zip(*(part.chunk(chosen.accumulate) for part in share), strict=True))


def loss_of(logits, labels):
    wide = logits.float() if logits.dtype == torch.bfloat16 else logits
    return F.cross_entropy(wide.flatten(0, 1), labels.flatten())
