"""Pipeline stages of a user's module: its layers divided, its own `forward` run on every stage.

A module is a list of layers with something before and after it. Each stage keeps the whole structure and calls the module's own `forward` on the
micro-batch, so that masks, positions and whatever else the layers are given are computed as the author wrote them:

    before the list    modules with parameters run on the first stage; elsewhere they return zeros of the shape they had in the example
    earlier layers     hold nothing; the last of them returns the activations that came from the stage before
    this stage's       run
    later layers       hold nothing; the first of them leaves `forward` with the activations for the next stage
    after the list     runs on the last stage, then the loss

What each module returns and in which order they run is recorded once, on an example micro-batch (`record`): all micro-batches have its shape.
A parameter that several stages hold (tied embeddings, parameters of the root itself) has a gradient on each of them, and `parallelize` sums them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.errors import MeshwrightError
from meshwright.parallel.tensor.styles import input_of
from meshwright.parallel.user_module.batches import call, map_tensors, tensors_in


def find_layers(module: nn.Module, path: str | None, needed: bool) -> tuple[str, list[nn.Module]]:
    """The path of the list of layers, and the layers. Default: the module itself if it is a Sequential, else its largest list."""
    lists = {
        n: part for n, part in module.named_modules() if isinstance(part, nn.ModuleList | nn.Sequential) and len(part)
    }
    if path is None:
        sizes = {n: sum(p.numel() for p in part.parameters()) for n, part in lists.items()}
        path = "" if isinstance(module, nn.Sequential) else max(sizes, key=sizes.__getitem__, default="")
    if path in lists:
        return path, list(lists[path].children())
    if not needed:
        return "", []
    raise MeshwrightError(
        "MW-OWN-002",
        f"'{path}' of {type(module).__name__} is not a list of layers"
        if path
        else f"{type(module).__name__} has no list of layers",
        why="A pipeline divides the layers of an nn.Sequential or nn.ModuleList",
        valid=sorted(n for n in lists if n),
        fix='parallelize(…, layers="model.layers")',
    )


@dataclass
class Recorded:
    """What one micro-batch showed: the input of every layer, whether layers return tuples, and what is before and after them."""

    path: str
    numbers: list[str]  # the names of the layers in their list
    inputs: list[torch.Tensor] = field(default_factory=list)  # on the meta device
    extra: list[int] = field(
        default_factory=list
    )  # how many values a layer returns after the activations; -1: no tuple
    before: dict[str, list[Any]] = field(default_factory=dict)  # by module, its outputs
    after: set[str] = field(default_factory=set)


@torch.no_grad()
def record(module: nn.Module, path: str, layers: list[nn.Module], example: Any) -> Recorded:
    """Run the example once, on the whole module, and write down what the stages must know."""
    numbers = [name for name, _ in module.get_submodule(path).named_children()]
    seen, started, finished = Recorded(path, numbers), [False], [False]
    called: dict[str, set[str]] = {}

    def note_layer(part: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        started[0] = True
        x, _ = input_of(part.forward)(args, kwargs)
        seen.inputs.append(torch.empty_like(x, device="meta"))
        seen.extra.append(len(output) - 1 if isinstance(output, tuple) else -1)
        finished[0] = len(seen.inputs) == len(layers)

    def note(name: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: tuple, output: Any) -> None:
            called.setdefault(name, set()).add("after" if finished[0] else "inside" if started[0] else "before")
            seen.before.setdefault(name, []).append(map_tensors(lambda t: torch.empty_like(t, device="meta"), output))

        return hook

    hooks = [layer.register_forward_hook(note_layer, with_kwargs=True) for layer in layers]
    hooks += [module.get_submodule(name).register_forward_hook(note(name)) for name in modules_outside(module, path)]
    buffers = [(b, b.clone()) for b in module.buffers()]
    try:
        cuda = {p.device for p in module.parameters() if p.is_cuda}
        with torch.random.fork_rng(devices=list(cuda)):
            call(module, example)
    finally:
        for hook in hooks:
            hook.remove()
        for buffer, value in buffers:
            buffer.copy_(value)
    if len(seen.inputs) != len(layers):
        raise MeshwrightError(
            "MW-OWN-002",
            f"the example ran {len(seen.inputs)} of the {len(layers)} layers in '{path}'",
            why="Each layer of a pipeline runs once, in the order of the list",
        )
    seen.after = {name for name, when in called.items() if when == {"after"}}
    held = {name for name in called if any(True for _ in module.get_submodule(name).parameters())}
    seen.before = {name: seen.before[name] for name in held if called[name] == {"before"}}
    return seen


def modules_outside(module: nn.Module, path: str) -> list[str]:
    """The modules next to the way from the root to the list of layers: all that is not in a layer."""
    out, here = [], ""
    for step in path.split(".") if path else []:
        prefix = f"{here}." if here else ""
        out += [f"{prefix}{name}" for name, _ in module.get_submodule(here).named_children() if name != step]
        here = f"{prefix}{step}"
    return out


class _Leave(BaseException):
    """Carries a stage's activations out of the module's `forward`."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class StageModule(nn.Module):
    """One stage: a copy of the module's structure with the parameters of its layers."""

    def __init__(
        self, root: nn.Module, seen: Recorded, own: range, count: int, finish: Callable[[Any, Any], torch.Tensor]
    ) -> None:
        super().__init__()
        self.root, self.own, self.finish = root, own, finish
        self.received: torch.Tensor | None = None
        self.inputs: Any = None
        self.targets: Any = None
        layers = list(root.get_submodule(seen.path).children())
        self.layers = [layers[i] for i in own]
        for i, layer in enumerate(layers):
            if i in own:
                continue
            release(layer)
            layer.forward = leave if i > own[-1] else self._passer(seen.extra[i])
        for name, outputs in seen.before.items() if own[0] > 0 else ():
            release(root.get_submodule(name))
            root.get_submodule(name).forward = zeros_like_example(outputs)
        for name in seen.after if own[-1] < count - 1 else ():
            release(root.get_submodule(name))

    def _passer(self, extra: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.received if extra < 0 else (self.received, *[None] * extra)

        return forward

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.received = hidden
        try:
            output = call(self.root, self.inputs)
        except _Leave as leaving:
            return leaving.hidden
        finally:
            self.received = None
        return self.finish(output, self.targets)


def leave(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    raise _Leave(hidden)


def zeros_like_example(outputs: list[Any]) -> Callable[..., Any]:
    """A forward that returns zeros of the shapes of the example, call by call."""
    calls = [0]

    def forward(*args: Any, **kwargs: Any) -> Any:
        device = next(tensors_in([list(args), kwargs])).device
        made = map_tensors(lambda t: torch.zeros_like(t, device=device), outputs[calls[0] % len(outputs)])
        calls[0] += 1
        return made

    return forward


def release(module: nn.Module) -> None:
    """Free the parameters of what this stage does not hold; their names, shapes and dtypes stay readable."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            del part._parameters[name]
            object.__setattr__(part, name, torch.empty_like(parameter, device="meta", requires_grad=False))


def copy_structure(module: nn.Module) -> nn.Module:
    """A copy that shares parameters and buffers with the original."""
    shared = {id(t): t for t in [*module.parameters(), *module.buffers()]}
    return copy.deepcopy(module, shared)
