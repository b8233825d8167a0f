"""Bugs to plant in torchtitan, or in the PyTorch that it uses, by replacing functions of them."""

import common
import torch


def loss_is_divided_by_local_tokens(chosen):
    common.BATCH = common.BATCH // chosen.world
    tokens = common.tokens

    def whole(step):
        common.BATCH *= chosen.world
        try:
            return tokens(step)
        finally:
            common.BATCH //= chosen.world

    common.tokens = whole


def rotary_is_shifted(chosen):
    from torchtitan.models.llama3.model import model

    plain = model.apply_rotary_emb
    model.apply_rotary_emb = lambda q, k, freqs_cis, **more: plain(
        q, k, freqs_cis=freqs_cis.roll(chosen.rank, 0), **more
    )


def norm_gradients_are_not_summed(chosen):
    """Of norms under sequence parallelism: their gradients stay the parts of the ranks."""
    from torch.distributed.tensor import DTensor, Replicate

    plain = torch.optim.AdamW.step

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
                places = [Replicate() if p.is_partial() else p for p in gradient.placements]
                parameter.grad = DTensor.from_local(gradient.to_local(), gradient.device_mesh, places, run_check=False)
        return plain(self, closure)

    torch.optim.AdamW.step = step


def gradients_are_divided_twice(chosen):
    from torch.distributed.fsdp import FSDPModule

    FSDPModule.set_gradient_divide_factor = lambda self, factor: None


def plant(chosen):
    globals()[chosen.bug](chosen)
