"""Pipeline stages of a user's module: its layers divided, its own `forward` run on every stage.

A module is a list of layers with something before and after it. Each stage keeps the whole structure and calls the module's own `forward` on the
micro-batch, so that masks, positions and whatever else the layers are given are computed as the author wrote them:

    before the list    modules with parameters run on the first stage; elsewhere stand-ins return what was received of them
    earlier layers     hold nothing; stand-ins return what was received of them
    this stage's       run; what later stages read of their outputs is remembered
    later layers       hold nothing; the first of them leaves `forward`, and the stage sends what it remembers and what it passes on
    after the list     runs on the last stage, then the loss

What each module returns and in which order they run is recorded once, on an example micro-batch (`record`): all micro-batches have its shape.
The same run shows what each stage reads of the others (`dataflow`). A stand-in returns for all else a tensor that raises when it is read.
A parameter that several stages hold (tied embeddings, parameters of the root itself) has a gradient on each of them, and they are summed.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import MeshwrightError
from meshwright.parallel.recompute import RandomState
from meshwright.parallel.user_module.batches import (
    call,
    leaves_in,
    map_tensors,
    tensors_in,
    undisturbed,
    without_zeros,
)
from meshwright.parallel.user_module.dataflow import Routes
from meshwright.parallel.user_module.forward_trace import SHAPE_ONLY, ForwardTrace, Port, check_order, on_meta


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
    """What one micro-batch showed: what every layer returns, what is before and after them, and all operators."""

    path: str
    names: list[str]  # of the layers, in the module
    inputs: Any  # on the meta device
    trace: ForwardTrace
    output: Any = None  # of the module
    random: list[RandomState] = field(default_factory=list)  # before the first layer, and after each layer
    before: set[str] = field(default_factory=set)  # modules with parameters that run before the layers only
    after: set[str] = field(default_factory=set)  # modules that run after the layers only

    def check_inputs(self, inputs: Any) -> None:
        """Raise for a micro-batch of another shape than the example. A mask for all samples that is as long as the batch would be cut with it."""
        if isinstance(inputs, Mapping) and isinstance(self.inputs, Mapping):
            names = [name for name in self.inputs if name in inputs]
            pairs = [(inputs[name], self.inputs[name]) for name in names]
        else:
            pairs = [(inputs, self.inputs)]
        for tensor, like in (both for pair in pairs for both in zip(*map(tensors_in, pair), strict=False)):
            if tensor.shape != like.shape:
                raise MeshwrightError(
                    "MW-OWN-003",
                    f"a micro-batch has an input of {tuple(tensor.shape)}, and the example one of {tuple(like.shape)}",
                    why="Shapes between pipeline stages are fixed by the example. Every tensor as long as the batch is cut into micro-batches",
                    fix="inputs of the shape of the example, padded if need be; a mask with a dimension for the samples",
                )

    def tensor(self, port: Port) -> Tensor:
        """What crosses at a port, on the meta device."""
        return list(tensors_in(self.trace.outputs_of[port.unit][port.call]))[port.leaf]


@torch.no_grad()
def record(module: nn.Module, path: str, layers: list[nn.Module], example: Any) -> Recorded:
    """Run the example once, on the whole module, and write down what the stages must know."""
    children = [name for name, _ in module.get_submodule(path).named_children()]
    names = [f"{path}.{name}".lstrip(".") for name in children]
    outside = modules_outside(module, path)
    trace = ForwardTrace(module, names, outside)
    seen = Recorded(path, names, on_meta(example), trace)
    called: dict[str, set[str]] = {}

    def note_random(*_: Any) -> None:
        seen.random.append(RandomState.of(next(module.parameters()).device))

    def note(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            when = "before" if not trace.order else "after" if len(seen.random) > len(layers) else "inside"
            called.setdefault(name, set()).add(when)

        return hook

    hooks = [layer.register_forward_hook(note_random) for layer in layers]
    hooks += [module.get_submodule(name).register_forward_hook(note(name)) for name in outside]
    try:
        with undisturbed(module), without_zeros(module):
            note_random()
            seen.output = trace.run(example)
    finally:
        for hook in hooks:
            hook.remove()
    check_order(path, children, trace.order)
    with_parameters = {name for name in called if any(True for _ in module.get_submodule(name).parameters())}
    seen.after = {name for name, when in called.items() if when == {"after"}}
    seen.before = {name for name in with_parameters if called[name] == {"before"}}
    return seen


def modules_outside(module: nn.Module, path: str) -> list[str]:
    """The modules next to the way from the root to the list of layers: all that is not in a layer. Of a list, which is never called, its members."""
    out: list[str] = []

    def add(name: str, part: nn.Module) -> None:
        if isinstance(part, nn.ModuleList | nn.ModuleDict):
            for child, inner in part.named_children():
                add(f"{name}.{child}", inner)
        else:
            out.append(name)

    here = ""
    for step in path.split(".") if path else []:
        prefix = f"{here}." if here else ""
        for name, part in module.get_submodule(here).named_children():
            if name != step:
                add(f"{prefix}{name}", part)
        here = f"{prefix}{step}"
    return out


class Unsent(Tensor):
    """A tensor of another stage that the example showed nobody to read: it can be passed on and viewed, and raises when its values are read."""

    value: Tensor
    unit: str
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # operators reach __torch_dispatch__

    @classmethod
    def of(cls, value: Tensor, unit: str) -> Unsent:
        unsent = Tensor._make_subclass(cls, value)
        unsent.value, unsent.unit = value, unit
        return unsent

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first = next(t for t in tensors_in([args, kwargs or {}]) if isinstance(t, cls))
        name, returns = func._schema.name, func._schema.returns
        is_view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        is_copy = is_view or name in ("aten::clone", "aten::_to_copy")
        if not (is_copy or name.endswith(SHAPE_ONLY)):
            raise MeshwrightError(
                "MW-OWN-007",
                f"a tensor that '{first.unit}' returns, on an earlier pipeline stage, is read by {name}, which the example did not show",
                why="Stages send what the example shows later stages to read",
                fix="an example that takes this way through forward, or plan.pp=1",
            )
        plain = map_tensors(lambda t: t.value if isinstance(t, cls) else t, [args, kwargs or {}])
        output = func(*plain[0], **plain[1])
        return map_tensors(lambda t: cls.of(t, first.unit), output) if is_copy else output

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Unsent({self.unit!r})"


class _Leave(BaseException):
    """Leaves the module's `forward` where the layers of the next stage begin."""


