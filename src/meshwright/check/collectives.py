"""Every collective of a process, in order: its operation, group and bytes, forward and backward."""

from typing import Any

import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
OPERATIONS = {
    "allreduce": "all_reduce", "allreduce_": "all_reduce", "all_reduce": "all_reduce", "all_reduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce", "all_reduce_coalesced": "all_reduce",
    "_allgather_base_": "all_gather", "allgather_": "all_gather", "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather", "allgather_into_tensor_coalesced_": "all_gather", "all_gather_into_tensor_out": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter", "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all", "alltoall_base_": "all_to_all", "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast", "broadcast": "broadcast", "reduce_": "reduce", "gather_": "gather", "scatter_": "scatter",
    "send": "send", "recv_": "receive", "recv_any_source_": "receive", "barrier": "barrier",
}  # fmt: skip


class CollectiveLog(TorchDispatchMode):
    """While it is started, notes each collective as {operation, group, bytes, elements, backward}; `groups` are the ranks of each group."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []
        self.groups: dict[str, list[int]] = {}
        self.started = False
        self.quiet = False  # while the recorder itself communicates

    def start(self) -> None:
        if not self.started:
            self.started = True
            self.__enter__()

    def stop(self) -> None:
        """Leave, if no other mode was entered since."""
        if self.started and torch.utils._python_dispatch._get_current_dispatch_mode() is self:
            self.started = False
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.namespace in NAMESPACES and not self.quiet:
            operation = OPERATIONS.get(func._schema.name.partition("::")[2])
            if operation is not None:
                self.note(operation, args, kwargs or {}, func.namespace != "c10d")
        return func(*args, **(kwargs or {}))

    def note(self, operation: str, args: tuple, kwargs: dict[str, Any], functional: bool) -> None:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        group = next((name for leaf in leaves if (name := group_name(leaf))), "")
        if group and group not in self.groups:
            self.groups[group] = ranks_of(group)
        largest = max(tensors, key=torch.Tensor.numel, default=None)
        elements = 0 if largest is None else largest.numel()
        if functional and operation == "all_gather":  # its output is no argument
            elements *= len(self.groups.get(group, ())) or 1
        size = 0 if largest is None else elements * largest.element_size()
        backward = torch._C._current_graph_task_id() != -1
        row = {"operation": operation, "group": group, "bytes": size, "elements": elements, "backward": backward}
        self.seen.append(row)


def group_name(leaf: Any) -> str:
    """The name of a group, if an argument is one: a name of functional collectives, or a boxed process group."""
    if isinstance(leaf, str):
        return leaf if leaf in known_groups() else ""
    if isinstance(leaf, torch.ScriptObject):
        try:
            return str(distributed.ProcessGroup.unbox(leaf).group_name)
        except (RuntimeError, TypeError):
            return ""
    return str(leaf.group_name) if isinstance(leaf, distributed.ProcessGroup) else ""


def known_groups() -> dict[str, Any]:
    groups = distributed.distributed_c10d._world.pg_group_ranks
    return {group.group_name: ranks for group, ranks in groups.items() if isinstance(group, distributed.ProcessGroup)}


def ranks_of(name: str) -> list[int]:
    return sorted(known_groups().get(name, {}))
