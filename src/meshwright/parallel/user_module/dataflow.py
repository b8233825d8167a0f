"""Which tensors a pipeline sends from stage to stage: found by tracing an example, and refused where a stage cannot have them.

Each stage runs the module's own `forward` (`stages`), with stand-ins for the layers and modules of other stages. So a tensor that a stage reads
is one of these:

    inputs, buffers, and what is computed from them     each stage computes them (masks, positions)
    what a layer or a module before the list returns    the stage that runs it sends it on, to every later stage that reads it: the output of
                                                        the previous layer, a skip connection, an encoder's memory, a time embedding
    parameters                                          exist where their module is (`entries_of`)
    all else                                            cannot be sent: tensors left in attributes, random numbers drawn between layers that two
                                                        stages need, values that Python code reads

`ForwardTrace` writes down every operator of one forward: the storages it read and wrote, and where in the module it ran. `Reader` then walks the
operators backwards for one stage. What its layers read is needed; if code between layers made it, what that code read is needed instead; if
another stage's layer returned it, it is a `Port`: the place where the stand-in of that layer hands the tensor over. `routes` adds what later
stages need, since a stage sends to the next one only.

Comparing numbers of a staged and a plain forward cannot name the tensor; it runs in addition (`checks`). A stand-in returns a tensor that raises
when it is read (`stages.Unsent`) for what is not sent, so that a read that the example did not show gives no wrong number in silence.
"""

import numbers
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
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
FORWARD = "the module's forward"
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


@dataclass
class Stages:
    """The parts of the plan that the trace reads: the layers of each stage, the modules of the first one, where the state is."""

    spans: list[range]
    layers: list[str]  # names
    before: set[str]  # modules with parameters that run before the layers: on the first stage
    holders: dict[str, tuple[int, ...]]  # parameter → stages

    def of_unit(self, unit: str) -> int | None:
        """The stage that runs a layer or a module before the layers; None for code that every stage runs."""
        if unit in self.layers:
            return next(s for s, span in enumerate(self.spans) if self.layers.index(unit) in span)
        return 0 if unit in self.before else None

    def title(self, stage: int) -> str:
        first, last = (self.layers[self.spans[stage][i]] for i in (0, -1))
        return f"stage {stage} (layers '{first}' to '{last}')"


@dataclass
class Need:
    """Why a stage needs a storage."""

    reader: str
    python: bool = False  # Python code between layers reads its values
    ports: int = 0  # that hand it over
    changed: str = ""  # where it was changed in place, after what the walk has reached


