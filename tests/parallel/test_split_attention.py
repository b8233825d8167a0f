"""`nn.MultiheadAttention` split by heads equals one device, with every kind of mask, and in evaluation."""

import torch
from torch import nn

import ranks
import split_sums

B, S, H, HEADS = 2, 4, 8, 4


def masks():
    torch.manual_seed(1)
    causal = nn.Transformer.generate_square_subsequent_mask(S, dtype=torch.float64)
    padding = torch.tensor([[False, False, True, True], [False, False, False, True]])
    each = torch.randn(B * HEADS, S, S, dtype=torch.float64)
    return {
        "none": {},
        "causal": {"attn_mask": causal, "need_weights": False},
        "padding": {"key_padding_mask": padding},
        "both": {"key_padding_mask": padding, "attn_mask": causal == 0, "need_weights": False},
        "of each head": {"attn_mask": each, "average_attn_weights": False},
    }


def made(batch_first, separate):
    torch.manual_seed(0)
    part = nn.MultiheadAttention(H, HEADS, batch_first=batch_first, kdim=6 if separate else None).double()
    for p in part.parameters():
        nn.init.normal_(p, std=0.5)
    return nn.ModuleDict({"part": part})


def compared(context):
    from torch import distributed

    from meshwright.parallel.tensor.split import split

    group, errors = distributed.group.WORLD, {}
    for batch_first in (True, False):
        for separate in (True, False):
            for name, options in masks().items():
                if name == "both":
                    options = {**options, "attn_mask": ~options["attn_mask"]}
                plain, module = made(batch_first, separate), made(batch_first, separate)
                done = split(module, (("part", "attention"), ("part.out_proj", "row")), group)
                shape = (B, S) if batch_first else (S, B)
                x = torch.randn(
                    *shape, H, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
                ).requires_grad_()
                y = x.detach()[..., :6].clone() if separate else x
                given = (x, y, x) if separate else (x, x, x)
                expected, weights = plain["part"](*given, **options)
                (slope,) = torch.autograd.grad(expected.square().sum(), x, retain_graph=True)
                expected.square().sum().backward()
                true, x.grad = slope, None
                got, mine = module["part"](*given, **options)
                got.square().sum().backward()
                found = {"output": got - expected, "input": x.grad - true}
                if weights is not None:
                    found["weights"] = mine - weights
                for n, p in module.named_parameters():
                    found[n] = split_sums.whole(done, n, p.grad) - plain.get_parameter(n).grad
                key = f"{name} {batch_first} {separate}"
                errors |= {f"{key} {what}": float(d.abs().max()) for what, d in found.items()}
    return {what: error for what, error in errors.items() if not error < 1e-11}


def test_attention_split_by_heads_equals_one_device():
    assert ranks.run(2, compared) == [{}, {}]


def evaluated(context):
    from torch import distributed

    from meshwright.parallel.tensor import tables as families
    from meshwright.parallel.tensor.split import split

    def encoder():
        torch.manual_seed(0)
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(H, 2, 16, batch_first=True), 2).double()

    plain, module = encoder().eval(), encoder().eval()
    split(module, families.transformer_encoder(module), distributed.group.WORLD)
    x, padding = torch.ones(B, S, H, dtype=torch.float64).cumsum(1), torch.tensor([[False] * 4, [False] * 3 + [True]])
    with torch.no_grad():
        expected, got = plain(x, src_key_padding_mask=padding), module(x, src_key_padding_mask=padding)
    return float(((got - expected) * ~padding[..., None]).abs().max())


def test_evaluation_does_not_use_the_fast_path():
    assert max(ranks.run(2, evaluated)) < 1e-11
