"""How the recorder and the watch see a training that knows nothing of them: hooks of modules and optimizers, and functions of torch replaced.

What is replaced is put back by `detach`. Processes of a data loader are left alone: they are forks of a rank, or start like one.
"""

import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import nn

from meshwright.check.frameworks import with_model
from meshwright.check.frameworks.plain import FrameworkAdapter, Listener, replace_attribute
from meshwright.check.modules import Names

SHAPE_FRAMES = 8  # between a stage's call and the pipeline's method
SHAPE_METHOD = "_compute_outputs"  # of torch.distributed.pipelining.stage.PipelineStage


class ProcessHooks:
    """Hooks in this process, the models that it calls and their framework."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.names = Names()
        self.framework: FrameworkAdapter | None = None
        self.undo: list[Callable[[], object]] = []
        os.register_at_fork(after_in_child=self.adopt)

    def adopt(self) -> None:
        """In a rank that was forked from a process that only imported torch."""
        if self.framework is None:
            self.pid = os.getpid()

    @property
    def in_training_process(self) -> bool:
        return os.getpid() == self.pid and torch.utils.data.get_worker_info() is None

    @property
    def adapter(self) -> FrameworkAdapter:
        """The framework, once a model is known."""
        assert self.framework is not None
        return self.framework

    def learn(self, module: nn.Module, listener: Listener) -> dict[str, nn.Parameter]:
        """Learn the model of a module; the parameters that are new."""
        if not (new := self.names.learn(module)):
            return {}
        if self.framework is None:
            Finalize(None, self.close, exitpriority=10)  # runs in ranks of `multiprocessing` too, unlike `atexit`
        self.framework = with_model(self.framework, module, new, listener)
        return {name: self.framework.parameters[name] for name in new}

    def close(self) -> None:
        """At the end of the process."""
        self.detach()

    def detach(self) -> None:
        if self.framework is not None:
            self.framework.release()
        while self.undo:
            self.undo.pop()()


def wrap_clipping(listener: Listener) -> Iterator[Callable[[], object]]:
    """Clipping is a function, not a module: tell that gradients are complete, and the norm that they are clipped with. What
    `get_total_norm` returns is not told: parts of it may still be summed over ranks."""
    for name in ("clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm"):
        plain = getattr(nn.utils, name)

        def clip(*args: Any, plain: Callable[..., Any] = plain, name: str = name, **kwargs: Any) -> Any:
            listener.begin_clipping()
            result = plain(*args, **kwargs)
            if name == "clip_grads_with_norm_":
                listener.end_clipping(kwargs["total_norm"] if "total_norm" in kwargs else args[2])
            else:
                listener.end_clipping(result if name == "clip_grad_norm_" else None)
            return result

        for place in (nn.utils, nn.utils.clip_grad):
            if hasattr(place, name):
                yield replace_attribute(place, name, clip)


def wrap_backward(note_loss: Callable[[torch.Tensor], None]) -> Callable[[], object]:
    """A loss is what backward begins with: a number without a given gradient."""
    plain = torch.autograd.backward

    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        given = grad_tensors if isinstance(grad_tensors, (tuple, list)) else (grad_tensors,)
        for tensor in (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors):
            if all(gradient is None for gradient in given):
                note_loss(tensor)
        return plain(tensors, grad_tensors, *args, **kwargs)

    return replace_attribute(torch.autograd, "backward", backward)  # `Tensor.backward` calls it by this name


def wrap_end_of_groups(before: Callable[[], object]) -> Iterator[Callable[[], object]]:
    """What ranks hold together must be read before their groups are gone."""
    plain = getattr(torch.distributed, "destroy_process_group", None)
    if plain is None:
        return

    def destroy_process_group(group: Any = None) -> None:
        if group is None:
            before()
        plain(group)

    yield replace_attribute(torch.distributed, "destroy_process_group", destroy_process_group)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of an input or output, in order."""
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.numel() > 0]


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def infers_shapes() -> bool:
    """Whether PyTorch's pipeline calls a stage with tensors that nobody has set, to learn the shapes of its outputs."""
    frame = sys._getframe(1)
    for _ in range(SHAPE_FRAMES):
        if frame is None or frame.f_code.co_name == SHAPE_METHOD:
            return frame is not None
        frame = frame.f_back  # type: ignore[assignment]
    return False


def rank() -> int:
    return torch.distributed.get_rank() if initialized() else int(os.environ.get("RANK", 0))


def world() -> int:
    return torch.distributed.get_world_size() if initialized() else int(os.environ.get("WORLD_SIZE", 1))


def initialized() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