@dataclass
class Reader:
    """Walks a trace backwards to find what one stage reads."""

    trace: ForwardTrace
    stages: Stages
    stage: int
    needs: dict[int, Need] = field(default_factory=dict)
    ports: set[Port] = field(default_factory=set)
    drawn: set[int] = field(default_factory=set)  # events between layers that draw random numbers that the stage needs

    def run(self) -> set[Port]:
        events, last = self.trace.events, self.stage == len(self.stages.spans) - 1
        if last:
            self.needs = {n: Need("the output of the module") for n in self.trace.outputs}
        else:  # a stage leaves where the next one's first layer is called
            events = events[: events.index(Entered(self.stages.spans[self.stage + 1][0]))]
        for i, event in reversed(list(enumerate(events))):
            if isinstance(event, Operator):
                self.operator(i, event)
            elif isinstance(event, Returned) and self.stages.of_unit(event.unit) not in (None, self.stage):
                self.returned(event)
        for n, need in self.needs.items():
            name = self.trace.state.get(n, "")
            holders = self.stages.holders.get(name, (self.stage,))
            if self.stage not in holders:
                where = f"on pipeline stage {' and '.join(map(str, holders))}"
                raise self.refused(
                    f"the parameter '{name}' is {where}", need, "A stage has the parameters of its modules"
                )
        return self.ports

    def operator(self, number: int, event: Operator) -> None:
        home = self.stages.of_unit(event.where.unit)
        if home not in (None, self.stage):
            return self.elsewhere(event)
        wanted = [self.needs[n] for n in event.writes if n in self.needs]
        in_python = home is None and event.name in READ_IN_PYTHON
        keeps_state = any(n in self.trace.state for n in event.writes)
        if not (wanted or in_python or keeps_state or home == self.stage):
            return None
        if event.random and home is None:
            self.drawn.add(number)
        python = in_python or (home is None and any(need.python for need in wanted))
        for n in event.writes:
            if n not in event.reads:
                self.needs.pop(n, None)
            elif n in self.needs:
                self.needs[n].changed = event.where.module or FORWARD
        reader = f"'{event.where.module}'" if event.where.module else FORWARD
        for n in event.reads:
            need = self.needs.setdefault(n, Need(wanted[0].reader if wanted and not event.where.module else reader))
            need.python |= python
        return None

    def elsewhere(self, event: Operator) -> None:
        """An operator of another stage: what it makes must be among what its unit returns."""
        for n in (n for n in event.writes if n in self.needs):
            need, inside = self.needs[n], event.where.module
            if not need.ports:
                what = f"a tensor made in '{inside}' is on pipeline stage {self.stages.of_unit(event.where.unit)}"
                why = "Stages send what a layer or a module before the layers returns, not what it leaves in attributes or changes in place"
                raise self.refused(what, need, why)
            if n in event.reads:
                need.changed = inside
            else:
                del self.needs[n]

    def returned(self, event: Returned) -> None:
        """Hand over what a unit of another stage returns, if it is needed."""
        if event.number:
            raise MeshwrightError(
                "MW-OWN-007",
                f"'{event.unit}' returns a number that it reads from a tensor, on pipeline stage {self.stages.of_unit(event.unit)}",
                why="Stages send tensors: later ones would compute with the number of the example",
                fix="return it as a tensor, or plan.pp=1",
            )
        for leaf, n in enumerate(event.leaves):
            if n not in self.needs:
                continue
            need = self.needs[n]
            what = f"the output of '{event.unit}' is on pipeline stage {self.stages.of_unit(event.unit)}"
            if need.python:
                raise self.refused(
                    what, need, "Python code reads its values: other data may take another way than the example"
                )
            if need.ports and need.changed:
                raise self.refused(
                    f"{what}, is changed in place in '{need.changed}'",
                    need,
                    "Its copies on other stages would not change",
                )
            need.ports += 1
            self.ports.add(Port(event.unit, event.call, leaf))

    def refused(self, what: str, need: Need, why: str) -> MeshwrightError:
        place = self.stages.title(self.stage)
        in_python = "'s Python code" if need.python else ""
        return MeshwrightError(
            "MW-OWN-007",
            f"{what}, and on {place} it is needed by {need.reader}{in_python}",
            why=f"{why}: stages would train another model than one device",
            fix="plan.pp=1 (data, tensor and ZeRO parallelism work on such a module), or return the tensor from the layer",
        )


@dataclass
class Routes:
    """What crosses each boundary: `boundaries[s]` enters stage s. `changed`: ports whose tensor is changed in place later, so that it is copied.
    `unread`: ports that no code between the layers reads."""

    boundaries: list[list[Port]]
    changed: set[Port]
    unread: set[Port]


def routes(trace: ForwardTrace, stages: Stages) -> Routes:
    """What each stage receives: all that it or a later one reads, and that an earlier one made."""
    readers = [Reader(trace, stages, stage) for stage in range(len(stages.spans))]
    needed = [reader.run() for reader in readers]
    for i in sorted({i for reader in readers for i in reader.drawn}):
        drawers = [r.stage for r in readers if i in r.drawn]
        event = trace.events[i]
        if len(drawers) > 1 and isinstance(event, Operator):
            raise MeshwrightError(
                "MW-OWN-007",
                f"a random tensor drawn in {event.where.module or FORWARD} is needed on the pipeline stages {drawers}",
                why="Each rank would draw other numbers",
                fix="draw it in a layer that returns it, or plan.pp=1",
            )
    order = [
        (at, Port(event.unit, event.call, leaf), n)
        for at, event in enumerate(trace.events)
        if isinstance(event, Returned)
        for leaf, n in enumerate(event.leaves)
    ]
    last_write = {n: at for at, event in enumerate(trace.events) if isinstance(event, Operator) for n in event.writes}
    boundaries: list[list[Port]] = [[]]
    for stage in range(1, len(stages.spans)):
        later = set[Port]().union(*needed[stage:])
        boundaries.append([p for _, p, _ in order if p in later and (stages.of_unit(p.unit) or 0) < stage])
        if not boundaries[-1]:
            raise MeshwrightError(
                "MW-OWN-007",
                f"{stages.title(stage)} and what follows read nothing of the stages before",
                why="A pipeline sends what layers return to later layers",
                fix="plan.pp=1",
            )
    between = [e for e in trace.events if isinstance(e, Operator) and stages.of_unit(e.where.unit) is None]
    read = {n for event in between for n in event.reads}
    changed = {p for at, p, n in order if last_write.get(n, -1) > at}
    return Routes(boundaries, changed, {p for _, p, n in order if n not in read})


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
