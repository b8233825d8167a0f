"""megatron-core. Parameters say how they are cut, the buffers of its DDP hold the gradients, layers and experts know their numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright.check.frameworks.plain import FrameworkAdapter, Listener, Part, wrap_method
from meshwright.check.holdings import Holding, cut, whole


class Megatron(FrameworkAdapter):
    name = "megatron-core"
    batch_dim = 1  # activations are [sequence, batch, features]

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        return any(type(module).__module__.startswith("megatron.core.") for module in model.modules())

    def prepare(self, parameters: dict[str, nn.Parameter], listener: Listener) -> None:
        super().prepare(parameters, listener)
        from megatron.core.optimizer.optimizer import MegatronOptimizer

        for kind in (MegatronOptimizer, *subclasses(MegatronOptimizer)):
            for method in {"clip_grad_norm", "get_grad_norm"} & vars(kind).keys():
                wrap_method(
                    kind, method, lambda _: listener.before_clipping(), lambda _, norm: listener.after_clipping(norm)
                )

    def value(self, name: str, tensor: torch.Tensor) -> list[Part]:
        from megatron.core import parallel_state as state

        parameter = self.parameters[name]
        expert = not getattr(parameter, "allreduce", True)
        sizes = "expert_tensor_parallel" if expert else "tensor_model_parallel"
        of, index = (getattr(state, f"get_{sizes}_{what}")() for what in ("world_size", "rank"))
        dim = getattr(parameter, "partition_dim", -1)
        if not getattr(parameter, "tensor_model_parallel", False) or dim < 0 or of == 1:
            return [(tensor, whole(tensor))]
        gated = self.gated and ".linear_fc1." in name
        return cut(tensor, dim, index, of, 2 if gated else getattr(parameter, "partition_stride", 1))

    @property
    def gated(self) -> bool:
        """Whether the first matrix of an MLP is two, one above the other, each of which is cut."""
        return any(getattr(getattr(m, "config", None), "gated_linear_unit", False) for m in self.model.modules())

    def gradient(self, name: str, parameter: nn.Parameter) -> list[Part]:
        gradient = getattr(parameter, "main_grad", None)
        gradient = parameter.grad if gradient is None else gradient
        if gradient is None:
            return []
        parts = self.value(name, gradient)
        owned = self.owned(parameter)
        if owned is None or len(parts) > 1:
            return parts if owned is None else []
        box = parts[0][1]
        if owned[0] >= owned[1]:
            return []
        return [(gradient.reshape(-1)[slice(*owned)], Holding(box.shape, box.start, box.size, flat=owned))]

    def owned(self, parameter: nn.Parameter) -> tuple[int, int] | None:
        """The elements of a parameter whose reduced gradient this rank has, under the distributed optimizer; None: all."""
        for part in self.model.modules():
            for buffer in self.ddp_buffers(part):
                if parameter not in buffer.param_index_map or not buffer.ddp_config.use_distributed_optimizer:
                    continue
                first, last, bucket_id = buffer.param_index_map[parameter][:3]
                bucket = buffer.buckets[bucket_id]
                group = buffer.data_parallel_group
                size, at = bucket.grad_data.numel() // group.size(), group.rank()
                low, high = bucket.offset + at * size, bucket.offset + (at + 1) * size
                return min(max(low - first, 0), last - first), max(min(high, last) - first, 0)
        return None

    @staticmethod
    def ddp_buffers(part: nn.Module) -> list[Any]:
        if type(part).__name__ != "DistributedDataParallel" or not hasattr(part, "ddp_config"):
            return []
        return [*vars(part).get("buffers", []), *vars(part).get("expert_parallel_buffers", [])]

    def local_gradient(self, name: str, gradient: torch.Tensor) -> list[Part]:
        return self.value(name, gradient)

    def coordinates(self) -> dict[str, int]:
        from megatron.core import parallel_state as state

        names = {
            "tp": state.get_tensor_model_parallel_rank, "pp": state.get_pipeline_model_parallel_rank, "dp": state.get_data_parallel_rank,
            "cp": state.get_context_parallel_rank, "ep": state.get_expert_model_parallel_rank,
        }  # fmt: skip
        return {axis: rank() for axis, rank in names.items()}

    def layout(self) -> str:
        from megatron.core import parallel_state as state

        sizes = {
            "tp": state.get_tensor_model_parallel_world_size(), "pp": state.get_pipeline_model_parallel_world_size(),
            "dp": state.get_data_parallel_world_size(), "cp": state.get_context_parallel_world_size(),
            "ep": state.get_expert_model_parallel_world_size(),
        }  # fmt: skip
        return " × ".join(f"{axis} {n}" for axis, n in sizes.items() if n > 1) or "one device"


def subclasses(kind: type) -> set[type]:
    children: list[type] = kind.__subclasses__()
    return {sub for child in children for sub in (child, *subclasses(child))}
