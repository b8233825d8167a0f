"""Pipeline programs on torch's stages: the one file that touches torch's private pipeline runtime.

Our program (`programs.pipelines`) lists for each rank which F, B, I, W to run on which stage and micro-batch; torch's
runtime adds the sends and receives, runs the autograd of each action, and, under `fully_shard`, gathers a stage's
parameters before its first action and frees them after its last. Private names used, all of them here:

    _Action, _ComputationType                       the runtime's types of actions
    _PipelineScheduleRuntime                        executes a rank's list
    ._prepare_schedule_with_comms(actions)          adds sends and receives; derives the placement from the lists
    .pipeline_order_with_comms                      the resulting lists, in which we move receives earlier
    PipelineStage.perform_reduce_grad(factor)       called after a stage's last backward: its gradients can be sent
    PipelineStage._post_metadata_inference_cleanup  drops gradients before the first step (torch 2.13)
    PipelineStage._get_init_p2p_neighbors_ops       connects neighbours before the first step
    PipelineStage.args_recv_info, .grad_recv_info   a receive buffer for every message of a step

Two mistakes of hand-written 1F1B loops that a program cannot make: sending the gradient of a stage's *output* to the
stage before, instead of the input's; and testing for a previous stage with `if prev_rank:`, which is false for rank 0.

`check_adapter` names the missing names if torch moves any. Shapes between stages are given in advance, since torch would
otherwise run a whole forward and backward in the first step to find them.

With your own network in `count` parts, on each of the ranks:

    program = build("1f1b", ranks, microbatches, 1)
    mesh = Mesh(Layout(Plan(pp=ranks)), rank)
    mine = [i for i in range(count) if program.rank_of[i] == rank]
    sums = {i: LocalGradients(parts[i].parameters()) for i in mine}        # with replicas: Buckets
    stages = [Stage(parts[i], i, count, mesh, sums[i], given, made) for i in mine]  # meta tensors of one micro-batch
    loss = Pipeline(program, stages, mesh, loss_function).run(inputs, targets)      # on the last stage's rank
    for gradients in sums.values(): gradients.finish()
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.torch_version import TorchVersion

from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.parallel.data.buckets import Buckets
from meshwright.parallel.data.reduction import LocalGradients, Reduction, reductions_in
from meshwright.parallel.mesh import Mesh
from meshwright.programs.pipelines.program import PipelineProgram

Loss = Callable[[Tensor, Tensor], Tensor]
Scope = Callable[[int], AbstractContextManager[None]]
KINDS = {"F": "FORWARD", "B": "FULL_BACKWARD", "I": "BACKWARD_INPUT", "W": "BACKWARD_WEIGHT"}


def no_scope(microbatch: int) -> AbstractContextManager[None]:
    """The default `scope` of a micro-batch: none."""
    return nullcontext()


def check_adapter() -> None:
    types, runtime = (getattr(schedules, name, None) for name in ("_ComputationType", "_PipelineScheduleRuntime"))
    needed: list[tuple[Any, str]] = [
        *((schedules, name) for name in ("_Action", "_ComputationType", "_PipelineScheduleRuntime")),
        (PipelineStage, "perform_reduce_grad"),
        *((types, kind) for kind in (*KINDS.values(), "RECV_F", "RECV_B")),
        (runtime, "_prepare_schedule_with_comms"),
    ]
    missing = [name for owner, name in needed if owner is not None and not hasattr(owner, name)]
    if missing:
        raise MeshwrightError(
            "MW-PIPE-040",
            f"torch {torch.__version__} has no {', '.join(missing)}",
            why="Pipeline programs run on torch's private runtime, which this version has changed",
            valid=["torch 2.11 to 2.13"],
        )


def drops_custom_functions() -> bool:
    """Whether this torch drops custom autograd functions, such as fp8 products, in a split backward: before 2.13 it does."""
    return torch.__version__ < TorchVersion("2.13")


def check_split_products(plan: Plan, program: PipelineProgram) -> None:
    """Raise where torch would drop fp8 products in the split backward of this program."""
    if program.splits_backward and drops_custom_functions():
        raise MeshwrightError(
            "MW-PIPE-041",
            f"fp8 products under the schedule {plan.schedule} need torch 2.13, not {torch.__version__}",
            why="torch < 2.13 drops custom autograd functions in a split backward",
            valid=["gpipe", "1f1b", "interleaved"],
            fix="--set plan.schedule=1f1b",
        )


def receives_integers() -> bool:
    """Whether a stage can receive integers: before 2.13 torch asks for the gradient of all that a stage receives."""
    return torch.__version__ >= TorchVersion("2.13")


def check_messages(stage: int, inputs: Sequence[Tensor]) -> None:
    """Raise where torch cannot send to this stage what it receives."""
    if not receives_integers() and not all(t.is_floating_point() for t in inputs):
        raise MeshwrightError(
            "MW-PIPE-043",
            f"pipeline stage {stage} receives integers, and torch {torch.__version__} cannot send them",
            why="torch < 2.13 asks for the gradient of everything that a stage receives",
            valid=["torch 2.13 or later", "layers that pass on floating-point tensors only"],
            fix='pip install "torch>=2.13"',
        )


class Stage(PipelineStage):
    """A stage whose gradients are sent as soon as its last backward is done, while other stages still compute."""

    def __init__(
        self,
        module: nn.Module,
        index: int,
        count: int,
        mesh: Mesh,
        reduction: Reduction,
        inputs: Tensor | tuple[Tensor, ...],
        outputs: Tensor | tuple[Tensor, ...],
    ) -> None:
        for receiver, messages in ((index, inputs), (index + 1, outputs)):  # both sides raise
            if 0 < receiver < count:
                check_messages(receiver, (messages,) if isinstance(messages, Tensor) else messages)
        device, group = torch.device(mesh.device), mesh.group("pp")
        super().__init__(module, index, count, device, input_args=inputs, output_args=outputs, group=group)
        self.reduction = reduction
        self.scope: Scope = no_scope
        self.shape_of_input = inputs if isinstance(inputs, Tensor) else inputs[0]  # a meta tensor

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.scope(fwd_chunk_id):
            try:
                return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
            except RuntimeError as error:  # torch hides the reason
                if isinstance(error.__cause__, MeshwrightError):
                    raise error.__cause__ from None
                raise

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        # Torch before 2.12 connects to both neighbours, even one on this rank (in a V); gloo cannot send to itself.
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != distributed.get_rank()]

    def _post_metadata_inference_cleanup(self) -> None:
        # Torch drops every gradient of a module it shards before the first step, also those of parameters it does not
        # shard (experts that are on one rank each). Those are views into a bucket, and must stay so.
        views = [(p, p.grad) for p in self.submod.parameters() if p.grad is not None]
        super()._post_metadata_inference_cleanup()
        for parameter, view in views:
            parameter.grad = view

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        if full_backward:
            self._begin()
        return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        self._begin()
        return super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def _begin(self) -> None:
        """Before a micro-batch has gradients: convert those of the previous one, or send them, if each is reduced separately."""
        for part in reductions_in([self.reduction]):
            if isinstance(part, LocalGradients) or (isinstance(part, Buckets) and part.per_microbatch):
                part.begin(last=False)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        super().perform_reduce_grad(grad_scale_factor)
        self.reduction.start()


class Pipeline:
    """One rank's part of a pipeline program."""

    def __init__(
        self, program: PipelineProgram, stages: list[Stage], mesh: Mesh, loss: Loss, scope: Scope = no_scope
    ) -> None:
        """`scope` returns a context, by the number of a micro-batch, which is entered for its forward on each stage."""
        check_adapter()
        for stage in stages:
            stage.scope = scope
        self.stages, self.microbatches = stages, program.microbatches
        self.program, self.mesh, self.scope = program, mesh, scope
        self.first = any(stage.is_first for stage in stages)
        self.last = any(stage.is_last for stage in stages)
        self.runtime = schedules._PipelineScheduleRuntime(stages, program.microbatches, loss_fn=loss, scale_grads=False)
        self.runtime._prepare_schedule_with_comms(actions_of(program))
        lists = self.runtime.pipeline_order_with_comms
        self.runtime.pipeline_order_with_comms = {rank: receive_early(actions) for rank, actions in lists.items()}

    def run(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Run all micro-batches of a step, forward and backward. Returns the summed loss on the rank of the last stage."""
        if len(inputs) % self.microbatches:
            raise MeshwrightError(
                "MW-PIPE-042",
                f"{len(inputs)} samples do not divide into {self.microbatches} micro-batches",
                why="The shapes between stages are fixed in advance: all micro-batches must be equal",
            )
        losses: list[Tensor] = []
        arguments = (inputs,) if self.first else ()
        self.runtime.step(*arguments, target=targets if self.last else None, losses=losses, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else None

    @property
    def receive_buffers(self) -> list[Tensor]:
        """The buffers that torch keeps from the first step on: one for each message that a step receives."""
        tables = (table for stage in self.stages for table in (stage.args_recv_info, stage.grad_recv_info))
        infos = (info for table in tables for of_message in table.values() for info in of_message)
        buffers = (getattr(info, "buffer", None) for info in infos)  # none where an argument is the input of the model
        return [buffer for buffer in buffers if isinstance(buffer, Tensor)]

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor, loss: Loss) -> Tensor | None:
        """The summed loss of all micro-batches, forward only, on the rank of the last stage.

        Each rank runs its stages in the order (micro-batch, stage), receives the input of a stage from the rank before and sends
        its output on. Sends do not wait, so ranks work on different micro-batches at the same time."""
        group, rank_of, total = self.mesh.group("pp"), self.program.rank_of, None
        messages: list[tuple[distributed.Work | None, Tensor]] = []
        for i, (x, target) in enumerate(
            zip(inputs.chunk(self.microbatches), targets.chunk(self.microbatches), strict=True)
        ):
            for stage in sorted(self.stages, key=lambda stage: stage.stage_index):
                index = stage.stage_index
                if index and rank_of[index - 1] != rank_of[index]:
                    x = torch.empty_like(stage.shape_of_input, device=self.mesh.device, requires_grad=False)
                    distributed.recv(x, group=group, group_src=rank_of[index - 1])
                with self.scope(i):
                    x = stage.submod(x)
                if stage.is_last:
                    part = loss(x, target).to(torch.float64)
                    total = part if total is None else total + part
                elif rank_of[index + 1] != rank_of[index]:
                    x = x.contiguous()
                    messages.append((distributed.isend(x, group=group, group_dst=rank_of[index + 1]), x))
        for work, _ in messages:
            if work is not None:
                work.wait()
        return total


def actions_of(program: PipelineProgram) -> dict[int, list]:
    kinds = {letter: getattr(schedules._ComputationType, name) for letter, name in KINDS.items()}
    return {
        rank: [schedules._Action(a.stage, kinds[a.kind], a.microbatch) for a in program.actions(rank)]
        for rank in range(program.ranks)
    }


def receive_early(actions: list) -> list:
    """Post each receive before the computation that precedes it, not after: the message then arrives meanwhile. Messages
    keep their order, on which NCCL's ranks must agree."""
    compute = {getattr(schedules._ComputationType, name) for name in KINDS.values()}
    receives = {schedules._ComputationType.RECV_F, schedules._ComputationType.RECV_B}
    out: list = []
    for action in actions:
        follows_compute = bool(out) and action.computation_type in receives and out[-1].computation_type in compute
        out.insert(len(out) - follows_compute, action)
    return out
