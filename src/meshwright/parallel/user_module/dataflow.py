"""Which tensors cross from one pipeline stage to another: traced on an example, and refused where a stage would not have them.

A pipeline sends one tensor from stage to stage: the output of the last layer of a stage, which is the input of the next layer. Every other
tensor that a stage reads must exist there. Each stage runs the module's own `forward` (`stages`), so that

    inputs, buffers, and what is computed from them     exist on every stage: each computes them (masks, positions)
    outputs of modules before the list                  exist on the first stage only
    what a layer computes                               exists on the stage of the layer only, but for the one tensor that is sent
    parameters                                          exist where their module is (`entries_of`)
    random numbers drawn between layers                 exist on the first stage that draws them: ranks draw different ones

`Trace` writes down every operator of one forward: the storages it read and wrote, and where in the module it ran. `check_dataflow` then walks
the operators in order with one rule: the result exists on the stages that run the operator **and** have all that it read. An operator whose
result exists on no stage, or an output of the module that does not exist on the last stage, means another model than on one device: a time
embedding that every layer reads, an encoder's memory, a skip connection, a loss of intermediate outputs, code between two stages.

The alternative, comparing numbers of a staged and a plain forward, misses what starts at zero (a modulation with zero weights still has a
gradient) and cannot name the tensor; it runs in addition (`checks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.errors import MeshwrightError
from meshwright.parallel.tensor.styles import input_of
from meshwright.parallel.user_module.batches import call, tensors_in

# Operators that take the shape, dtype and device of a tensor and not its values.
SHAPE_ONLY = ("_like", "new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided")
FORWARD = "the module's forward"
SHOWN = 6  # readers of a tensor in a message
READ_IN_PYTHON = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal")


@dataclass(frozen=True)
class Where:
    """The module in which an operator ran."""

    module: str  # the innermost module
    outside: str  # of the modules before and after the list of layers, the one that runs; '' in none
    layer: int | None  # the layer that runs
    finished: int  # layers that have run


@dataclass(frozen=True)
class Operator:
    name: str
    reads: tuple[int, ...]  # storages
    writes: tuple[int, ...]
    where: Where
    random: bool = False


@dataclass(frozen=True)
class Handover:
    """A layer takes the output of the layer before it; `changed`: it takes something else."""

    layer: int
    storage: int
    changed: bool


class Trace(TorchDispatchMode):
    """Records the operators of one forward of a module, and what its layers pass to each other."""

    supports_higher_order_operators = True

    def __init__(self, module: nn.Module, layers: list[nn.Module], outside: Iterable[str]) -> None:
        super().__init__()
        self.module, self.layers, self.outside = module, layers, set(outside)
        self.events: list[Operator | Handover] = []
        self.order: list[int] = []  # layers, as they were called
        self.active: list[tuple[str, int | None]] = []
        self.finished = 0
        self.last: Identity | None = None  # the output of the layer that ran last
        self._storages: dict[Any, int] = {}
        self.state = {self.number(t): n for n, t in module.state_dict(keep_vars=True).items()}
        self.inputs: set[int] = set()
        self.outputs: list[int] = []
        self.written = set(self.state)

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage. A weak reference keeps its address from being used again, without its memory."""
        try:
            key: Any = StorageWeakRef(tensor.untyped_storage())
        except (NotImplementedError, RuntimeError):  # a sparse tensor, say, has no storage of its own
            key = tensor
        return self._storages.setdefault(key, len(self._storages))

    def numbers(self, tree: Any) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.number(t) for t in tensors_in(tree)))

    @property
    def where(self) -> Where:
        names = [name for name, _ in self.active]
        outside = next((name for name in names if name in self.outside), "")
        layer = next((index for _, index in self.active if index is not None), None)
        return Where(names[-1] if names else "", outside, layer, self.finished)

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

    # Hooks on modules

    def enter(self, name: str, index: int | None) -> Callable[..., None]:
        def hook(part: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if index is not None:
                self.order.append(index)
                if self.last is not None:
                    hidden = hidden_of(part, args, kwargs)
                    same = hidden is not None and self.last == Identity.of(hidden, self)
                    self.events.append(Handover(index, self.last.storage, not same))
            self.active.append((name, index))

        return hook

    def leave(self, name: str, index: int | None) -> Callable[..., None]:
        def hook(part: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            unseen = tuple(n for n in self.numbers(output) if n not in self.written)
            if unseen and (index is not None or name in self.outside):  # made by code that torch does not dispatch
                self.write("forward", self.numbers([args, kwargs]), unseen)
            self.active.pop()
            if index is not None:
                self.finished += 1
                hidden = output[0] if isinstance(output, tuple) and output else output
                self.last = Identity.of(hidden, self) if isinstance(hidden, torch.Tensor) else None

        return hook

    def run(self, example: Any) -> Any:
        """Run the example, and return the output of the module."""
        self.inputs = set(self.numbers(example))
        self.written |= self.inputs
        numbers = {layer: i for i, layer in enumerate(self.layers)}
        hooks: list[Any] = []
        for name, part in self.module.named_modules():
            index = numbers.get(part)
            hooks.append(part.register_forward_pre_hook(self.enter(name, index), with_kwargs=True))
            hooks.append(part.register_forward_hook(self.leave(name, index), with_kwargs=True))
        try:
            with self:
                output = call(self.module, example)
        finally:
            for hook in hooks:
                hook.remove()
        self.outputs = list(self.numbers(output))
        return output


def hidden_of(part: nn.Module, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The first argument of a layer, if it is a tensor: a pipeline sends it."""
    try:
        value, _ = input_of(part.forward)(args, kwargs)
    except (KeyError, StopIteration):
        return None
    return value if isinstance(value, torch.Tensor) else None


@dataclass(frozen=True)
class Identity:
    """What makes two tensors the same memory with the same values."""

    storage: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor, trace: Trace) -> Identity:
        offset = int(tensor.storage_offset())
        return cls(trace.number(tensor), tensor.shape, tensor.stride(), offset, tensor._version)


@dataclass
class Presence:
    """The stages on which a storage has the values that one device would have, and the module that made it."""

    stages: frozenset[int]
    origin: str
    home: frozenset[int]  # the stages of the module that made it, before other tensors were mixed in
    random: bool = False


@dataclass
class Stages:
    """The parts of the plan that the trace reads: the layers of each stage, the modules of the first one, where the state is."""

    spans: list[range]
    path: str
    names: list[str]  # of the layers
    before: set[str]
    holders: dict[str, tuple[int, ...]]  # parameter → stages

    def of_layer(self, layer: int) -> int:
        return next(s for s, span in enumerate(self.spans) if layer in span)

    def layer_name(self, layer: int) -> str:
        return f"{self.path}.{self.names[layer]}".lstrip(".")

    def running(self, where: Where) -> frozenset[int]:
        """The stages that run this part of `forward`."""
        if where.layer is not None:
            return frozenset([self.of_layer(where.layer)])
        if where.outside in self.before:
            return frozenset([0])
        first = self.of_layer(where.finished - 1) if where.finished else 0
        return frozenset(range(first, len(self.spans)))


def check_dataflow(trace: Trace, stages: Stages) -> None:
    """Raise for the first tensor that a stage reads and does not have."""
    every = frozenset(range(len(stages.spans)))
    default = Presence(every, "", every)
    presences = dict.fromkeys(trace.inputs, default)
    for n, name in trace.state.items():
        holders = frozenset(stages.holders.get(name, every))
        presences[n] = Presence(holders, name, holders)
    crossings: list[tuple[Presence, str, int]] = []  # a tensor, its reader, and the stage of the reader
    for event in trace.events:
        if isinstance(event, Handover):
            stage = stages.of_layer(event.layer)
            if event.layer != stages.spans[stage][0]:
                continue
            if event.changed:
                raise crossing(stages, crossings) if crossings else changed_between(stages, event.layer)
            sent = presences.get(event.storage, default)
            presences[event.storage] = replace(sent, stages=sent.stages | {stage})
            continue
        running, where = stages.running(event.where), event.where
        read = [presences.get(n, default) for n in event.reads]
        present = running.intersection(*(p.stages for p in read))
        missing = next((p for p in read if not running <= p.stages), None)
        inside = where.layer is not None or where.outside
        in_python = event.name in READ_IN_PYTHON and missing is not None and not missing.random
        if missing is not None and (in_python or (inside and not present)):
            how = "'s Python code" if in_python else ""
            crossings.append(
                (missing, f"'{where.module}'{how}" if where.module else FORWARD, min(running - missing.stages))
            )
            present = running
        if event.random and len(running) > 1:  # each rank draws other numbers
            present = frozenset(sorted(present)[:1])
        made = Presence(present, where.module, present, event.random and not inside)
        if missing is not None and not inside:
            made = replace(missing, stages=present)
        presences |= dict.fromkeys(event.writes, made)
    last = len(stages.spans) - 1
    absent = [p for n in trace.outputs if last not in (p := presences.get(n, default)).stages]
    crossings += [(p, "the output of the module", last) for p in absent]
    if crossings:
        raise crossing(stages, crossings)


def crossing(stages: Stages, crossings: list[tuple[Presence, str, int]]) -> MeshwrightError:
    """The error that names the first tensor, all that read it, and their stages."""
    tensor, _, stage = crossings[0]
    readers = list(dict.fromkeys(reader for other, reader, _ in crossings if other.origin == tensor.origin))
    others = [f"'{origin}'" for other, *_ in crossings if (origin := other.origin) != tensor.origin]
    more = f" and {len(readers) - SHOWN} more" if len(readers) > SHOWN else ""
    more += f" (so are tensors of {', '.join(list(dict.fromkeys(others))[:SHOWN])})" if others else ""
    name = f"'{tensor.origin}'" if tensor.origin else FORWARD
    made = f"the parameter {name}" if tensor.origin in stages.holders else f"the output of {name}"
    if tensor.random:
        made = f"a random tensor drawn in {name}"
    first, final = (stages.layer_name(stages.spans[stage][i]) for i in (0, -1))
    return MeshwrightError(
        "MW-OWN-007",
        f"{made} is on pipeline stage {' and '.join(map(str, sorted(tensor.home)))}, and on stage {stage} (layers '{first}' to "
        f"'{final}') it is needed by {', '.join(readers[:SHOWN])}{more}",
        why="A pipeline sends the output of a layer to the next layer and nothing else: stages would train another model than one device",
        fix="plan.pp=1 (data, tensor and ZeRO parallelism work on such a module)",
    )


def changed_between(stages: Stages, layer: int) -> MeshwrightError:
    return MeshwrightError(
        "MW-OWN-007",
        f"'{stages.layer_name(layer)}', the first layer of stage {stages.of_layer(layer)}, does not take the output of "
        f"'{stages.layer_name(layer - 1)}' as its first tensor",
        why="A pipeline sends the output of a layer to the next layer: code between the two would run on both stages or on neither",
        fix="put this code into one of the two layers, or plan.pp=1",
    )


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
