"""DeepSpeed. Under ZeRO parameters and gradients lie in flat partitions; its own functions put them together, on all ranks at once."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.check.frameworks.plain import FrameworkAdapter, Listener, Part, wrap_method
from meshwright.check.holdings import whole


class DeepSpeed(FrameworkAdapter):
    name = "DeepSpeed"
    shows_clipped = False  # it clips inside of its step

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        return any(kind.__module__.startswith("deepspeed.runtime") for kind in type(model).__mro__)

    def prepare(self, parameters: dict[str, nn.Parameter], listener: Listener) -> None:
        super().prepare(parameters, listener)

        def before(engine: object) -> None:
            if engine is self.model and self.model.is_gradient_accumulation_boundary():  # type: ignore[operator]
                listener.before_clipping()

        def after(engine: object, _: object) -> None:
            if engine is self.model:
                listener.after_clipping(self.model.get_global_grad_norm())  # type: ignore[operator]

        wrap_method(type(self.model), "step", before, after)

    def value(self, name: str, tensor: torch.Tensor) -> list[Part]:
        """The whole, gathered by DeepSpeed; of optimizer states nothing: they belong to flat partitions."""
        if tensor is not self.parameters[name]:
            return []
        if hasattr(tensor, "ds_tensor"):
            from deepspeed.utils import safe_get_full_fp32_param

            tensor = safe_get_full_fp32_param(tensor)
        return [(tensor, whole(tensor))]

    def gradient(self, name: str, parameter: nn.Parameter) -> list[Part]:
        from deepspeed.utils import safe_get_full_grad

        gradient = safe_get_full_grad(parameter)
        return [] if gradient is None else [(gradient, whole(gradient))]

    def layout(self) -> str:
        stage = self.model.zero_optimization_stage()  # type: ignore[operator]
        return f"ZeRO-{stage} over {self.model.dp_world_size}"