class StageModule(nn.Module):
    """One stage: a copy of the module's structure with the parameters of its layers."""

    def __init__(self, root: nn.Module, seen: Recorded, spans: list[range], stage: int, routes: Routes) -> None:
        super().__init__()
        self.root, self.seen, self.changed, self.unread = root, seen, routes.changed, routes.unread
        self.finish: Callable[[Any, Any], Any] = lambda output, targets: output  # of the last stage: the loss
        self.receives = routes.boundaries[stage]
        self.is_last = stage == len(spans) - 1
        self.sends = [] if self.is_last else routes.boundaries[stage + 1]
        self.expected = [seen.tensor(port) for port in self.sends]  # on the meta device
        self.inputs: Any = None
        self.targets: Any = None
        self.tensors: dict[Port, Tensor] = {}  # of this micro-batch: received, and to be sent
        self.calls = Counter[str]()
        own = spans[stage]
        units = {name: root.get_submodule(name) for name in (*seen.names, *seen.before, *seen.after)}
        self.layers = [units[seen.names[i]] for i in own]
        earlier = [*seen.names[: own[0]], *(seen.before if stage else ())]
        later = seen.names[own[-1] + 1 :]
        absent = [units[name] for name in (*earlier, *later, *(() if self.is_last else seen.after))]
        present = set(modules_but(root, absent))
        for part in absent:
            release(part, present)
        for name in earlier:
            units[name].forward = self._stand_in(name)
        for name in later:
            units[name].forward = leave_forward
        for name in {port.unit for port in self.sends} - {*earlier}:
            units[name].register_forward_hook(self._remember(name))

    def _stand_in(self, unit: str) -> Callable[..., Any]:
        """A forward that returns what was received of a unit of another stage; `Unsent` for what this stage does not read, or NaN where code
        between the layers computes something with it that this stage does not need."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            outputs = self.seen.trace.outputs_of[unit]
            number, leaves = self.calls[unit] % len(outputs), count()
            arguments, passed = list(leaves_in([args, kwargs])), self.seen.trace.passed
            self.calls[unit] += 1

            def leaf(like: Tensor) -> Tensor:
                port = Port(unit, number, next(leaves))
                if port in passed:
                    return self._passed(unit, arguments, passed[port])
                if port not in self.tensors:
                    device = next((t.device for t in tensors_in(self.inputs)), None)
                    value = torch.full_like(like, torch.nan if like.is_floating_point() else 0, device=device)
                    return Unsent.of(value, unit) if port in self.unread else value
                received = self.tensors[port]
                return received.clone() if port in self.changed else received

            return map_tensors(leaf, outputs[number])

        return forward

    def _passed(self, unit: str, arguments: list[Any], place: int) -> Tensor:
        """The argument that a unit of another stage returns as it is."""
        argument = arguments[place] if place < len(arguments) else None
        if not isinstance(argument, Tensor):
            raise MeshwrightError(
                "MW-OWN-007",
                f"'{unit}' is called without the tensor that it returned for the example",
                why="Stages send what the example shows later stages to read",
                fix="inputs for which forward calls its layers as for the example, or plan.pp=1",
            )
        return argument

    def _remember(self, unit: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: tuple, output: Any) -> None:
            for leaf, tensor in enumerate(tensors_in(output)):
                port = Port(unit, self.calls[unit], leaf)
                if port in self.sends:
                    self.tensors[port] = tensor.clone() if port in self.changed else tensor
            self.calls[unit] += 1

        return hook

    def forward(self, *received: Tensor) -> Any:
        # The first stage is given the number of a micro-batch
        self.tensors = dict(zip(self.receives, received, strict=False))
        self.calls.clear()
        try:
            return self.finish(call(self.root, self.inputs), self.targets)
        except _Leave:
            return tuple(self._sent(port, like) for port, like in zip(self.sends, self.expected, strict=True))
        finally:
            self.tensors = {}

    def _sent(self, port: Port, like: Tensor) -> Tensor:
        tensor = self.tensors[port]
        if port in self.receives:
            tensor = tensor.view_as(tensor)  # passed on: a stage must not return its own input
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise MeshwrightError(
                "MW-OWN-007",
                f"'{port.unit}' returns {tuple(tensor.shape)} in {tensor.dtype}, and {tuple(like.shape)} in {like.dtype} is expected",
                why="The shapes and dtypes between pipeline stages are fixed in advance, by the example",
                fix="inputs of the shape of the example, padded if need be",
            )
        return tensor.contiguous()


def leave_forward(*args: Any, **kwargs: Any) -> Any:
    raise _Leave


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
