"""Watch a training while it runs: every few steps each rank notes what it holds and reads, and rank 0 compares the notes (`invariants`).

    meshwright check watch -- torchrun --nproc-per-node 4 train.py
    mw.check.watch(model, optimizer, every=50)

Notes travel through the key-value store that `init_process_group` made: a rank sets its note and goes on, and rank 0 looks in later steps
whether all are there. So there is no collective and no group, no rank waits for another one, and ranks that take different numbers of steps are
noticed, not waited for. Random states are read and never written. Whatever fails in here ends the watch, not the training.

A checked step begins with the first call of the model after an update: parameters are hashed, inputs and random states noted. During it,
hooks see whether gradients are zero, and which norm clipping returned. It ends with the next step's first call, where the note is sent.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshwright.check.exchange import NoteExchange
from meshwright.check.fingerprint import bits_hash, random_states, tensors_hash
from meshwright.check.frameworks.plain import FrameworkAdapter
from meshwright.check.holdings import local_part
from meshwright.check.invariants import TENSOR, Judge, RankNote
from meshwright.check.modules import topmost
from meshwright.check.names import read_table
from meshwright.check.process_hooks import ProcessHooks, rank, tensors_in, world, wrap_clipping
from meshwright.check.writer import write_json

CUT = (*TENSOR, "cp", "context", "pp")  # axes that cut the model, or the sequence
PATIENCE = 3  # checks in which a parameter or its gradient showed nothing
MOST_STATES = 64  # of an optimizer, that are asked for their count of steps
CLOSE_S = 2.0  # that rank 0 waits for the last notes


class LiveWatch(ProcessHooks):
    """Notes the checked steps of one rank; on rank 0, judges those of all."""

    def __init__(
        self, out: str, every: int = 50, stop: bool = False, without: tuple[str, ...] = (), table: str = ""
    ) -> None:
        self.table = read_table(Path(table) if table else None)
        self.out, self.every, self.stop = Path(out), every, stop
        super().__init__()
        self.judge = Judge(without)
        self.step = self.calls = 0
        self.spent, self.began = 0.0, time.perf_counter()
        self.updated = False
        self.place: dict[str, int] = {}
        self.stages: dict[str, int] = {}  # by parameter: the stage of its model in a pipeline
        self.note: RankNote | None = None  # of the step that is being checked
        self.norm: Any = None
        self.hashes: list[torch.Tensor] = []
        self.gradients: dict[str, torch.Tensor] = {}  # number of elements that are not zero
        self.optimizers: list[torch.optim.Optimizer] = []
        self.first: dict[str, int] = {}  # the hash of each part at the first check
        self.changed: set[str] = set()  # parameters with another hash since
        self.checks = 0  # with a learning rate
        self.silent: Counter[str] = Counter()  # checks in a row without a gradient
        self.exchange: NoteExchange | None = None
        self.during: list[Any] = []  # handles of hooks of the checked step
        self.entry: Any = None

    def attach(self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Watch a model, or the first that is called in training; the steps of an optimizer, or of all."""
        if model is not None:
            self.enter(model)
        else:
            self.entry = register_module_forward_pre_hook(self.before_unknown)
            self.undo.append(self.entry.remove)
        before, after = (
            (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
            if optimizer is None
            else (optimizer.register_step_pre_hook, optimizer.register_step_post_hook)
        )
        self.undo += [before(self.before_update).remove, after(self.after_update).remove]
        self.undo += wrap_clipping(self)

    @property
    def active(self) -> bool:
        return bool(self.undo) and self.in_training_process

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Whatever goes wrong in the watch ends the watch. What it takes is counted."""
        began = time.perf_counter()
        try:
            with torch.no_grad():
                yield
        except Exception as error:
            self.detach()
            text = f"meshwright check watch: rank {rank()}: the watch ends, the training goes on: {type(error).__name__}: {error}"
            print(text, file=sys.stderr, flush=True)
        self.spent += time.perf_counter() - began

    # Hooks

    def before_unknown(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """In the first step: models are found where they are called from outside."""
        if self.active and id(module) not in self.names.modules and trains(module):
            self.enter(module)
            self.before_call(module, inputs, {})

    def enter(self, model: nn.Module) -> None:
        self.undo += [
            model.register_forward_pre_hook(self.before_call, with_kwargs=True).remove,
            model.register_forward_hook(self.after_call).remove,
        ]

    def before_call(self, model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not self.active or not trains(model):
            return
        with self.guarded():
            self.names_of(model)
            if self.updated:
                self.end_step()
            self.calls += 1
            if self.calls == 1 and self.step % self.every == 1 % self.every and self.step:
                self.begin_check(inputs, named)

    def after_call(self, model: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Forward drew random numbers if their state changed in it."""
        if self.active and self.note is not None and self.calls == 1:
            with self.guarded():
                self.note["random"] = self.note["state"] if str(random_states()) != self.note["state"] else None

    def before_update(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        if not self.active or self.note is None or self.framework is None:
            return
        with self.guarded():
            self.optimizers.append(optimizer)
            if not self.framework.hooks_gradients:
                for name, parameter in self.trained():
                    if parameter.grad is not None:
                        self.add_local(name, parameter.grad)

    def after_update(self, *arguments: Any) -> None:
        self.updated = True

    # What adapters and clipping tell

    def add_local(self, name: str, gradient: torch.Tensor) -> None:
        if self.active and self.note is not None:
            with self.guarded():
                seen, count = self.gradients.get(name), torch.count_nonzero(local_part(gradient)[0])
                self.gradients[name] = count if seen is None else seen + count

    def begin_clipping(self) -> None: ...

    def end_clipping(self, norm: Any) -> None:
        if self.note is not None and self.norm is None and not hasattr(norm, "placements"):
            self.norm = norm

    # Steps

    def names_of(self, model: nn.Module) -> None:
        """Learn the parameters of a model at its first call, when it has its wrappers."""
        if not (new := self.learn(model, self)):
            return
        stages = {id(stage.submod): stage.stage_index for stage in self.adapter.stages()}
        self.place = place_of(self.adapter)
        if self.table.axes:
            self.table.check(world(), self.adapter.parameters, self.out)
            self.place = self.table.coordinates(rank())
        self.stages |= dict.fromkeys(new, stages.get(id(topmost(model)), 0))
        if self.exchange is None:
            self.exchange = NoteExchange(str(self.out))

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.adapter.parameters.items() if p.requires_grad]

    def begin_check(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        assert self.exchange is not None
        if self.exchange.stopped():
            raise SystemExit(1)
        tensors = tensors_in((inputs, named))
        tokens = [t for t in tensors if not t.is_floating_point()]
        parts = []
        self.hashes, self.gradients, self.norm, self.optimizers = [], {}, None, []
        for name, parameter in self.adapter.parameters.items():
            for local, key in self.parts_of(name, parameter):
                parts.append(f"{name} at {key}")
                self.hashes.append(bits_hash(local))
        self.note = {
            "rank": rank(), "step": self.step, "framework": self.adapter.name,
            "place": {axis: at for axis, at in self.place.items() if axis in CUT}, "parts": parts, "state": str(random_states()),
            "samples": tensors_hash(tensors), "tokens": tensors_hash(tokens),
        }  # fmt: skip
        if self.adapter.hooks_gradients:
            for name, parameter in self.trained():
                self.during.append(parameter.register_hook(lambda gradient, name=name: self.add_local(name, gradient)))

    def parts_of(self, name: str, parameter: nn.Parameter) -> list[tuple[torch.Tensor, str]]:
        """What this rank holds of a parameter, and a name for that part which no other part has."""
        expert = not getattr(parameter, "allreduce", True)
        if hasattr(parameter, "ds_tensor"):  # ZeRO-3: the rank's share; the whole would have to be gathered
            return [(parameter.ds_tensor, f"share of rank {rank()}")]
        if hasattr(parameter, "_sharded_size") or (expert and "ep" not in self.place):
            return [(parameter, f"share of rank {rank()}")]
        where = f" stage {self.stages[name]}" if self.stages.get(name) else ""
        where += f" ep {self.place['ep']}" if expert else ""
        if self.table.axes:  # by hand: plain tensors, of which the table says which are parts
            cut = self.table.cut_of(name)
            where += "".join(
                f" {axis} {self.place[axis]}" for axis in self.place if axis == "pp" or (cut and axis == cut.axis)
            )
        return [
            (part.value, f"{part.holding.start} {part.holding.size} {part.holding.flat or ''}{where}")
            for part in self.adapter.value(name, parameter)
        ]

    def end_step(self) -> None:
        """Send the note of a checked step, and look for those of other ranks."""
        assert self.exchange is not None
        if self.step == 0:
            self.spent, self.began = 0.0, time.perf_counter()  # from here on: the model is known
            if self.entry is not None:
                self.entry.remove()
        if self.note is not None:
            self.exchange.send(self.finished_note())
        self.exchange.look(self.report)
        self.step, self.calls, self.updated = self.step + 1, 0, False

    def finished_note(self) -> RankNote:
        """The note with what the step showed. Here the host waits for the device."""
        assert self.note is not None
        note, self.note = self.note, None
        while self.during:
            self.during.pop().remove()
        hashes = torch.stack([value.cpu() for value in self.hashes]).tolist() if self.hashes else []
        for part, value in zip(note["parts"], hashes, strict=True):
            if self.first.setdefault(part, value) != value:
                self.changed.add(part.rpartition(" at ")[0])
        self.checks += any(
            float(group.get("lr", 1.0)) for optimizer in self.optimizers for group in optimizer.param_groups
        )
        live = {name for name, count in self.gradients.items() if int(count)}
        names = [name for name, _ in self.trained()] if live else []
        self.silent.update(names)
        for name in live:
            self.silent[name] = 0
        idle = self.changed and self.checks >= PATIENCE
        return note | {
            "hashes": hashes, "norm": number(self.norm), "calls": self.calls, "counts": [steps_of(o) for o in self.optimizers] or None,
            "unchanged": [name for name in names if name not in self.changed] if idle else [],
            "without_gradient": [name for name in names if self.silent[name] >= PATIENCE],
        }  # fmt: skip

    def report(self, notes: list[RankNote], late: list[int]) -> None:
        """On rank 0: what is wrong, once each, to stderr and to the file."""
        assert self.exchange is not None
        violations = self.judge.judge(notes, late)
        for violation in violations:
            print(f"meshwright check watch: {violation.error()}", file=sys.stderr, flush=True)
        self.out.mkdir(parents=True, exist_ok=True)
        share = self.spent / (time.perf_counter() - self.began)
        write_json(self.out / "watch.json", {"every": self.every, "share_of_time": share, **self.judge.as_dict()})
        if violations and self.stop:
            self.exchange.stop()

    def close(self) -> None:
        """At the end of the process: the last check, if its step is complete."""
        if self.active:
            with self.guarded():
                if self.exchange is not None:
                    if self.updated and self.note is not None:
                        self.exchange.send(self.finished_note())
                    self.exchange.look(self.report, CLOSE_S)
        self.detach()

    def detach(self) -> None:
        super().detach()
        while self.during:
            self.during.pop().remove()
        self.note = None


def trains(module: nn.Module) -> bool:
    return torch.is_grad_enabled() and module.training and any(p.requires_grad for p in module.parameters())


def place_of(framework: FrameworkAdapter) -> dict[str, int]:
    """This rank's place. A mesh without names that is not FSDP's cuts the model."""
    place = framework.coordinates()
    nameless = set(place) == {"dp"} and framework.name == "torch"
    if nameless and any(hasattr(p, "device_mesh") for p in framework.parameters.values()):
        place = {"tp": place["dp"]}
    return place


def steps_of(optimizer: torch.optim.Optimizer) -> int:
    """The steps that an optimizer counts itself; 0 if it counts none."""
    return max(
        (int(state["step"]) for state in list(optimizer.state.values())[:MOST_STATES] if "step" in state), default=0
    )


def number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return value if isinstance(value, float) else None
