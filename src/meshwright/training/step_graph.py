"""Forward and backward of a step, replayed from one CUDA graph (`run.graphs = "step"`).

Where kernels are short, the device waits for the host, which launches them one by one. A graph is launched once for all of them.

    ordinary   the first two steps run as usual, on the stream of the capture: they compile, choose kernels and allocate workspaces
    capture    the third step runs its Python code without computing: its kernels and their addresses are recorded
    replay     this step and all later ones

A replay repeats the same kernels at the same addresses. What differs between steps is therefore copied to fixed tensors before it: inputs,
targets, the number of tokens with the loss scale in it (`Parallel.tokens`), and the hashes from which dropout draws. What a step leaves behind is in
fixed tensors too: the loss, gradients, loads of routers. The end of the step drops gradients and loads, so they are attached again.

The norm, clipping, the update and its learning rate are outside of the graph: they launch one kernel per parameter, and the host has to know
whether the norm is finite. Evaluations, and the steps that a report traces, run without the graph.

Against `torch.compile(mode="reduce-overhead")`, which captures each compiled graph: routing and experts, most of the launches, are between
those, and every graph copies its inputs.

The graph keeps the memory of the activations between steps. What it cannot hold is refused (`why_not`): messages between ranks, which were not tried,
and whatever makes the host wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.errors import MeshwrightError
from meshwright.models.moe import MixtureOfExperts
from meshwright.models.router import Router
from meshwright.parallel.apply import Parallel

ORDINARY_STEPS = 2


@dataclass
class StepResults:
    """What forward and backward leave behind."""

    loss: Tensor
    gradients: dict[nn.Parameter, Tensor]
    loads: dict[Router, Tensor]

    @classmethod
    def of(cls, parallel: Parallel, loss: Tensor) -> StepResults:
        parts = [part for module in parallel.stages.values() for part in module.modules()]
        gradients = {p: p.grad for part in parts for p in part.parameters(recurse=False) if p.grad is not None}
        return cls(loss, gradients, {r: r.load for r in parts if isinstance(r, Router) and r.load is not None})

    def attach(self) -> Tensor:
        """Give gradients and loads back to their parameters and routers; returns the loss."""
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient
        for router, load in self.loads.items():
            router.load = load
        return self.loss


Step = Callable[[], StepResults]


class Capture(Protocol):
    """Runs a step as usual, or records it: `record` returns the tensors that each call of its second result fills."""

    def ordinary(self, step: Step) -> StepResults: ...
    def record(self, step: Step) -> tuple[StepResults, Callable[[], Any]]: ...


class CudaCapture:
    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()

    def ordinary(self, step: Step) -> StepResults:
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            results = step()
        here.wait_stream(self.stream)
        return results

    def record(self, step: Step) -> tuple[StepResults, Callable[[], Any]]:
        graph = torch.cuda.CUDAGraph()
        try:  # the thread that prepares batches allocates pinned memory meanwhile, which only this mode allows
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                results = step()
        except RuntimeError as error:
            raise refused("a part of the step makes the host wait for the device") from error
        return results, graph.replay


class StepGraph:
    """Called instead of `Parallel.forward_backward`."""

    def __init__(self, parallel: Parallel, capture: Capture | None = None) -> None:
        if capture is None and (reason := why_not(parallel)):
            raise refused(reason)
        self.parallel, self.capture = parallel, capture or CudaCapture()
        self.ordinary_steps = ORDINARY_STEPS
        self.fixed: dict[str, Tensor] = {}
        self.captured: tuple[StepResults, Callable[[], Any]] | None = None

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        parallel = self.parallel
        if parallel.documents_BS is not None:
            raise refused("masks of documents are made on the host")
        inputs, targets = self.keep("inputs", inputs), self.keep("targets", targets)
        parallel.tokens = self.keep("tokens", torch.as_tensor(parallel.tokens))
        if parallel.samples_B is not None:
            parallel.samples_B = self.keep("samples", parallel.samples_B)
        step = partial(self.run, inputs, targets)
        if self.ordinary_steps:
            self.ordinary_steps -= 1
            return self.capture.ordinary(step).loss
        if self.captured is None:
            self.captured = self.capture.record(step)
        results, replay = self.captured
        replay()
        return results.attach()

    def keep(self, name: str, value: Tensor) -> Tensor:
        """The value at the address that it has in every step."""
        if name not in self.fixed:
            self.fixed[name] = value.clone()
        return self.fixed[name].copy_(value)

    def run(self, inputs: Tensor, targets: Tensor) -> StepResults:
        return StepResults.of(self.parallel, self.parallel.forward_backward(inputs, targets))


def why_not(parallel: Parallel) -> str | None:
    """Why the steps of a plan cannot be captured; None if they can."""
    plan = parallel.plan
    if torch.device(parallel.mesh.device).type != "cuda":
        return "the run is not on a GPU"
    if plan.world > 1:
        return f"the plan has {plan.world} ranks, and messages between them are not captured"
    if plan.offloads_activations:
        return "the host waits for the copies of offloaded activations"
    mixtures = [m for s in parallel.stages.values() for m in s.modules() if isinstance(m, MixtureOfExperts)]
    if not all(m.keeps_counts_on_device(parallel.dtype) for m in mixtures):
        return "the host reads how many tokens each expert has (without limits of capacity, in bf16 and since Hopper, it does not)"
    return None


def refused(reason: str) -> MeshwrightError:
    return MeshwrightError(
        "MW-PAR-010",
        "run.graphs = step, and the step cannot be captured in a CUDA graph",
        why=reason[0].upper() + reason[1:],
        fix="--set run.graphs=off",
    )
