"""AdamW in one pass over a GPU's memory: clip, decay, moments, update, and the rounding of a master to its parameter.

    read    gradient 2 or 4 bytes, master 4, both moments 8
    write   master 4, both moments 8, parameter 2

28 or 30 bytes for each parameter. In separate passes it would be 60: the gradient is widened (6), scaled by the clip factor (8) and copied
(8), the update reads and writes 28, the parameter is rounded (6), and the norm reads the wide gradient once more (4).

The clip factor is a number on the device: the kernel reads it there, and the host does not wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class FusedAdamW(torch.optim.AdamW):
    """torch's AdamW, with the same states, for float32 parameters on a GPU. `rounded` has the tensor that each updated parameter is
    rounded to, if any. `gradient_factor` is multiplied with every gradient of the next step."""

    rounded: Mapping[nn.Parameter, torch.Tensor] = {}
    gradient_factor: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        from meshwright.training.optimizer import adamw_kernel

        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
                state["step"] += 1
                adamw_kernel.update(
                    parameter,
                    parameter.grad,
                    (state["exp_avg"], state["exp_avg_sq"]),
                    self.rounded.get(parameter),
                    self.gradient_factor,
                    int(state["step"]),
                    group,
                )
        self.gradient_factor = None
