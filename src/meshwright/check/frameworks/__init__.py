"""How each framework says what a rank holds, and where its gradients are: one object each. The first that recognises a model is used."""

from torch import nn

from meshwright.check.frameworks.deepspeed import DeepSpeed
from meshwright.check.frameworks.fsdp import FSDP1, FSDP2
from meshwright.check.frameworks.megatron import Megatron
from meshwright.check.frameworks.own import OwnNetwork
from meshwright.check.frameworks.plain import FrameworkAdapter, Listener
from meshwright.check.modules import topmost

FRAMEWORKS: tuple[type[FrameworkAdapter], ...] = (OwnNetwork, DeepSpeed, Megatron, FSDP2, FSDP1, FrameworkAdapter)


def with_model(
    adapter: FrameworkAdapter | None, module: nn.Module, parameters: dict[str, nn.Parameter], listener: Listener
) -> FrameworkAdapter:
    """The adapter that knows the model of a module too: the one so far, or a new one if this model tells more of the framework."""
    model = topmost(module)
    kind = next(kind for kind in FRAMEWORKS if kind.recognises(model))
    if adapter is None or FRAMEWORKS.index(kind) < FRAMEWORKS.index(type(adapter)):
        earlier, adapter = adapter, kind(listener)
        if earlier is not None:
            earlier.release()
            for known in earlier.models:
                adapter.add(known, earlier.parameters)
    adapter.add(model, parameters)
    return adapter
