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

from dataclasses import dataclass, field

from meshwright.errors import MeshwrightError
from meshwright.parallel.user_module.forward_trace import (
    READ_IN_PYTHON,
    Entered,
    ForwardTrace,
    Operator,
    Port,
    Returned,
)

FORWARD = "the module's forward"


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
