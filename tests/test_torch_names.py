"""Every private name of torch that the package uses, in one table: which feature needs it, and in which file it may stand.

A new torch that moves a name fails here first, and the failure names the feature. A private name in another file fails too.
"""

import ast
import importlib
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

SOURCE = Path(__file__).parents[1] / "src" / "meshwright"
SCHEDULES, C10D = "torch.distributed.pipelining.schedules", "torch.distributed.distributed_c10d"
ATEN, FAKE = "torch.ops.aten", "torch._subclasses.fake_tensor"
DISPATCH = "torch.utils._python_dispatch.TorchDispatchMode"  # torch's documentation imports it from here

# feature: (files, names)
PRIVATE = {
    "fp8 products": (["models/wide_products.py"], ["torch._scaled_mm"]),
    "the gradient of a chunked loss": (["models/loss.py"], ["torch._foreach_mul_"]),
    "ZeRO gathers in fp8": (
        ["parallel/data/fp8_gather.py"],
        ["torch._foreach_copy_", "torch.distributed.tensor.DTensor.__torch_dispatch__"],
    ),
    "integers that ZeRO shards": (
        ["parallel/data/gathering.py"],
        ["torch.distributed.fsdp._fully_shard._fsdp_param.nn"],
    ),
    "tensors that a pipeline does not send": (
        ["parallel/user_module/stages.py"],
        ["torch.Tensor._make_subclass", "torch._C._disabled_torch_function_impl"],
    ),
    "compile": (
        ["parallel/compile.py"],
        [
            "torch._dynamo.config.recompile_limit",
            "torch._dynamo.lookup_backend",
            "torch._dynamo.utils.calculate_time_spent",
            "torch._dynamo.utils.counters",
            "torch._inductor.config.compile_threads",
            "torch.utils._pytree.tree_leaves",
        ],
    ),
    "attention of blocks of a sequence": (
        ["parallel/context/kernels.py"],
        [
            f"{ATEN}._scaled_dot_product_cudnn_attention",
            f"{ATEN}._scaled_dot_product_cudnn_attention_backward",
            f"{ATEN}._scaled_dot_product_flash_attention",
            f"{ATEN}._scaled_dot_product_flash_attention_backward",
        ],
    ),
    "collectives in a compiled graph": (["parallel/operators.py"], [f"{C10D}._resolve_process_group"]),
    "the store of a group": (["comm/communicator.py"], [f"{C10D}._get_process_group_store"]),
    "a profiler that runs": (["training/measure/record_comm.py"], ["torch.autograd.profiler._is_profiler_enabled"]),
    "the store of a program": (["check/exchange.py"], [f"{C10D}._get_default_store"]),
    "pipeline stages": (
        ["parallel/pipeline.py"],
        [
            f"{SCHEDULES}._Action",
            f"{SCHEDULES}._ComputationType.RECV_B",
            f"{SCHEDULES}._ComputationType.RECV_F",
            f"{SCHEDULES}._PipelineScheduleRuntime",
            f"{SCHEDULES}._PipelineScheduleRuntime._prepare_schedule_with_comms",
        ],
    ),
    "batch norm of a user's module": (
        ["parallel/user_module/whole.py"],
        ["torch.nn.modules.batchnorm._BatchNorm.forward"],
    ),
    "dropout of a user's module": (["proof/user_module/step.py"], ["torch.nn.modules.dropout._DropoutNd"]),
    "operators seen one by one": (
        [
            "check/collectives.py",
            "comm/bench/operations.py",
            "parallel/user_module/forward_trace.py",
            "parallel/user_module/samples.py",
            "proof/trace.py",
            "training/dry_run.py",
            "training/measure/observe.py",
        ],
        [DISPATCH],
    ),
    "tensors inside nested values": (
        ["check/process_hooks.py", "check/collectives.py", "training/measure/observe.py"],
        ["torch.utils._pytree.tree_leaves"],
    ),
    "train --dry-run": (
        ["training/dry_run.py"],
        [
            f"{FAKE}.DataDependentOutputException",
            f"{FAKE}.DynamicOutputShapeException",
            f"{FAKE}.FakeTensorMode",
            f"{FAKE}.unset_fake_temporarily",
            f"{ATEN}._local_scalar_dense.default",
        ],
    ),
    "copies of a ZeRO unit": (["comm/bench/device.py"], ["torch._chunk_cat"]),
    "one rank of a world": (["training/fake_group.py"], ["torch.testing._internal.distributed.fake_pg.FakeStore"]),
    "flight records": (["training/faults/watchdog.py"], ["torch._C._distributed_c10d"]),
    "imports of the forkserver": (
        ["training/launch/preload.py"],
        ["torch._dynamo", "torch.distributed._functional_collectives"],
    ),
    "records of communication": (
        ["training/measure/record_comm.py"],
        ["torch.ops._c10d_functional", "torch.distributed.ProcessGroup._allgather_base"],
    ),
    "recordings of anybody's steps": (
        ["check/process_hooks.py", "check/collectives.py"],
        [
            PIPELINE_SHAPES
            := "torch.distributed.pipelining.stage.PipelineStage._compute_outputs",  # known by its frame
            "torch._C._current_graph_task_id",
            f"{C10D}._world.pg_group_ranks",
            "torch.utils._python_dispatch._get_current_dispatch_mode",
        ],
    ),
    "recordings of FSDP": (
        ["check/frameworks/fsdp.py"],
        [
            "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
            "torch.distributed.fsdp._fully_shard._fsdp_param_group.foreach_reduce",
            "torch.distributed.fsdp._runtime_utils._reduce_grad",
        ],
    ),
    "torchtitan on a CPU": (
        ["check/cpu/torchtitan.py"],
        [
            "torch._inductor.compile_fx",
            "torch._utils._get_available_device_type",
            "torch._utils._get_device_module",
            "torch.utils._triton.has_triton_package",
        ],
    ),
    "tensors changed in place": (
        ["parallel/tensor/regather.py", "parallel/data/offload.py"],
        ["torch.Tensor._version"],
    ),
}

