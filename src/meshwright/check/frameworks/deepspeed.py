"""DeepSpeed. Under ZeRO parameters and gradients lie in flat partitions; its own functions put them together, on all ranks at once."""

from typing import Any

import torch
from torch import nn

from meshwright.check.frameworks.plain import FrameworkAdapter, HeldPart, wrap_method
from meshwright.check.holdings import whole


class DeepSpeed(FrameworkAdapter):
    name = "DeepSpeed"
    shows_clipped = False  # it clips inside of its step

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        return any(kind.__module__.startswith("deepspeed.runtime") for kind in type(model).__mro__)

    def attach(self) -> None:
        from deepspeed.runtime.engine import DeepSpeedEngine

        def before(engine: object) -> None:
            if engine in self.models:
                self.listener.begin_clipping()

        def after(engine: Any, _: object) -> None:
            if engine in self.models:
                self.listener.end_clipping(engine.get_global_grad_norm())

        self.undo.append(wrap_method(DeepSpeedEngine, "_take_model_step", before, after))

    @property
    def engine(self) -> Any:
        return self.models[0]

    def value(self, name: str, tensor: torch.Tensor) -> list[HeldPart]:
        """The whole, gathered by DeepSpeed; of optimizer states nothing: they belong to flat partitions."""
        if tensor is not self.parameters[name]:
            return []
        if hasattr(tensor, "ds_tensor"):
            from deepspeed.utils import safe_get_full_fp32_param

            tensor = safe_get_full_fp32_param(tensor)
        return [HeldPart(tensor, whole(tensor))]

    def gradient(self, name: str, parameter: nn.Parameter) -> list[HeldPart]:
        from deepspeed.utils import safe_get_full_grad

        gradient = safe_get_full_grad(parameter)
        return [] if gradient is None else [HeldPart(gradient, whole(gradient))]

    def layout(self) -> str:
        words = f"ZeRO-{self.engine.zero_optimization_stage()} over {self.engine.dp_world_size}"
        return f"{words}, {self.stages_of_pipeline} pipeline stages" if self.stages_of_pipeline > 1 else words

    @property
    def stages_of_pipeline(self) -> int:
        return int(getattr(self.engine, "num_stages", 1))

    def coordinates(self) -> dict[str, int]:
        if self.stages_of_pipeline == 1:
            return super().coordinates()
        return {"pp": self.engine.grid.get_stage_id(), "dp": self.engine.grid.get_data_parallel_id()}
