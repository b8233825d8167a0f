"""megatron-core. Parameters say how they are cut, the buffers of its DDP hold the gradients, layers and experts know their numbers."""

from typing import Any

import torch
from torch import nn

from meshwright.check.frameworks.plain import FrameworkAdapter, HeldPart
from meshwright.check.holdings import Holding, cut, whole

UNMARKED = {"softmax_offset": 0}  # parameters that are cut over tp and do not say so: the dimension


class Megatron(FrameworkAdapter):
    name = "megatron-core"
    batch_dim = 1  # activations are [sequence, batch, features]

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        return any(type(module).__module__.startswith("megatron.core.") for module in model.modules())

    def attach(self) -> None:
        self.place = places()
        from megatron.core.optimizer.optimizer import MegatronOptimizer

        for kind in (MegatronOptimizer, *subclasses(MegatronOptimizer)):
            for method in {"clip_grad_norm", "get_grad_norm"} & vars(kind).keys():
                self.watch_clipping(kind, method)

    def value(self, name: str, tensor: torch.Tensor) -> list[HeldPart]:
        parameter = self.parameters[name]
        copied = getattr(parameter, "shared_embedding", False) and name.endswith("output_layer.weight")
        original = "embedding.word_embeddings.weight" if copied else ""  # the last stage's copy
        index, of = self.place["etp" if not getattr(parameter, "allreduce", True) else "tp"]
        unmarked = UNMARKED.get(name.rpartition(".")[2], -1)
        dim = (
            getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else unmarked
        )
        if dim < 0 or of == 1:
            return [HeldPart(tensor, whole(tensor), original)]
        gated = self.gated and ".linear_fc1." in name
        stride = 2 if gated else getattr(parameter, "partition_stride", 1)
        return [HeldPart(*part, original) for part in cut(tensor, dim, index, of, stride)]

    @property
    def gated(self) -> bool:
        """Whether the first matrix of an MLP is two, one above the other, each of which is cut."""
        return any(getattr(getattr(m, "config", None), "gated_linear_unit", False) for m in self.modules())

    def gradient(self, name: str, parameter: nn.Parameter) -> list[HeldPart]:
        gradient = getattr(parameter, "main_grad", None)
        gradient = parameter.grad if gradient is None else gradient
        if gradient is None:
            return []
        parts = self.value(name, gradient)
        owned = self.owned(parameter)
        if owned is None or len(parts) > 1:
            return parts if owned is None else []
        box = parts[0].holding
        if owned[0] >= owned[1]:
            return []
        return [
            HeldPart(
                gradient.reshape(-1)[slice(*owned)], Holding(box.shape, box.start, box.size, flat=owned), parts[0].name
            )
        ]

    def owned(self, parameter: nn.Parameter) -> tuple[int, int] | None:
        """The elements of a parameter whose reduced gradient this rank has, under the distributed optimizer; None: all."""
        for part in self.modules():
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

    def local_gradient(self, name: str, gradient: torch.Tensor) -> list[HeldPart]:
        return self.value(name, gradient)

    def coordinates(self) -> dict[str, int]:
        return {axis: index for axis, (index, _) in self.place.items() if axis != "etp"}

    def layout(self) -> str:
        sizes = {axis: n for axis, (_, n) in self.place.items() if n > 1 and axis != "etp"}
        sharded = any(b.ddp_config.use_distributed_optimizer for part in self.modules() for b in self.ddp_buffers(part))
        words = [f"{axis} {n}" for axis, n in sizes.items()] + ["distributed optimizer"] * sharded
        sequence = any(getattr(getattr(m, "config", None), "sequence_parallel", False) for m in self.modules())
        return " × ".join(words + ["sequence parallel"] * sequence) or "one device"


def places() -> dict[str, tuple[int, int]]:
    """By axis, this rank's place and the degree."""
    from megatron.core import parallel_state as state

    names = {
        "tp": "tensor_model_parallel", "pp": "pipeline_model_parallel", "dp": "data_parallel", "cp": "context_parallel",
        "ep": "expert_model_parallel", "etp": "expert_tensor_parallel",
    }  # fmt: skip
    return {
        axis: (getattr(state, f"get_{name}_rank")(), getattr(state, f"get_{name}_world_size")())
        for axis, name in names.items()
    }


def subclasses(kind: type) -> set[type]:
    children: list[type] = kind.__subclasses__()
    return {sub for child in children for sub in (child, *subclasses(child))}
