"""Every operator of one forward of a module: the storages that it read and wrote, and where in the module it ran.

Views read and write nothing, and operators that take only the shape of a tensor do not read it. What Python code takes out of a tensor is noted too.
`dataflow` finds in this what a pipeline has to send from stage to stage.
"""

import numbers
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.errors import MeshwrightError
from meshwright.parallel.user_module.batches import call, leaves_in, map_tensors, tensors_in

# Operators that take the shape, dtype and device of a tensor and not its values.
SHAPE_ONLY = ("_like", "new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided")
READ_IN_PYTHON = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "tolist", "numpy")
UNDISPATCHED = {Tensor.tolist: "tolist", Tensor.numpy: "numpy", Tensor.__array__: "numpy"}


@dataclass(frozen=True)
class Where:
    """The module in which an operator ran."""

    module: str  # the innermost module
    unit: str  # the layer, or the module next to the list of layers, that runs; '' between them


@dataclass(frozen=True)
class Operator:
    name: str
    reads: tuple[int, ...]  # storages
    writes: tuple[int, ...]
    where: Where
    random: bool = False


@dataclass(frozen=True)
class Returned:
    """A call of a unit ends; `leaves` are the storages of the tensors it returns, -1 for an argument that it returns as it is."""

    unit: str
    call: int
    leaves: tuple[int, ...]
    number: bool  # it returns a number too, that Python code in it may have read from a tensor


@dataclass(frozen=True)
class Entered:
    """A layer is called."""

    layer: int


@dataclass(frozen=True)
class Port:
    """A tensor that crosses between stages: one that a call of a unit returns."""

    unit: str
    call: int
    leaf: int


