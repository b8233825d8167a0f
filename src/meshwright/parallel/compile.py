"""Compile the layers of a stage with `torch.compile`: fewer kernels, fewer passes over memory, less work of the host.

    off      eager kernels
    blocks   each layer is one graph, and so are the head and the loss
    whole    all layers of the stage are one graph, where nothing between them prevents it; else as blocks
    auto     blocks on GPUs, off on CPUs

**Why per layer.** All layers of one kind have the same graph, so it is compiled once: the first step comes within a minute, where a whole
network of 80 layers takes many. inductor keeps what it compiled on disk (TORCHINDUCTOR_CACHE_DIR), for the next start and for the other
ranks of the machine. Between layers there is little to fuse.

**Order.** A strategy is inside the graph if it is made of operators, and outside if it is made of hooks:

    inside    tensor, sequence and context parallelism: their collectives are operators (`operators`, `context.attend`); selective
              recompute and the second gather of sequence parallelism, which the compiler does itself from marks of
              `torch.utils.checkpoint`
    outside   full recompute and offload: hooks on the tensors that the graph saves for backward. ZeRO: `fully_shard` gathers the
              parameters before the call, and the graph takes them as inputs. Pipeline stages call their layers one by one

So `apply` compiles after the strategies that change a layer from the inside, and before those that wrap it. (torch recommends recompute
before compile, because torch's checkpoint is traced into the graph. Ours is not: it also serves split backwards.)

**The step's context** (`models.step_context`: samples for dropout, documents, whether gathered tensors are kept) is an input of the graph: the
tensors that it reads there change from step to step without another graph, and each value of a flag has its own.

**What is not compiled**, with the reason in `Compilation.notes`: stages of split-backward schedules (torch computes the gradients of inputs
and weights separately there, and a compiled graph has one backward), the dispatch and the products of experts (their sizes are known only when the
tokens are routed; the layer around them is two graphs), embeddings (a lookup), and a head that computes the loss in chunks (products, and
one kernel: `models.loss`).

**Lost gradients.** torch 2.11 returns from the graph of an `autograd.Function` every tensor that its forward names. If two names are one tensor,
as `x.contiguous()` is x, the result's gradient goes to the other name and is zero (its issue 180642; 2.12 does not). Our functions have no
such result; under 2.11 a layer with one, of a plug-in say, is refused (`refuse_lost_gradients`).

Private names of torch: the options `torch._dynamo.config.recompile_limit` and `torch._inductor.config.compile_threads`, and
`torch._dynamo.lookup_backend`, `torch._dynamo.utils.counters` and `calculate_time_spent`.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.models.dropout import DrawsForSamples
from meshwright.models.moe import Sums
from meshwright.programs.pipelines.program import PipelineProgram

BACKEND = "inductor"
COMPILERS = ("g++", "clang++", "c++")
MOST_GRAPHS = 64  # of one function: layers of different kinds, in training and in evaluation
# Of this rank: their number per sequence, and what attention computes in
Tokens = tuple[int, torch.dtype, torch.device]


@dataclass
class Compilation:
    """Lists the compiled parts, and the parts that are not compiled, with reasons."""

    mode: str = "off"
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def resolve_compile(setting: str, device: str) -> str:
    """ "off", "blocks" or "whole" for a setting that may be "auto"."""
    kind = torch.device(device).type
    mode = ("blocks" if kind == "cuda" else "off") if setting == "auto" else setting
    if mode != "off" and kind == "cpu" and not any(shutil.which(name) for name in COMPILERS):
        raise MeshwrightError(
            "MW-PAR-009",
            f"run.compile = {mode} on a CPU needs a C++ compiler, and none was found",
            why="torch.compile writes C++ code for CPUs",
            valid=[f"{name} in PATH" for name in COMPILERS],
            fix="--set run.compile=off",
        )
    return mode


def plan_compilation(
    setting: str, device: str, plan: Plan, model: Model, program: PipelineProgram | None, sharded: bool
) -> Compilation:
    """Decide what to compile under a plan; `sharded`: ZeRO shards its parameters."""
    done = Compilation(resolve_compile(setting, device))
    if done.mode == "off":
        return done
    if program is not None and program.splits_backward:
        done.note(f"the schedule {plan.schedule} splits the backward of a stage, and a compiled graph has one")
        done.mode = "off"
        return done
    between = {
        "ZeRO gathers parameters": sharded,
        "recompute=full has hooks": plan.recompute == "full",
        "offload has hooks": plan.offloads_activations,
        "experts are dispatched": bool(model.experts),
    }
    found = [why for why, is_there in between.items() if is_there]
    if done.mode == "whole" and found:
        done.note(f"not whole: {', '.join(found)} between layers")
        done.mode = "blocks"
    if model.experts:
        done.note(
            "of the routed experts only the routing, the activation and the sums of copies are compiled: their sizes depend on the routing"
        )
    return done


def compile_stage(module: Any, done: Compilation, tokens: Tokens) -> None:
    """Compile a stage of one of our models in place, before hooks are put around its layers."""
    if done.mode == "off":
        return
    prepare_compiler(tokens[2])
    if hasattr(module, "geometry"):
        module.geometry.prepare(*tokens)
    for part in module.modules():
        if isinstance(part, DrawsForSamples):
            part.prepare(tokens[2])
    if done.mode == "whole":
        module.body = compiled(module.body)
    else:
        for layer in module.layers.values():
            compile_layer(layer)
    head: Any = getattr(module, "head", None)
    if head is not None and not head.fuses_loss:
        head.forward = compiled(head.forward)


def compile_layer(layer: Any) -> None:
    """One graph; with experts two, before and after them, one for the shared experts, one for the routing where the number of copies is known,
    one for the activation of routed experts, of any number of rows, and three for the sums of their outputs and gradients."""
    expert = getattr(layer, "expert", False)
    if expert:
        compile_experts(layer.moe)
    layer.forward = compiled(layer.forward, one_graph=not expert)


def compile_experts(moe: Any) -> None:
    """Compile the parts of a mixture of experts between its routing and its products, which stay as they are."""
    experts = moe.experts
    name = "product" if experts.gated else "activation"
    # A constant number of rows, as on one rank, gives the faster kernel; where it changes, the next graph is for any number.
    setattr(experts, name, torch.compile(getattr(experts, name), fullgraph=True, backend=backend()))
    if moe.router.dropless:
        moe.router.route_all = compiled(moe.router.route_all, one_graph=False)
    moe.sums = Sums(*(torch.compile(f, fullgraph=True, backend=backend()) for f in Sums().functions))
    if moe.shared is not None:
        moe.shared.forward = compiled(moe.shared.forward)
    moe.forward = torch.compiler.disable(moe.forward)


def compiled(function: Callable[..., Tensor], one_graph: bool = True) -> Callable[..., Tensor]:
    """The compiled form of a function of tensors, or of a method of a module. Hooks on the module stay outside of the graph.

    The compiler refuses a parameter whose gradient has another dtype, as the fp32 sums of 16-bit parameters have: the graph sees none."""
    graph: Callable[..., Tensor] = torch.compile(function, fullgraph=one_graph, dynamic=False, backend=backend())
    module = getattr(function, "__self__", None)
    if not isinstance(module, nn.Module):
        return graph
    parameters: list[nn.Parameter] = []

    def call(*args: Any, **kwargs: Any) -> Tensor:
        if not parameters:
            parameters.extend(module.parameters())
        wide = [(p, p.grad) for p in parameters if p.grad is not None and p.grad.dtype != p.dtype]
        for p, _ in wide:
            p.grad = None
        try:
            return graph(*args, **kwargs)
        finally:
            for p, gradient in wide:
                p.grad = gradient

    return call


def backend() -> Any:
    """What compiles a graph: BACKEND, behind a check of the graph where torch loses gradients."""
    return BACKEND if torch.__version__ >= TorchVersion("2.12") else refuse_lost_gradients


def refuse_lost_gradients(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
    """A backend: BACKEND, or a function that raises if torch 2.11 would lose a gradient of the graph."""
    from torch._dynamo import lookup_backend

    if not (renamed := [names for names in names_of_results(graph) if len(names) > 1]):
        return lookup_backend(BACKEND)(graph, inputs, **options)

    def refuse(*args: Any) -> None:
        raise MeshwrightError(
            "MW-PAR-011",
            f"torch {torch.__version__} loses a gradient in a compiled layer: {' and '.join(renamed[0])} are one tensor, and an "
            "autograd.Function returns it",
            why="torch 2.11 gives the gradient of the result to its other name, without an error (its issue 180642)",
            valid=[
                "torch 2.12 or later",
                "a forward that returns a tensor under one name, not x.contiguous() of a contiguous x",
            ],
            fix="--set run.compile=off",
        )

    return refuse  # raised here, the error would be wrapped in one of the compiler


def names_of_results(graph: torch.fx.GraphModule) -> Iterator[list[str]]:
    """For each result that a graph takes from an `autograd.Function`, its name and the other names of the same tensor in forward."""
    for module in graph.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            if "autograd_function_apply" not in str(node.target):
                continue
            forward: Any = getattr(module, node.args[0].target)
            *body, output = forward.graph.nodes
            results = torch.utils._pytree.tree_leaves(output.args)
            taken = {user.args[1] for user in node.users if "getitem" in str(user.target)}
            for result in (results[i] for i in sorted(taken or {0})):
                tensor = result.meta["example_value"]
                yield [
                    str(result),
                    *(str(n) for n in body if n is not result and n.meta.get("example_value") is tensor),
                ]


def graph_counts() -> tuple[int, int]:
    """The graphs that this process has compiled, and the places at which a function fell into several (graph breaks)."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def compile_seconds() -> float:
    """Seconds that this process has spent in the compiler, forward and backward. The first launches of compiled kernels are not part of it."""
    from torch._dynamo.utils import calculate_time_spent

    return calculate_time_spent()["total_wall_time"]


def prepare_compiler(device: torch.device) -> None:
    """Settings of the compiler for this process."""
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    dynamo.recompile_limit = max(dynamo.recompile_limit, MOST_GRAPHS)
    if device.type == "cpu":
        inductor.compile_threads = 1  # more would start a pool of processes for each rank
