"""The mesh: the ranks of `describe.Layout` as a torch `DeviceMesh`, and a process group for every axis.

The mesh has a dimension for each axis of more than one rank, slowest first, so its groups are the layout's groups. A few
more groups are created where they are needed:

    dp          shard and replicate together: plain data parallelism reduces over it, and tokens are counted over it
    ends        the first and the last stage of each pipeline: tied embeddings sum their gradient over it
    kv_copies   runs of tp ranks that hold the same KV head, where there are fewer heads than ranks
    dp_cp,      under context parallelism, the ranks over which gradients are reduced and ZeRO shards: separate
    shard_cp    communicators even where their ranks are those of `cp`, so that keys and values that backward waits for
                never queue behind gradients

The mesh is passed as an argument; nothing here is global.
"""

from functools import cached_property

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from meshwright.describe.layout import Layout
from meshwright.describe.sharding import KV_COPIES
from meshwright.errors import MeshwrightError

ON_DEMAND = ("ep", "expert_tp", "expert_dp", "expert_shard", "expert_replicate", "stage")  # for models with experts


class Mesh:
    """This rank's index and its group on every axis. A group of one rank is None: nothing is sent."""

    def __init__(self, layout: Layout, rank: int, device: str = "cpu") -> None:
        world = distributed.get_world_size()
        if layout.plan.world != world:
            raise MeshwrightError(
                "MW-MESH-001",
                f"the plan needs {layout.plan.world} ranks and {world} were started",
                why=f"{layout.plan.title()}",
            )
        self.layout, self.rank, self.device = layout, rank, device
        self.coordinates = layout.coordinates(rank)
        self._made: dict[str, distributed.ProcessGroup | None] = {}
        wide = [i for i, axis in enumerate(layout.axes[::-1]) if layout.size(axis) > 1]
        names = tuple(layout.axes[::-1][i] for i in wide)
        self.device_mesh: DeviceMesh | None = None
        if names:
            grid = torch.from_numpy(layout.grid).reshape([layout.grid.shape[i] for i in wide])
            self.device_mesh = DeviceMesh(torch.device(device).type, grid, mesh_dim_names=names)
        if layout.plan.shard > 1 and layout.plan.replicate > 1:
            self._made["dp"] = self.new_groups(layout.groups("dp").tolist())
        if layout.plan.cp > 1:
            for axis in ("shard_cp", "dp_cp") if self.sharded else ("dp_cp",):
                same = axis == "dp_cp" and self.sharded and layout.plan.replicate == 1
                self._made[axis] = self._made["shard_cp"] if same else self.new_groups(layout.groups(axis).tolist())

    def size(self, axis: str) -> int:
        return self.layout.size(axis)

    def index(self, axis: str) -> int:
        """This rank's index in its group."""
        at = self.coordinates
        if axis == "dp":
            return at["replicate"] * self.layout.plan.shard + at["shard"]
        return at[axis] if axis in at else self.layout.group_of(axis, self.rank).index(self.rank)

    def group(self, axis: str) -> distributed.ProcessGroup | None:
        if axis == "world":
            return distributed.group.WORLD if self.size("world") > 1 else None
        if axis in self._made:
            return self._made[axis]
        if axis in ("dp_cp", "shard_cp"):  # without context parallelism the same as dp and shard
            axis = axis.removesuffix("_cp")
            return self.group(axis) if self.size("cp") == 1 else None
        if axis in (*ON_DEMAND, KV_COPIES):
            return None
        if axis == "dp":
            axis = "shard" if self.layout.plan.shard > 1 else "replicate"
        if self.size(axis) == 1 or self.device_mesh is None:
            return None
        return self.device_mesh.get_group(axis)

    def groups(self, *axes: str) -> list[distributed.ProcessGroup]:
        """The groups of those axes that have more than one rank."""
        return [group for group in map(self.group, axes) if group is not None]

    def add(self, axis: str) -> distributed.ProcessGroup | None:
        """Create the groups of an axis of `ON_DEMAND`; a collective of all ranks. They are separate communicators even where
        another axis has the same ranks: tokens sent to an expert must not queue behind gradients."""
        if axis not in self._made:
            self._made[axis] = self.new_groups(self.layout.groups(axis).tolist()) if self.size(axis) > 1 else None
        return self._made[axis]

    def add_copies(self, count: int) -> distributed.ProcessGroup | None:
        """Create the groups of ranks that hold the same KV head, `count` neighbours in a tp group; a collective of all ranks."""
        if count > 1 and KV_COPIES not in self._made:
            runs = self.layout.groups("tp").reshape(-1, count).tolist()
            self._made[KV_COPIES] = self.group("tp") if count == self.size("tp") else self.new_groups(runs)
        return self._made.get(KV_COPIES)

    def set_copies(self, group: distributed.ProcessGroup) -> None:
        """Name the group of ranks that hold the same KV head, where the split of a module made it."""
        self._made.setdefault(KV_COPIES, group)

    @cached_property
    def expert_sharding(self) -> DeviceMesh | None:
        """The mesh over which ZeRO shards experts; None where each expert is on at most one rank of a shard group."""
        if self.size("expert_shard") == 1 or not self.sharded:
            return None
        names = ("expert_group", "expert_replicate", "expert_shard")
        shape = (-1, self.size(names[1]), self.size(names[2]))
        grid = torch.from_numpy(self.layout.groups("expert_dp")).reshape(shape)
        whole = DeviceMesh(torch.device(self.device).type, grid, mesh_dim_names=names)
        for axis in names[1:]:
            self._made[axis] = whole.get_group(axis) if self.size(axis) > 1 else None
        return whole[names[1:]] if self.size(names[1]) > 1 else whole[names[2]]

    @cached_property
    def ends(self) -> distributed.ProcessGroup | None:
        """The group of this pipeline's first and last rank, None on the ranks between; created by a collective of all ranks."""
        if self.size("pp") == 1:
            return None
        return self.new_groups([[int(row[0]), int(row[-1])] for row in self.layout.groups("pp")])

    @property
    def sharded(self) -> bool:
        """Whether ZeRO has ranks to shard over; ranks of context parallelism count, since they hold the same weights."""
        return self.layout.plan.zero > 0 and self.size("shard_cp") > 1

    def sharding(self) -> DeviceMesh:
        """The mesh over which ZeRO shards: the shard axis (and cp), within the replicate axis where there is one."""
        assert self.device_mesh is not None
        hybrid = self.layout.plan.replicate > 1
        if self.size("cp") > 1:
            kind, shards, replicas = torch.device(self.device).type, self.group("shard_cp"), self.group("replicate")
            assert shards is not None
            if replicas is None:
                return DeviceMesh.from_group(shards, kind, mesh_dim_names=("shard_cp",))
            rows = [self.layout.group_of("shard_cp", r) for r in self.layout.group_of("replicate", self.rank)]
            return DeviceMesh.from_group([replicas, shards], kind, rows, mesh_dim_names=("replicate", "shard_cp"))
        return self.device_mesh["replicate", "shard"] if hybrid else self.device_mesh["shard"]

    def new_groups(self, groups: list[list[int]]) -> distributed.ProcessGroup | None:
        """Make these groups, on all ranks at once; returns the one this rank is in."""
        member_group = None
        for members in groups:
            made = distributed.new_group(members)
            if self.rank in members:
                member_group = made
        return member_group
