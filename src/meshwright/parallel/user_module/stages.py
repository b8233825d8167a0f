"""Pipeline stages of a user's module: its layers divided, its own `forward` run on every stage.

A module is a list of layers with something before and after it. Each stage keeps the whole structure and calls the module's own `forward` on the
micro-batch, so that masks, positions and whatever else the layers are given are computed as the author wrote them:

    before the list    modules with parameters run on the first stage; elsewhere they return zeros of the shape they had in the example
    earlier layers     hold nothing and return such zeros; the last of them returns the activations that came from the stage before
    this stage's       run
    later layers       hold nothing; the first of them leaves `forward` with the activations for the next stage
    after the list     runs on the last stage, then the loss

What each module returns and in which order they run is recorded once, on an example micro-batch (`record`): all micro-batches have its shape.
The same run shows whether a stage reads one of those zeros (`dataflow`), which is an error.
A parameter that several stages hold (tied embeddings, parameters of the root itself) has a gradient on each of them, and `parallelize` sums them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.errors import MeshwrightError
from meshwright.parallel.tensor.styles import input_of
from meshwright.parallel.user_module.batches import RandomState, call, map_tensors, tensors_in, undisturbed
from meshwright.parallel.user_module.dataflow import Trace, check_order, hidden_of


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
    """Records of one micro-batch: the input and output of every layer, what is before and after them, and all operators."""

    path: str
    numbers: list[str]  # the names of the layers in their list
    trace: Trace
    output: Any = None  # of the module
    inputs: list[torch.Tensor] = field(default_factory=list)  # of layers, on the meta device
    outputs: list[Any] = field(default_factory=list)  # of layers, on the meta device
    random: list[RandomState] = field(default_factory=list)  # before each layer
    before: dict[str, list[Any]] = field(default_factory=dict)  # by module, its outputs
    after: set[str] = field(default_factory=set)


@torch.no_grad()
def record(module: nn.Module, path: str, layers: list[nn.Module], example: Any) -> Recorded:
    """Run the example once, on the whole module, and write down what the stages must know."""
    numbers = [name for name, _ in module.get_submodule(path).named_children()]
    outside = modules_outside(module, path)
    trace = Trace(module, layers, outside)
    seen = Recorded(path, numbers, trace)
    called: dict[str, set[str]] = {}

    def enter_layer(part: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        hidden = hidden_of(part, args, kwargs)
        if hidden is None:
            raise not_one_tensor(part, "does not take a tensor as its first argument")
        seen.inputs.append(torch.empty_like(hidden, device="meta"))
        seen.random.append(RandomState.of(hidden.device))

    def leave_layer(part: nn.Module, args: tuple, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(hidden, torch.Tensor):
            raise not_one_tensor(part, f"returns a {type(output).__name__}")
        seen.outputs.append(on_meta(output))

    def note(name: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: tuple, output: Any) -> None:
            when = "before" if not seen.inputs else "after" if trace.finished == len(layers) else "inside"
            called.setdefault(name, set()).add(when)
            seen.before.setdefault(name, []).append(on_meta(output))

        return hook

    hooks = [layer.register_forward_pre_hook(enter_layer, with_kwargs=True) for layer in layers]
    hooks += [layer.register_forward_hook(leave_layer) for layer in layers]
    hooks += [module.get_submodule(name).register_forward_hook(note(name)) for name in outside]
    try:
        with undisturbed(module):
            seen.output = trace.run(example)
    finally:
        for hook in hooks:
            hook.remove()
    check_order(path, numbers, trace.order)
    seen.after = {name for name, when in called.items() if when == {"after"}}
    with_parameters = {name for name in called if any(True for _ in module.get_submodule(name).parameters())}
    seen.before = {name: seen.before[name] for name in with_parameters if called[name] == {"before"}}
    return seen


def on_meta(tree: Any) -> Any:
    return map_tensors(lambda t: torch.empty_like(t, device="meta"), tree)


def not_one_tensor(part: nn.Module, what: str) -> MeshwrightError:
    return MeshwrightError(
        "MW-OWN-007",
        f"a layer of the pipeline ({type(part).__name__}) {what}",
        why="A pipeline sends one tensor: the output of a layer, or the first of a tuple, is the first argument of the next",
        fix="plan.pp=1, or a layer that takes and returns a tensor",
    )


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
        others = {name: root.get_submodule(name) for name in (*seen.before, *seen.after)}
        absent = [layer for i, layer in enumerate(layers) if i not in own]
        absent += [others[name] for name in seen.before if own[0] > 0]
        absent += [others[name] for name in seen.after if own[-1] < count - 1]
        present = set(modules_but(root, absent))
        for part in absent:
            release(part, present)
        for i, layer in enumerate(layers):
            if i < own[0]:
                layer.forward = self._passer(seen.outputs[i], sends=i == own[0] - 1)
            elif i > own[-1]:
                layer.forward = leaving(layer)
        for name, outputs in seen.before.items() if own[0] > 0 else ():
            others[name].forward = zeros_like_example(outputs)

    def _passer(self, output: Any, sends: bool) -> Callable[..., Any]:
        zeros = zeros_like_example([output])

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not sends:
                return zeros(*args, **kwargs)
            return (self.received, *zeros(*args, **kwargs)[1:]) if isinstance(output, tuple) else self.received

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


def leaving(layer: nn.Module) -> Callable[..., Any]:
    """A forward that leaves the module's `forward` with the argument a layer would have taken."""
    taken = input_of(layer.forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        raise _Leave(taken(args, kwargs)[0])

    return forward


def zeros_like_example(outputs: list[Any]) -> Callable[..., Any]:
    """A forward that returns zeros of the shapes of the example, call by call."""
    calls = [0]

    def forward(*args: Any, **kwargs: Any) -> Any:
        device = next((t.device for t in tensors_in([args, kwargs])), None)
        made = map_tensors(lambda t: torch.zeros_like(t, device=device), outputs[calls[0] % len(outputs)])
        calls[0] += 1
        return made

    return forward


def modules_but(root: nn.Module, absent: list[nn.Module]) -> Iterator[nn.Module]:
    """The modules that are reached without going through an absent one: a module that two layers share may be reached through either."""
    if root not in absent:
        yield root
        for child in root.children():
            yield from modules_but(child, absent)


def release(module: nn.Module, present: set[nn.Module]) -> None:
    """Free the parameters of what this stage does not hold; their names, shapes and dtypes stay readable."""
    for part in (part for part in module.modules() if part not in present):
        for name, parameter in list(part.named_parameters(recurse=False)):
            del part._parameters[name]
            object.__setattr__(part, name, torch.empty_like(parameter, device="meta", requires_grad=False))


def copy_structure(module: nn.Module) -> nn.Module:
    """A copy that shares parameters and buffers with the original."""
    shared = {id(t): t for t in [*module.parameters(), *module.buffers()]}
    return copy.deepcopy(module, shared)
