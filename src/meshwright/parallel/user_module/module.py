"""`ParallelModule`: a user's module under a plan, on this rank.

    model = mw.parallelize(module, plan, optimizer=partial(torch.optim.AdamW, lr=1e-3))
    loss = model.step(inputs, targets)          # backward, clip_norm, update

or, step by step: `backward` runs all micro-batches and completes the gradients, `clip_norm` returns their global norm, `update` lets the
optimizer take its step and zeroes the gradients.

The loss of a step is the mean over the samples of all data-parallel ranks: each micro-batch's loss, a mean, is weighted by its samples, so that
ranks may have batches of different length. With `reduction="sum"` the loss is a sum (over tokens, say) and is divided by the `count` of all
ranks: exact where padding leaves them different numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.parallel.data.zero import reshard
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.numerics.precision import LossScale, Masters, at_least_single
from meshwright.parallel.user_module.batches import call, microbatches, prepared, samples_in
from meshwright.parallel.user_module.batchnorm import uses_batch
from meshwright.parallel.user_module.checks import check_replicas
from meshwright.parallel.user_module.holdings import LocalParameter, sum_partial
from meshwright.parallel.user_module.samples import (
    ONE_MICROBATCH,
    LossCheck,
    Trial,
    check_samples,
    depends_on_the_batch,
)

Loss = Callable[[Any, Any], torch.Tensor]


def loss_value(loss: Loss | None, output: Any, targets: Any) -> torch.Tensor:
    """The loss of a micro-batch as one number: of the function, or what the module returns."""
    if loss is not None:
        value: Any = loss(output, targets)
    else:
        value = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        found = f"a tensor of {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise MeshwrightError(
            "MW-OWN-003",
            f"the loss is {found}, not one number",
            why="Without a loss function the module must return its loss, as a tensor or in an attribute `loss`",
            fix='parallelize(…, loss=lambda output, targets: …), or step({"input_ids": ids, "labels": labels})',
        )
    return value.reshape(())


@dataclass
class Entry:
    """One name of the module's state: where it is, and what one device would save."""

    shape: torch.Size
    dtype: torch.dtype
    source: str  # the name it shares its values with: itself, or of a tied weight the first
    stages: tuple[int, ...]  # that hold it


