"""Record what a training computes in its first steps, without a change of its code.

PyTorch offers global hooks: before and after every module's forward, before and after every optimizer's step. A dispatch mode sees every
collective, those of DDP's C++ reducer too. From these the recorder writes, for each step: the inputs, the output of every module and the
gradient of the loss in it, the gradient of every parameter before and after the reduction and after clipping, the parameters and the
optimizer's states after the update, losses, norms, learning rates and collectives.

    forward            backward                     reduction     clipping     update
    inputs, outputs    gradients of outputs,        gradients     gradients    parameters, states
                       gradients of this rank

A step begins with the first call of a module after an update. Modules that are computed once more in backward (recompute) are left out.
A folder for each rank is written after every step, so that a script that dies leaves what it did until then (`folder` reads it).
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshwright.check.collectives import CollectiveLog
from meshwright.check.folder import FORMAT
from meshwright.check.frameworks import framework_of
from meshwright.check.frameworks.plain import FrameworkAdapter
from meshwright.check.holdings import Holding, local_part
from meshwright.check.modules import Names
from meshwright.check.start import SETTINGS

WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32}  # exact, and numpy reads them


class StepRecorder:
    """Records the steps of one rank into a folder."""

    def __init__(self, out: str, steps: int = 2, perturb: int = 0) -> None:
        self.out, self.steps, self.perturb = Path(out), steps, perturb
        self.step, self.pid, self.thread = 0, os.getpid(), threading.get_ident()
        self.depth = 0
        self.names: Names | None = None
        self.framework: FrameworkAdapter | None = None
        self.entries: list[dict[str, Any]] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.calls: Counter[str] = Counter()
        self.local: dict[str, torch.Tensor] = {}  # gradients of this rank, summed over micro-batches
        self.updated = self.collected = False
        self.collectives = CollectiveLog()
        self.seconds = self.overhead = 0.0
        self.began = 0.0
        self.handles: list[Any] = []
        self.known: dict[str, Any] = {}
        self.place = 0, 1

    # Attaching

    def attach(self) -> None:
        self.handles += [
            register_module_forward_pre_hook(self.before_module),
            register_module_forward_hook(self.after_module, with_kwargs=False, always_call=False),
            register_optimizer_step_pre_hook(self.before_update),
            register_optimizer_step_post_hook(self.after_update),
        ]
        wrap_clipping(self)
        wrap_backward(self)
        atexit.register(self.close)

    @property
    def active(self) -> bool:
        """Of the first steps; in this process and its main thread only, not in those of a data loader."""
        return self.step < self.steps and os.getpid() == self.pid

    # Forward

    def before_module(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not self.active or in_backward():
            return
        started = time.perf_counter()
        if self.depth == 0:
            self.begin_call(module, inputs)
        self.depth += 1
        self.overhead += time.perf_counter() - started

    def begin_call(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """A call from outside of all modules: of the model, of a stage, or of a loss function."""
        if self.updated:
            self.finish_step()
        if not self.active:
            return
        if self.names is None:
            self.names = Names()
        new = self.names.learn(module)
        if new:
            self.framework = framework_of(module)
            self.framework.prepare(self.names.parameters, self)
            self.place = rank(), world()
            self.known = {  # now: at the end of a script its groups may be gone
                "framework": self.framework.name, "layout": self.framework.layout(),
                "coordinates": self.framework.coordinates(), "batch_dim": self.framework.batch_dim,
            }  # fmt: skip
            for name, parameter in new.items():
                self.follow(name, parameter)
        if not self.began:
            self.began = time.perf_counter()
            self.collectives.start()
        if any(True for _ in module.parameters()):
            for i, tensor in enumerate(tensors_in(inputs)):
                self.note("input", self.names.of(module), tensor, call=self.calls["input", id(module)], index=i)  # type: ignore[index]
            self.calls["input", id(module)] += 1  # type: ignore[index]

    def follow(self, name: str, parameter: nn.Parameter) -> None:
        """Record a parameter's first value, and collect its gradients of this rank."""
        if self.perturb:
            move_by_last_place(parameter, self.perturb)
        self.note_value("initial parameter", name, parameter)
        if parameter.requires_grad and self.framework is not None and self.framework.hooks_gradients:
            parameter.register_hook(lambda gradient: self.add_local(name, gradient))

    def add_local(self, name: str, gradient: torch.Tensor) -> None:
        if self.active:
            local, _ = local_part(gradient.detach())
            known = self.local.get(name)
            self.local[name] = local.clone() if known is None else known + local

    def after_module(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not self.active or in_backward() or self.depth == 0:
            return
        started = time.perf_counter()
        self.depth -= 1
        if self.names is not None and (name := self.names.of(module)) is not None:
            self.calls[name] += 1
            for i, tensor in enumerate(tensors_in(output)):
                place = {"call": self.calls[name] - 1, "index": i}
                self.note("output", name, tensor, **place)
                if tensor.requires_grad:
                    tensor.register_hook(
                        lambda g, name=name, place=place: self.note("output gradient", name, g, **place)
                    )
        self.overhead += time.perf_counter() - started

    # Backward, clipping, update

    def note_loss(self, value: torch.Tensor) -> None:
        if self.active and value.numel() == 1:
            number, _ = local_part(value.detach())
            self.entries.append({"kind": "loss", "name": "", "value": float(number)})

    def note_gradients(self, kind: str) -> None:
        if self.names is None or self.framework is None:
            return
        for name, parameter in self.names.parameters.items():
            for part in self.framework.gradient(name, parameter):
                self.note_held(kind, name, *part)

    def before_clipping(self) -> None:
        """Gradients are complete: what this rank had before the reduction, and after it."""
        if not self.active or self.collected:
            return
        started = time.perf_counter()
        self.collected = True
        for name, gradient in self.local.items():
            for part in self.framework.local_gradient(name, gradient) if self.framework is not None else ():
                self.note_held("local gradient", name, *part)
        self.note_gradients("gradient")
        self.overhead += time.perf_counter() - started

    def after_clipping(self, norm: Any) -> None:
        single = isinstance(norm, float) or (isinstance(norm, torch.Tensor) and norm.numel() == 1)
        if (
            self.active and single and not any(entry["kind"] == "norm" for entry in self.entries)
        ):  # nested calls have one norm
            full = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            self.entries.append({"kind": "norm", "name": "", "value": float(full)})

    def before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.active or self.names is None:
            return
        clipped = self.collected
        self.before_clipping()
        if clipped and not self.updated and self.framework is not None and self.framework.shows_clipped:
            self.note_gradients("clipped gradient")
        for group in optimizer.param_groups:
            self.entries.append({"kind": "learning rate", "name": "", "value": float(group.get("lr", 0.0))})

    def after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.active or self.names is None:
            return
        self.updated = True
        owned = {id(p): name for name, p in self.names.parameters.items()}
        for parameter, states in optimizer.state.items():
            name = owned.get(id(parameter))
            for key, value in states.items():
                if name is not None and isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    self.note_value(f"state {key}", name, value)

    def note_value(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        """Note a parameter, or its optimizer's state of the same shape."""
        assert self.framework is not None
        for part in self.framework.value(name, tensor):
            self.note_held(kind, name, *part)

    # Entries and files

    def note(self, kind: str, name: str | None, tensor: torch.Tensor, **more: Any) -> None:
        """Note an activation: only a DTensor says which part of the whole it is."""
        local, box = local_part(tensor.detach())
        self.note_held(kind, name or "", local, box if box.shape != tuple(local.shape) or box.partial else None, **more)

    def note_held(self, kind: str, name: str, tensor: torch.Tensor, box: Holding | None, **more: Any) -> None:
        key = f"t{len(self.entries)}"
        self.entries.append(
            {
                "kind": kind, "name": name, **more, "key": key, "dtype": str(tensor.dtype).removeprefix("torch."),
                "box": None if box is None else box.as_dict(),
            }
        )  # fmt: skip
        wide = tensor.detach().to(WIDER.get(tensor.dtype, tensor.dtype))
        self.tensors[key] = wide.to("cpu", copy=True).contiguous()

    def finish_step(self, ended: str = "") -> None:
        """Write the step; `ended` says how a script ended in the middle of it."""
        if self.names is not None and not ended:
            for name, parameter in self.names.parameters.items():
                self.note_value("parameter", name, parameter)
        self.collectives.stop()
        folder = self.out / f"rank-{self.place[0]:05d}"
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors, str(folder / f"step-{self.step:03d}.safetensors"))
        seconds = time.perf_counter() - self.began
        step = {
            "entries": self.entries, "collectives": self.collectives.seen, "ended": ended, "seconds": seconds, "recording_seconds": self.overhead,
        }  # fmt: skip
        write_json(folder / f"step-{self.step:03d}.json", step)
        self.step += not ended
        write_json(folder / "rank.json", self.about(ended))
        self.entries, self.tensors, self.local = [], {}, {}
        self.calls.clear()
        self.collectives.seen = []
        self.updated = self.collected = False
        self.began = self.overhead = 0.0
        if self.step >= self.steps:
            self.detach()

    def about(self, ended: str) -> dict[str, Any]:
        assert self.names is not None
        return {
            "format": FORMAT, "rank": self.place[0], "world": self.place[1], "steps": self.step, "torch": torch.__version__,
            **self.known, "groups": self.collectives.groups, "parameters": list(self.names.parameters),
            "modules": sorted(set(self.names.modules.values())),
            "perturbed": self.perturb, "ended": ended,
        }  # fmt: skip

    def detach(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def close(self) -> None:
        """At the end of the process: the step that is complete, or what there is of one that is not."""
        if self.active and self.names is not None and self.entries:
            self.finish_step("" if self.updated else "the script ended in this step")


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of an input or output, in order."""
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.numel() > 0]


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def rank() -> int:
    return torch.distributed.get_rank() if initialized() else int(os.environ.get("RANK", 0))


def world() -> int:
    return torch.distributed.get_world_size() if initialized() else int(os.environ.get("WORLD_SIZE", 1))


def initialized() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@torch.no_grad()
def move_by_last_place(parameter: torch.Tensor, seed: int) -> None:
    """Move every element up or down by one unit in its last place: how far that spreads is how far rounding may."""
    local, _ = local_part(parameter)
    places = torch.arange(local.numel(), device=local.device).add(seed)
    signs = 1.0 - 2.0 * (places * 2654435761 % 4294967296 // 2147483648)
    local.mul_(1 + signs.view_as(local).to(local) * torch.finfo(local.dtype).eps)


def write_json(path: Path, value: Any) -> None:
    """Through a second file, so that a reader never sees half of it."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value), "utf-8")
    partial.replace(path)


def wrap_clipping(recorder: StepRecorder) -> None:
    """Clipping is a function, not a module: gradients are noted before it, and the norm that it returns."""
    for name in ("clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm"):
        plain = getattr(nn.utils, name)

        def wrapped(*args: Any, plain: Any = plain, **kwargs: Any) -> Any:
            recorder.before_clipping()
            result = plain(*args, **kwargs)
            recorder.after_clipping(result)
            return result

        for place in (nn.utils, nn.utils.clip_grad):
            if hasattr(place, name):
                setattr(place, name, wrapped)


def wrap_backward(recorder: StepRecorder) -> None:
    """A loss is what backward begins with: a number without a given gradient."""
    plain = torch.autograd.backward

    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        given = grad_tensors if isinstance(grad_tensors, (tuple, list)) else (grad_tensors,)
        for tensor in (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors):
            if all(gradient is None for gradient in given):
                recorder.note_loss(tensor)
        return plain(tensors, grad_tensors, *args, **kwargs)

    torch.autograd.backward = backward  # `Tensor.backward` calls it by this name


def attach_from_environment() -> None:
    """In a process that `meshwright check record` started."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiled graphs call no hooks
    StepRecorder(**json.loads(os.environ[SETTINGS])).attach()
