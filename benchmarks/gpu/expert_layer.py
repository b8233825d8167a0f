"""One layer of experts, forward and backward: ours and a plain loop over experts, with the same weights and inputs.

    python benchmarks/gpu/expert_layer.py          # on a GPU; DEVICE=cpu tries the script without one

The loop is the one that introductions show: for every expert, a mask selects its tokens, and their weighted outputs are added at their places.
Each mask makes the host wait for the device.

    eager      both as written
    compiled   ours as `meshwright train` runs it on a GPU: activation, sums of copies and shared experts compiled, the router on tensor cores.
               The loop with the same parts compiled that it has: the activation, for any number of tokens, and the shared experts. torch
               cannot compile the loop itself, because its sizes depend on the routing
"""

import os
import statistics
import time

import torch
from shapes import EXPERTS
from torch import nn
from torch.nn import functional as F

from meshwright.describe.model import Model
from meshwright.models.moe import MixtureOfExperts
from meshwright.parallel.compile import compile_experts
from meshwright.parallel.stages import choose_products

DEVICE = os.environ.get("DEVICE", "cuda")
REPEATS, TOKENS, SHRINK = (7, 16384, 1) if DEVICE == "cuda" else (1, 64, 16)


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


class Loop(nn.Module):
    """The router and the weights of `layer`, used expert by expert."""

    def __init__(self, layer: MixtureOfExperts, top_k: int) -> None:
        super().__init__()
        self.layer, self.top_k, self.gated = layer, top_k, gated

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        x_TH = x_BSH.flatten(0, 1)
        experts, scores = self.layer.experts, F.linear(x_TH.float(), self.layer.router.weight.float())
        weights, chosen = scores.softmax(-1).topk(self.top_k, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x_TH.dtype)
        out_TH = torch.zeros_like(x_TH)
        for i in range(len(experts.up.weight)):
            here = chosen == i
            mask = here.any(-1)
            if mask.any():
                x = x_TH[mask]
                inner = self.gated(x @ experts.gate.weight[i].t(), x @ experts.up.weight[i].t())
                weight = (weights[mask] * here[mask]).sum(-1, keepdim=True)
                out_TH[mask] += weight * (inner @ experts.down.weight[i].t())
        y_BSH = out_TH.view_as(x_BSH)
        return y_BSH if self.layer.shared is None else y_BSH + self.layer.shared(x_BSH)


def seconds(layer: nn.Module, x: torch.Tensor) -> float:
    """The median time of forward and backward."""
    times = []
    for i in range(REPEATS + 2):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        layer(x).sum().backward()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        if i >= 2:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def compare(name: str, layer: MixtureOfExperts, loop: Loop, x: torch.Tensor, mode: str) -> None:
    with torch.no_grad():
        ours, theirs = layer(x).float(), loop(x).float()
        difference = float((ours - theirs).norm() / theirs.norm())
    plain, looped = seconds(layer, x), seconds(loop, x)
    print(
        f"{name} layer, {TOKENS} tokens, {mode}: ours {plain * 1e3:.2f} ms, loop over experts {looped * 1e3:.2f} ms ({looped / plain:.2f}x); "
        f"outputs differ by {difference:.1e}",
        flush=True,
    )


def main() -> None:
    torch.manual_seed(0)
    for name, (fields, _) in EXPERTS.items():
        model = Model(**{k: v for k, v in fields.items() if k not in ("batch", "seq")})
        model = model.but(hidden=model.hidden // SHRINK, ffn=model.ffn // SHRINK)
        layer = MixtureOfExperts(model).to(DEVICE)
        for p in layer.parameters():
            nn.init.normal_(p, std=0.02)
        layer.to(torch.bfloat16)
        x = torch.randn(1, TOKENS, model.hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        loop = Loop(layer, model.top_k)
        compare(name, layer, loop, x, "eager")
        choose_products(layer, DEVICE, x.dtype, None, fuses_loss=False)
        compile_experts(layer)  # and the shared experts, which the loop calls too
        loop.gated = torch.compile(gated, dynamic=True)
        compare(name, layer, loop, x, "compiled")


if __name__ == "__main__":
    main()
