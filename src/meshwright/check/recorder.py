"""Record what a training computes in its first steps, without a change of its code.

PyTorch offers global hooks: before and after every module's forward, before and after every optimizer's step. A dispatch mode sees every
collective, those of DDP's C++ reducer too. From these the recorder writes, for each step: the inputs, the output of every module and the
gradient of the loss in it, the gradient of every parameter before and after the reduction and after clipping, the parameters and the
optimizer's states after the update, losses, norms, learning rates and collectives.

    forward            backward                     reduction     clipping     update
    inputs, outputs    gradients of outputs,        gradients     gradients    parameters, states
                       gradients of this rank

A step begins with the first call of a module after an update. Modules that are computed once more in backward (recompute) are left out.
`writer` stores it all.
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
from safetensors import SafetensorError
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshwright.check.collectives import CollectiveLog
from meshwright.check.fingerprint import random_states
from meshwright.check.folder import LIMIT
from meshwright.check.frameworks.plain import HeldPart
from meshwright.check.holdings import local_part
from meshwright.check.modules import model_settings
from meshwright.check.process_hooks import (
    ProcessHooks,
    in_backward,
    infers_shapes,
    rank,
    tensors_in,
    world,
    wrap_backward,
    wrap_clipping,
    wrap_end_of_groups,
)
from meshwright.check.writer import RecordingWriter


class StepRecorder(ProcessHooks):
    """Records the steps of one rank into a folder."""

    def __init__(self, out: str, steps: int = 2, limit: float = LIMIT, perturb: int = 0, unit: float = 0.0) -> None:
        super().__init__()
        self.steps, self.perturb, self.unit = steps, perturb, unit
        self.step = self.depth = 0
        self.skips = False
        self.writer = RecordingWriter(Path(out), limit)
        self.collectives = CollectiveLog()
        self.known: dict[str, Any] = {}
        self.place = 0, 1
        self.random: dict[str, str] = {}
        self.reset()

    def reset(self) -> None:
        """Be ready for the next step."""
        self.calls: Counter[Any] = Counter()  # by module, and of inputs
        self.local: dict[str, torch.Tensor] = {}  # gradients of this rank, summed over micro-batches
        self.collectives.seen = []
        self.updated = self.collected = self.norm_noted = False
        self.clipping = 0  # functions that clip, one inside of the other
        self.began = self.spent = 0.0

    # Attaching

    def attach(self) -> None:
        handles = [
            register_module_forward_pre_hook(self.before_module),
            register_module_forward_hook(self.after_module, with_kwargs=True),
            register_optimizer_step_pre_hook(self.before_update),
            register_optimizer_step_post_hook(self.after_update),
        ]
        self.undo += [handle.remove for handle in handles]
        self.undo += [*wrap_clipping(self), wrap_backward(self.note_loss), *wrap_end_of_groups(self.finish_last)]

    @property
    def active(self) -> bool:
        """In the first steps."""
        return self.step < self.steps and self.in_training_process

    # Forward

    def before_module(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not self.active or in_backward():
            return
        if self.depth == 0:
            self.skips = not torch.is_grad_enabled() or infers_shapes()  # an evaluation, or values that nobody has set
            if not self.skips:
                if self.updated:
                    self.finish_step()
                with self.timed():
                    self.begin_call(module)
        self.depth += 1

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count what recording takes; the collectives of its own are not the training's."""
        started, self.collectives.quiet = time.perf_counter(), True
        try:
            yield
        finally:
            self.collectives.quiet = False
            self.spent += time.perf_counter() - started

    def begin_call(self, module: nn.Module) -> None:
        """A call from outside of all modules: of the model, of a stage, or of a loss function."""
        if not self.active:
            return
        if self.collected:
            self.reset_gradients()
        if not self.began:
            self.began, self.random = time.perf_counter(), random_states()
            self.collectives.start()
        if (new := self.learn(module, self)) and self.framework is not None:
            self.place = rank(), world()
            self.known = {  # now: at the end of a script its groups may be gone
                "framework": self.framework.name, "layout": self.framework.layout(),
                "coordinates": self.framework.coordinates(), "batch_dim": self.framework.batch_dim, **model_settings(module),
            }  # fmt: skip
            self.writer.batch_dim = self.framework.batch_dim
            for name, parameter in new.items():
                self.follow(name, parameter)

    def follow(self, name: str, parameter: nn.Parameter) -> None:
        """Record a parameter's first value, and collect its gradients of this rank."""
        if self.perturb:
            move_by_last_place(parameter, self.perturb, self.unit)
        self.note_value("initial parameter", name, parameter)
        if parameter.requires_grad and self.framework is not None and self.framework.hooks_gradients:
            parameter.register_hook(lambda gradient: self.add_local(name, gradient))

    def add_local(self, name: str, gradient: torch.Tensor) -> None:
        if self.active:
            local, _ = local_part(gradient.detach())
            known = self.local.get(name)
            self.local[name] = local.clone() if known is None else known + local

    def after_module(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        if not self.active or in_backward() or self.depth == 0:
            return
        self.depth -= 1
        if self.skips or (name := self.names.of(module)) is None:
            return
        with self.timed():
            self.calls[name] += 1
            if self.depth == 0 and any(True for _ in module.parameters()):
                for i, tensor in enumerate(tensors_in((inputs, named))):
                    self.note("input", name, tensor, call=self.calls["input", id(module)], index=i)
                self.calls["input", id(module)] += 1
            for i, tensor in enumerate(tensors_in(output)):
                place = {"call": self.calls[name] - 1, "index": i}
                self.note("output", name, tensor, **place)
                if tensor.requires_grad and not isinstance(tensor, nn.Parameter):  # a bias that is added later
                    tensor.register_hook(
                        lambda g, name=name, place=place: self.note("output gradient", name, g, **place)
                    )

    # Backward, clipping, update

    def note_loss(self, value: torch.Tensor) -> None:
        if self.active and value.numel() == 1:
            number, _ = local_part(value.detach())
            self.writer.number("loss", float(number))

    def note_gradients(self, kind: str) -> None:
        for name, parameter in self.adapter.parameters.items():
            for part in self.adapter.gradient(name, parameter):
                self.note_part(kind, name, part)

    def before_clipping(self) -> None:
        """Gradients are complete: what this rank had before the reduction, and after it."""
        if not self.active or self.collected or self.framework is None:
            return
        self.collected = True
        with self.timed():
            for name, gradient in self.local.items():
                for part in self.framework.local_gradient(name, gradient):
                    self.note_part("local gradient", name, part)
            self.note_gradients("gradient")

    def reset_gradients(self) -> None:
        """After clipping comes another micro-batch: what was noted was not the gradient of the step."""
        self.writer.drop(("local gradient", "gradient", "norm"))
        if self.norm_noted:
            self.writer.number("early clipping", 1.0)
        self.collected = self.norm_noted = False

    def begin_clipping(self) -> None:
        """A function that clips, or measures the norm, is called; such functions call each other."""
        self.clipping += 1
        self.before_clipping()

    def end_clipping(self, norm: Any) -> None:
        """Note the norm that the outermost of these functions returned, of the first in a step."""
        self.clipping -= 1
        single = isinstance(norm, float) or (isinstance(norm, torch.Tensor) and norm.numel() == 1)
        if self.active and single and not self.norm_noted and self.clipping == 0:
            self.norm_noted = True
            self.writer.number("norm", float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))

    def before_update(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gradients are clipped. A step that is given a closure computes them first, in it."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self.note_before_update(optimizer)
            return None

        def noted(*inputs: Any) -> Any:
            loss = closure(*inputs)
            self.note_before_update(optimizer)
            return loss

        return (args[0], noted), {k: v for k, v in kwargs.items() if k != "closure"}

    def note_before_update(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.active or self.framework is None:
            return
        clipped = self.collected
        self.before_clipping()
        if clipped and not self.updated and self.framework.shows_clipped:
            with self.timed():
                self.note_gradients("clipped gradient")
        for group in optimizer.param_groups:
            self.writer.number("learning rate", float(group.get("lr", 0.0)))

    def after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.active or self.framework is None:
            return
        self.updated = True
        owned = {id(p): name for name, p in self.framework.parameters.items()} | self.framework.optimised()
        with self.timed():
            for parameter, states in optimizer.state.items():
                name = owned.get(id(parameter))
                for key, value in states.items():
                    if name is not None and isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                        self.note_value(f"state {key}", name, value)

    def note_value(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        """Note a parameter, or its optimizer's state of the same shape."""
        for part in self.adapter.value(name, tensor):
            self.note_part(kind, name, part)

    def note_part(self, kind: str, name: str, part: HeldPart) -> None:
        self.writer.tensor(kind, part.name or name, part.value, part.holding)

    # Entries and files

    def note(self, kind: str, name: str | None, tensor: torch.Tensor | None, **more: Any) -> None:
        """Note an activation: only a DTensor says which part of the whole it is. A gradient may be None, of zeros that autograd did not make."""
        if self.active and tensor is not None:
            local, holding = local_part(tensor.detach())
            told = holding.shape != tuple(local.shape) or holding.partial
            self.writer.tensor(kind, name or "", local, holding if told else None, **more)

    def finish_step(self, ended: str = "") -> None:
        """Write the step; `ended` says how a script ended in the middle of it."""
        done = self.step
        try:
            with self.timed():
                if self.framework is not None and not ended:
                    for name, parameter in self.framework.parameters.items():
                        self.note_value("parameter", name, parameter)
                self.collectives.stop()
                self.writer.save(self.place[0], done)
            self.step += not ended
            self.writer.describe(
                self.place[0], done, self.about(ended), ended=ended, collectives=self.collectives.seen, random=self.random,
                seconds=time.perf_counter() - self.began, recording_seconds=self.spent,
            )  # fmt: skip
        except (OSError, SafetensorError) as error:
            self.steps = self.step = done  # the training goes on
            print(f"meshwright check: step {done} could not be written, recording ends: {error}", file=sys.stderr)
        self.reset()
        if self.step >= self.steps:
            self.detach()

    def about(self, ended: str) -> dict[str, Any]:
        return {
            "world": self.place[1], "steps": self.step, "torch": torch.__version__, **self.known, "groups": self.collectives.groups,
            "parameters": list(self.adapter.parameters), "modules": sorted(set(self.names.modules.values())),
            "perturbed": self.perturb, "ended": ended,
        }  # fmt: skip

    def finish_last(self) -> None:
        """Finish a step that is complete."""
        if self.active and self.updated:
            self.finish_step()

    def close(self) -> None:
        """At the end of the process: the step that is complete, or what there is of one that is not."""
        if self.active and self.framework is not None and self.writer.entries:
            last = next((e["name"] for e in reversed(self.writer.entries) if e["kind"].startswith("output")), "")
            self.finish_step("" if self.updated else f"the script ended in this step, after {last or 'the model'}")
        self.detach()


@torch.no_grad()
def move_by_last_place(parameter: torch.Tensor, seed: int, unit: float = 0.0) -> None:
    """Move every element up or down by one unit in its last place, or by `unit` of it: how far that spreads is how far rounding may."""
    local, _ = local_part(parameter)
    if local.is_floating_point():
        places = torch.arange(local.numel(), device=local.device).add(seed)
        signs = 1.0 - 2.0 * (places * 2654435761 % 4294967296 // 2147483648)
        local.mul_(1 + signs.view_as(local).to(local) * max(unit, torch.finfo(local.dtype).eps))