SINCE = {PIPELINE_SHAPES: "2.12"}  # 2.11 infers shapes without gradients, which the recorder skips anyway


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_names(text: str) -> set[str]:
    """The private names that a file imports from torch, or reaches as attributes of what it imports."""
    tree, imported, names = ast.parse(text), {}, set()
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                names |= {alias.name for alias in node.names if alias.name.startswith("torch.")}
                imported |= {
                    a.asname or "torch": a.name if a.asname else "torch"
                    for a in node.names
                    if a.name.split(".")[0] == "torch"
                }
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "torch":
                imported |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names}
                names |= {f"{module}.{alias.name}" for alias in node.names}

    def dotted(node: ast.AST) -> str:
        match node:
            case ast.Name(id=name):
                return imported.get(name, "")
            case ast.Attribute(value=value, attr=attribute):
                return f"{start}.{attribute}" if (start := dotted(value)) else ""
        return ""

    names |= {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {n for n in names if is_private(n) and not any(longer.startswith(f"{n}.") for longer in names)}


def resolve(name: str) -> object:
    """The object of a dotted name; raises with the first part that torch lacks."""
    parts = name.split(".")
    value: object = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], start=2):
        if not hasattr(value, part):
            importlib.import_module(".".join(parts[:i]))
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("feature", PRIVATE)
def test_torch_has_the_private_names(feature):
    files, names = PRIVATE[feature]
    missing = []
    for name in names:
        if torch.__version__ < TorchVersion(SINCE.get(name, "0")):
            continue
        try:
            resolve(name)
        except (ImportError, AttributeError) as error:
            missing.append(f"{name} ({error})")
    assert not missing, (
        f"torch {torch.__version__} has moved names that {feature} needs in {', '.join(files)}: {missing}"
    )


def test_private_names_stand_only_in_their_files():
    allowed: dict[str, set[str]] = {}
    for files, names in PRIVATE.values():
        for file in files:
            allowed.setdefault(file, set()).update(names)
    for path in sorted(SOURCE.rglob("*.py")):
        file, text = str(path.relative_to(SOURCE)), path.read_text("utf-8")
        others = (private_names(text) if "torch" in text else set()) - allowed.get(file, set())
        assert not others, (
            f"{file} uses private names of torch that tests/test_torch_names.py does not list: {sorted(others)}"
        )


def test_the_scan_sees_attributes_imports_and_aliases():
    text = (
        "import torch\nfrom torch import distributed as d\nfrom torch._C import _x\ntorch._a(1)\nd.c._b\nd.open_name\n"
    )
    assert private_names(text) == {"torch._a", "torch.distributed.c._b", "torch._C._x"}
