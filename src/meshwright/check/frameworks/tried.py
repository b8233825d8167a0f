"""What was tried with each framework, on CPU processes with gloo: `meshwright check frameworks`. The runs are in tests/frameworks."""

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.check.cpu import patches_of
from meshwright.view.tables import table


@dataclass(frozen=True)
class TriedFramework:
    name: str
    versions: str
    runs: str  # the layouts that were recorded and compared
    read_from: str  # where what a rank holds is read from
    patches: str = ""  # the file in `check.cpu`
    not_on_cpu: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"patches": patches_of(self.patches) if self.patches else []}


FRAMEWORKS_TRIED = (
    TriedFramework(
        "PyTorch", "2.13.0", "DDP, FSDP1 (also flat parameters), FSDP2, HSDP, DTensor tensor and sequence parallelism, FSDP2 × tp, recompute",
        "DTensor placements and device meshes; the ranges of FSDP1's flat parameters",
        not_on_cpu="FSDP1's clipping in float64 (PyTorch refuses it on every device)",
    ),
    TriedFramework(
        "torch.distributed.pipelining", "2.13.0", "GPipe, 1F1B, interleaved 1F1B, interleaved zero bubble; with FSDP2 in each stage",
        "the names of parameters, which a stage keeps",
    ),
    TriedFramework(
        "megatron-core", "0.16.1", "tp, sequence parallel, pp, virtual stages, ep by all-gather and all-to-all, distributed optimizer, combinations",
        "partition_dim, layer and expert numbers, the buffers of its DDP and distributed optimizer",
        "megatron", "context parallelism, grouped GEMM and fused kernels (Transformer Engine)",
    ),
    TriedFramework(
        "DeepSpeed", "0.19.8", "ZeRO-0 to ZeRO-3, overlapped reduction, PipelineModule with ZeRO-0 and ZeRO-1",
        "its functions for whole gradients and parameters; optimizer states are not read", "deepspeed",
        "its Adam for offloaded states, which a compiler would have to build",
    ),
    TriedFramework(
        "accelerate", "1.15.0", "DDP, FSDP2", "as PyTorch", "accelerate", "FSDP without --on-cpu: it becomes DDP without a word",
    ),
    TriedFramework(
        "Transformers' Trainer", "5.23.0", "DDP, FSDP2 as `accelerate launch` sets it", "as PyTorch", "accelerate",
        "`fsdp=` in its arguments alone: it becomes DDP without a word, as the layout line shows",
    ),
    TriedFramework(
        "torchtitan", "0.2.2", "parallelize_llama: FSDP2, HSDP, DDP, tp with sequence parallelism, FSDP2 × tp, recompute", "as PyTorch", "torchtitan",
        "compiled and asynchronous tensor parallelism",
    ),
    TriedFramework("Lightning", "2.6.6", "DDP", "as PyTorch", not_on_cpu="FSDP: Lightning refuses processes on CPUs"),
    TriedFramework("a plain loop", "", "one device with accumulation, recompute, tied weights", "its modules"),
)  # fmt: skip


def frameworks_page() -> RenderableType:
    """The frameworks as a table, and the patches of each."""
    rows = table("!framework", "version", "recorded and compared", "what a rank holds", "not on a CPU")
    for tried in FRAMEWORKS_TRIED:
        rows.add_row(tried.name, tried.versions, tried.runs, tried.read_from, tried.not_on_cpu)
    patches: dict[str, list[str]] = {}
    for tried in FRAMEWORKS_TRIED:
        if tried.patches:
            patches.setdefault(tried.patches, []).append(tried.name)
    lines = [Text("Replaced by `check record --on-cpu`, and by nothing else:", "bold")]
    lines += [
        Text(f"  {' and '.join(names)} (check/cpu/{file}.py): {'; '.join(patches_of(file))}")
        for file, names in patches.items()
    ]
    return Group(rows, *lines)