class ForwardTrace(TorchDispatchMode):
    """Records the operators of one forward of a module, and what its units return."""

    supports_higher_order_operators = True

    def __init__(self, module: nn.Module, layers: list[str], outside: Iterable[str]) -> None:
        super().__init__()
        self.module, self.layers, self.units = module, layers, {*layers, *outside}
        self.events: list[Operator | Returned | Entered] = []
        self.order: list[int] = []  # layers, as they were called
        self.active: list[str] = []
        self.outputs_of: dict[str, list[Any]] = {}  # by unit, what each call returned, on the meta device
        self.passed: dict[Port, int] = {}  # returned arguments, by their place among the arguments
        self.arguments: list[tuple[Any, int]] = []  # of the unit that runs, with their versions; None keeps its place
        self._storages: dict[Any, int] = {}
        self.state = {self.number(t): n for n, t in module.state_dict(keep_vars=True).items()}
        self.inputs: set[int] = set()
        self.outputs: list[int] = []
        self.written = set(self.state)

    def number(self, tensor: Tensor) -> int:
        """The number of a tensor's storage. A weak reference keeps its address from being used again, without its memory."""
        try:
            key: Any = StorageWeakRef(tensor.untyped_storage())
        except (NotImplementedError, RuntimeError):  # a sparse tensor, say, has no storage of its own
            key = tensor
        return self._storages.setdefault(key, len(self._storages))

    def numbers(self, tree: Any) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.number(t) for t in tensors_in(tree)))

    @property
    def unit(self) -> str:
        return next((name for name in self.active if name in self.units), "")

    @property
    def where(self) -> Where:
        return Where(self.active[-1] if self.active else "", self.unit)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        schema = getattr(func, "_schema", None)
        name = schema.name if schema is not None else str(func)
        reads = self.numbers([args, kwargs])
        aliases = set(reads)
        writes = [n for n in self.numbers(output) if n not in aliases]
        if schema is not None and schema.is_mutable:
            changed = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
            named = {**dict(zip([a.name for a in schema.arguments], args, strict=False)), **kwargs}
            writes += self.numbers([value for key, value in named.items() if key in changed])
        if name.endswith(SHAPE_ONLY):
            reads = ()
        if writes or name in READ_IN_PYTHON:  # views read and write nothing
            self.write(name, reads, tuple(writes), torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()))
        return output

    def write(self, name: str, reads: tuple[int, ...], writes: tuple[int, ...], random: bool = False) -> None:
        self.events.append(Operator(name, reads, writes, self.where, random))
        self.written.update(writes)

    def enter(self, name: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if name in self.units and not self.unit:
                self.arguments = [(a, getattr(a, "_version", 0)) for a in leaves_in([args, kwargs])]
            if name in self.layers and not self.unit:
                self.order.append(self.layers.index(name))
                self.events.append(Entered(self.order[-1]))
            self.active.append(name)

        return hook

    def leave(self, name: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            is_unit = self.unit == name
            unseen = tuple(n for n in self.numbers(output) if n not in self.written)
            if unseen and is_unit:  # made by code that torch does not dispatch
                self.write("forward", self.numbers([args, kwargs]), unseen)
            self.active.pop()
            if is_unit:
                self.returned(name, output)

        return hook

    def returned(self, unit: str, output: Any) -> None:
        calls, leaves = self.outputs_of.setdefault(unit, []), list(tensors_in(output))
        same = [
            next((i for i, (a, version) in enumerate(self.arguments) if a is t and version == t._version), None)
            for t in leaves
        ]
        self.passed |= {Port(unit, len(calls), leaf): i for leaf, i in enumerate(same) if i is not None}
        storages = tuple(-1 if i is not None else self.number(t) for t, i in zip(leaves, same, strict=True))
        in_python = any(
            isinstance(e, Operator) and e.name in READ_IN_PYTHON and e.where.unit == unit for e in self.events
        )
        number = in_python and any(isinstance(leaf, numbers.Number) for leaf in leaves_in(output))
        self.events.append(Returned(unit, len(calls), storages, number))
        calls.append(on_meta(output))
        self.arguments = []

    def run(self, example: Any) -> Any:
        """Run the example, and return the output of the module."""
        self.inputs = set(self.numbers(example))
        self.written |= self.inputs
        hooks: list[Any] = []
        for name, part in self.module.named_modules():
            hooks.append(part.register_forward_pre_hook(self.enter(name), with_kwargs=True))
            hooks.append(part.register_forward_hook(self.leave(name), with_kwargs=True))
        try:
            with self, UndispatchedReads(self):
                output = call(self.module, example)
        finally:
            for hook in hooks:
                hook.remove()
        self.outputs = list(self.numbers(output))
        return output


class UndispatchedReads(TorchFunctionMode):
    """Tells a trace of the values that Python code takes out of a tensor without an operator."""

    def __init__(self, trace: ForwardTrace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in UNDISPATCHED:
            self.trace.write(UNDISPATCHED[func], self.trace.numbers(args), ())
        return func(*args, **(kwargs or {}))


def on_meta(tree: Any) -> Any:
    return map_tensors(lambda t: torch.empty_like(t, device="meta"), tree)


def check_order(path: str, names: list[str], order: list[int]) -> None:
    """Raise unless each layer was called once, in the order of the list."""
    if order == list(range(len(names))):
        return
    twice = next((i for i in order if order.count(i) > 1), None)
    skipped = next((i for i in range(len(names)) if i not in order), None)
    if twice is not None:
        what = f"layer '{names[twice]}' of '{path}' runs {order.count(twice)} times"
    elif skipped is not None:
        what = f"layer '{names[skipped]}' of '{path}' does not run"
    else:
        wrong = next(i for i, layer in enumerate(order) if layer != i)
        what = f"layer '{names[order[wrong]]}' of '{path}' runs as number {wrong + 1}"
    raise MeshwrightError(
        "MW-OWN-002",
        f"{what} in the example",
        why="Each layer of a pipeline runs once, in the order of the list",
        fix='parallelize(…, layers="another list"), or plan.pp=1',
    )