@dataclass
class ParallelModule:
    plan: Plan
    mesh: Mesh
    stages: dict[int, nn.Module]  # without a pipeline one, the module itself
    holdings: dict[int, list[LocalParameter]]
    reductions: list[Any]
    entries: dict[str, Entry]
    rank_of: tuple[int, ...]  # the pipeline rank of each stage
    loss: Loss | None
    reduction: str
    batch_dim: int
    dtype: torch.dtype | None  # of forward and backward; None: as the module was
    shared: list[tuple[str, ProcessGroup | None]] = field(default_factory=list)
    masters: Masters | None = None
    optimizer: torch.optim.Optimizer | None = None
    run_pipeline: Callable[[list[tuple[Any, Any]]], torch.Tensor] | None = None
    weight: torch.Tensor | float = 1.0  # what the loss of the micro-batch under way is multiplied by
    check: bool = True  # whether the first step is checked against one device
    synchronised: list[nn.Module] = field(default_factory=list)  # batch normalisations over all data-parallel ranks
    loss_check: LossCheck | None = None
    example_checked: bool = False  # a batch against its halves, when it was built
    used: set[torch.Tensor] = field(default_factory=set)  # parameters with a gradient in this step
    unused: set[str] = field(default_factory=set)  # parameters without one on any rank
    scale: LossScale = field(default_factory=LossScale)

    @property
    def module(self) -> nn.Module:
        """This rank's part of the module; of several stages the first."""
        return next(iter(self.stages.values()))

    @property
    def all_holdings(self) -> list[LocalParameter]:
        return [holding for held in self.holdings.values() for holding in held]

    @property
    def data_rank(self) -> int:
        """Index of this rank's share of the batch among `data_ranks`, for example for a `DistributedSampler`."""
        return self.mesh.index("dp")

    @property
    def data_ranks(self) -> int:
        return self.mesh.size("dp")

    # A step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, for evaluation; with a pipeline no rank has all of it."""
        if self.run_pipeline is not None:
            raise MeshwrightError(
                "MW-OWN-004",
                "a module under a pipeline is called",
                why="Each rank has some of the layers: backward() and step() run micro-batches through all of them",
                fix="gather it with state_dict() and evaluate on one device",
            )
        return self.module(*args, **kwargs)

    def step(
        self, inputs: Any, targets: Any = None, *, count: float | None = None, clip: float | None = None
    ) -> torch.Tensor:
        """One training step on this rank's share of the batch; returns the loss over all ranks."""
        loss = self.backward(inputs, targets, count=count)
        norm = self.clip_norm(clip)
        self.update(norm)
        return loss

    def backward(self, inputs: Any, targets: Any = None, *, count: float | None = None) -> torch.Tensor:
        """Forward and backward of every micro-batch; gradients are complete and averaged afterwards. Returns the loss over all ranks.

        `inputs` are this rank's share of the batch: a tensor, a tuple (passed by position) or a dictionary (by name). Without a `loss` the
        module returns its own, as a tensor or in an attribute `loss`. Ranks of one tp or pp group are given the same share.
        """
        samples = samples_in(inputs, self.batch_dim)
        explicit = "microbatch" in self.plan.model_fields_set or self.run_pipeline is not None
        size = self.plan.microbatch if explicit else samples
        chunks = microbatches(self.cast(inputs), targets, size, self.batch_dim)
        mean = self.reduction == "mean"
        self.check_batch(chunks, size)
        total = self.summed(float(samples if mean or count is None else count), "dp")
        self.weight = (size if mean else 1.0) / total * self.scale.value
        if self.run_pipeline is not None:
            loss = self.run_pipeline(chunks)
        else:
            loss = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
            for i, (x, y) in enumerate(chunks):
                for reduction in self.reductions:
                    reduction.begin(last=i == len(chunks) - 1)
                part = self.weighted_loss(call(self.module, x), y)
                part.backward()
                loss += part.detach()
        uses = self.uses()
        self.finish_gradients()
        problem = self.loss_check.problem if self.loss_check is not None else None
        if self.check and self.mesh.size("tp") > 1:
            problem = check_replicas(self.all_holdings) or problem
        self.check, self.loss_check = False, None
        counted = float(loss) if self.mesh.index("tp") == 0 else 0.0
        total_loss, problems, *ranks_using = self.summed([counted, float(problem is not None), *uses], "world")
        if problems:
            raise problem or depends_on_the_batch("another rank's part of the batch has another loss than its halves")
        self.note_unused(ranks_using)
        return total_loss / self.scale.value

    def check_batch(self, chunks: list[tuple[Any, Any]], size: int) -> None:
        """Raise where parts of a batch give something else than the whole; in the first step, by running a part and its halves."""
        if len(chunks) > 1 and any(uses_batch(part) for part in self.synchronised):
            raise depends_on_the_batch("batch normalisation with several micro-batches in a step", ONE_MICROBATCH)
        if not self.check or (len(chunks) == 1 and self.data_ranks == 1):
            return
        mean = self.reduction == "mean"
        self.loss_check = LossCheck(size, self.batch_dim, mean) if self.loss is not None else None
        if self.run_pipeline is None and not self.example_checked:
            trial = Trial(self.module, chunks[0][0], self.batch_dim, mean, self.synchronised)
            check_samples(trial, self.mesh.device, gradients=not self.mesh.sharded)
            reshard([self.module])

    def uses(self) -> list[float]:
        """By name of the state, whether the parameter has a gradient on this rank. A split backward writes gradients without calling hooks."""
        users = {
            h.name
            for h in self.all_holdings
            if (g := h.parameter.grad) is not None
            and (isinstance(g, DTensor) or h.parameter in self.used or bool(g.any()))
        }
        return [float(name in users) for name in self.entries]

    def note_unused(self, ranks_using: list[torch.Tensor]) -> None:
        """Remember the parameters that no rank used: as on one device, the optimizer leaves them alone (weight decay would change them). Raise where
        data-parallel ranks used different ones under ZeRO: torch then sums gradients of different parameters."""
        counts = dict(zip(self.entries, (int(n) for n in ranks_using), strict=True))
        self.unused = {name for name, count in counts.items() if not count}
        for h in self.all_holdings:
            count, ranks = counts[h.name], self.mesh.size("world") // self.plan.pp
            if isinstance(h.parameter, DTensor) and len(self.entries[h.name].stages) == 1 and 0 < count < ranks:
                raise MeshwrightError(
                    "MW-OWN-010",
                    f"'{h.name}' has a gradient on {count} of {ranks} ranks",
                    why="Under ZeRO all ranks reduce the gradients of the same parameters: these would be summed with others",
                    fix="zero=0 (replicate instead of shard), or use the parameter on every rank (add 0 * its sum to the loss)",
                )

    def weighted_loss(self, output: Any, targets: Any) -> torch.Tensor:
        value = loss_value(self.loss, output, targets)
        if self.loss is not None and self.loss_check is not None:
            self.loss_check.add(self.loss, output, targets)
        return value * self.weight

    def cast(self, inputs: Any) -> Any:
        return prepared(inputs, self.dtype, self.mesh.device)

    def finish_gradients(self) -> None:
        """Wait for the sums over data-parallel ranks; then complete what is partial over tp, and what several stages hold."""
        for reduction in self.reductions:
            reduction.finish()
        sum_partial(self.all_holdings)
        shared = {name for name, _ in self.shared}
        by_name: dict[str, list[torch.Tensor]] = {}
        for holding in self.all_holdings:
            if holding.name in shared and holding.parameter.requires_grad:
                if holding.parameter.grad is None:  # used on other stages only
                    holding.parameter.grad = torch.zeros_like(holding.parameter)
                by_name.setdefault(holding.name, []).append(holding.gradient)
        for name, group in self.shared:
            if copies := by_name.get(name):
                total = torch.stack(copies).sum(0)
                if group is not None:
                    distributed.all_reduce(total, group=group)
                for gradient in copies:
                    gradient.copy_(total)

    def clip_norm(self, most: float | None = None) -> torch.Tensor:
        """The norm of the whole model's gradient, each element counted once; gradients are scaled down to `most` where it is larger."""
        squares = sum(
            (h.squares() for h in self.all_holdings), torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        )
        norm = self.summed(float(squares), "world").sqrt() / self.scale.value
        factor = 1.0 if most is None else min(1.0, most / (float(norm) + 1e-6))
        if factor != 1.0 or self.scale.value != 1.0:
            for holding in self.all_holdings:
                if holding.parameter.grad is not None:
                    holding.gradient.mul_(factor / self.scale.value)
        return norm

    def update(self, norm: torch.Tensor | None = None) -> None:
        """Let the optimizer take its step, and zero the gradients. Under fp16 a step of infinite `norm` is skipped."""
        if self.optimizer is None:
            raise MeshwrightError(
                "MW-OWN-004",
                "there is no optimizer to take a step",
                fix="parallelize(…, optimizer=functools.partial(torch.optim.AdamW, lr=1e-3))",
            )
        if norm is None or self.scale.accept(norm):
            if self.masters is not None:
                self.masters.take_gradients()
            for holding, updated in self.named_updated():
                if holding.name in self.unused:
                    updated.grad = None
            self.optimizer.step()
            if self.masters is not None:
                self.masters.finish_update()
        self.zero_gradients()

    def zero_gradients(self) -> None:
        self.used.clear()
        for reduction in self.reductions:
            reduction.zero()

    def summed(self, value: float | list[float], axis: str) -> torch.Tensor:
        number = torch.tensor(value, dtype=torch.float64, device=self.mesh.device)
        group = self.mesh.group(axis)
        if group is not None:
            distributed.all_reduce(number, group=group)
        return number

    # The state

    def named_updated(self) -> Iterator[tuple[LocalParameter, nn.Parameter]]:
        """Each parameter with what the optimizer updates for it: itself, or its wide copy."""
        masters = self.masters
        pairs = zip(masters.sources, masters.pieces, strict=True) if masters is not None else ()
        wide = {source.parameter: master.parameter for source, master in pairs}
        for holding in self.all_holdings:
            yield holding, wide.get(holding.parameter, holding.parameter)

    @torch.no_grad()
    def state_dict(self) -> dict[str, torch.Tensor]:
        """The full state of the module on every rank, as one device would save it; 16-bit parameters as their fp32 copies. All ranks call it."""
        return self._gathered({h.name: h.gather(self._as_held(h, p)) for h, p in self.named_updated()}, buffers=True)

    @torch.no_grad()
    def gradients(self) -> dict[str, torch.Tensor]:
        """The full gradient of every parameter, on every rank; all ranks call it after `backward`."""
        held = {h.name: h.gather(h.parameter.grad) for h in self.all_holdings if h.parameter.grad is not None}
        return self._gathered(held, buffers=False)

    def _as_held(self, holding: LocalParameter, updated: nn.Parameter) -> torch.Tensor:
        return updated if updated is holding.parameter else updated.to(holding.local.device)

    def _gathered(self, held: dict[str, torch.Tensor], buffers: bool) -> dict[str, torch.Tensor]:
        """Each value from the first stage that holds it to all."""
        group, out = self.mesh.group("pp"), {}
        if buffers:
            names = {name for name, entry in self.entries.items() if entry.source == name}
            for stage in self.stages.values():
                root = getattr(stage, "root", stage)
                held |= {n: b.detach().clone() for n, b in root.named_buffers() if n in names and n not in held}
        for name, entry in self.entries.items():
            value = held.get(entry.source)
            if group is not None and entry.stages:
                first = self.rank_of[entry.stages[0]]
                present = self.broadcast_number(value.element_size() if value is not None else 0, first)
                if not present:
                    continue
                dtype = entry.dtype if present == entry.dtype.itemsize else at_least_single(entry.dtype)
                if value is None:
                    value = torch.empty(entry.shape, dtype=dtype, device=self.mesh.device)
                distributed.broadcast(value := value.contiguous(), group=group, group_src=first)
            if value is not None:
                out[name] = value.cpu()
        return out

    def broadcast_number(self, number: int, source: int) -> int:
        value = torch.tensor(number, device=self.mesh.device)
        distributed.broadcast(value, group=self.mesh.group("pp"), group_src=source)
        return int(value)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's part of a full state, such as `state_dict` returns or one device saved."""
        missing, unexpected = sorted(set(self.entries) - set(state)), sorted(set(state) - set(self.entries))
        wrong = [n for n, e in self.entries.items() if n in state and state[n].shape != e.shape]
        if missing or unexpected or wrong:
            what = f"no '{missing[0]}'" if missing else f"an unknown '{unexpected[0]}'" if unexpected else ""
            raise MeshwrightError(
                "MW-OWN-005",
                f"the state has {what or f'{wrong[0]!r} of {tuple(state[wrong[0]].shape)}, not {tuple(self.entries[wrong[0]].shape)}'}",
                why="A state has every parameter and buffer of the module, whole",
            )
        for holding, updated in self.named_updated():
            part = holding.cut(state[holding.name])
            holding.local.copy_(part)
            if updated is not holding.parameter:
                updated.copy_(part)
        for stage in self.stages.values():
            for name, buffer in getattr(stage, "root", stage).named_buffers():
                if name in state:
                    buffer.copy_(state[name])
