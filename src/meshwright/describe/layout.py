"""The layout: which ranks form the groups of every axis, and which level of the cluster each group spans.

Ranks are numbered with the first axis of the order running fastest. With order tp, cp, pp, dp a rank is

    rank = tp_i + tp · (cp_i + cp · (pp_i + pp · (shard_i + shard · replicate_i)))

so the group of an axis is an arithmetic progression: `size` ranks, `stride` apart. An example (tp 2, pp 2, dp 2)
gives tp groups {0,1} {2,3} …, pp groups {0,2} {1,3} …, dp groups {0,4} {1,5} ….

`describe.axes` defines the axes and counts their groups without listing them; here every rank is listed. Experts re-factorise the ranks of one
stage, taken in order: expert_tp fastest, then ep, then expert_dp. ZeRO shards experts over `expert_shard`, the part of expert_dp that lies inside
one shard group, and repeats that over `expert_replicate`.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshwright.describe.axes import BASE, DERIVED, axis_size, base_axes, strides
from meshwright.describe.cluster import Cluster
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError, unknown

MOST_RANKS = 2**22  # every rank is listed: keeps hostile plans within memory


@dataclass(frozen=True)
class Layout:
    plan: Plan
    order: tuple[str, ...] = ("tp", "cp", "pp", "dp")

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Base axes, fastest first; dp is shard, then replicate."""
        return base_axes(self.plan.order or self.order)

    @cached_property
    def grid(self) -> np.ndarray:
        """Ranks indexed [slowest axis, …, fastest axis]."""
        if self.plan.world > MOST_RANKS:
            raise MeshwrightError(
                "MW-PLAN-021", f"a layout of {self.plan.world:,} ranks", why=f"At most {MOST_RANKS:,}"
            )
        sizes = [getattr(self.plan, a) for a in self.axes]
        return np.arange(self.plan.world).reshape(sizes[::-1])

    def size(self, axis: str) -> int:
        """Ranks in one group of an axis."""
        if axis not in (*BASE, *DERIVED):
            raise unknown("MW-PLAN-020", "axis", axis, (*BASE, *DERIVED))
        return int(axis_size(self.plan, axis))

    def stride(self, axis: str) -> int:
        """Distance between neighbours on a base axis."""
        if axis not in BASE:
            raise unknown("MW-PLAN-020", "axis", axis, BASE)
        return int(strides(self.plan, self.plan.order or self.order)[axis])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank on every base axis."""
        out = {}
        for a in self.axes:
            rank, out[a] = divmod(rank, getattr(self.plan, a))
        return out

    def groups(self, axis: str) -> np.ndarray:
        """Ranks of every group of an axis: [group, member], members in axis order, groups by their first rank."""
        if axis == "world":
            return np.arange(self.plan.world)[None, :]
        if axis == "stage" or axis.startswith(("ep", "expert")):
            return self._expert_groups(axis)
        joined = {"dp": ("shard", "replicate"), "dp_cp": ("cp", "shard", "replicate"), "shard_cp": ("cp", "shard")}
        wanted = joined.get(axis, (axis,))
        self.size(axis)
        slow_first = self.axes[::-1]
        keep = [i for i, a in enumerate(slow_first) if a not in wanted]
        move = [i for i, a in enumerate(slow_first) if a in wanted]
        members = int(np.prod([self.grid.shape[i] for i in move], dtype=int))
        return self.grid.transpose(*keep, *move).reshape(-1, members)

    def _expert_groups(self, axis: str) -> np.ndarray:
        slow_first = self.axes[::-1]
        pp = slow_first.index("pp")
        stage_ranks = np.moveaxis(self.grid, pp, 0).reshape(self.plan.pp, -1)
        if axis == "stage":
            return stage_ranks
        self.size(axis)
        data = ("expert_dp",) if axis == "expert_dp" else ("expert_replicate", "expert_shard")
        shape = (self.plan.pp, *map(self.size, data), self.plan.ep, self.plan.etp)
        cube = stage_ranks.reshape(shape)
        which = {"expert_dp": 1, "expert_replicate": 1, "expert_shard": 2, "ep": 3, "expert_tp": 4}[axis]
        groups = np.moveaxis(cube, which, -1).reshape(-1, shape[which])
        return groups[np.argsort(groups[:, 0], kind="stable")]

    def group_of(self, axis: str, rank: int) -> list[int]:
        groups = self.groups(axis)
        return groups[(groups == rank).any(axis=1)][0].tolist()

    def level(self, axis: str, cluster: Cluster) -> int:
        """The highest level any group of the axis spans."""
        groups = self.groups(axis)
        ends = zip(groups.min(1).tolist(), groups.max(1).tolist(), strict=True)
        return max(cluster.level_between(a, b) for a, b in ends)

    def per_unit(self, axis: str, span: int) -> int:
        """Most members of one group inside one unit of `span` consecutive devices."""
        units = self.groups(axis) // span
        return int(max(np.unique(row, return_counts=True)[1].max() for row in units[:4096]))

    def flows(self, axis: str, cluster: Cluster) -> int:
        """The number of groups of an axis that cross the boundary of one node: they share its network cards."""
        groups = self.groups(axis)
        nodes = groups // cluster.node_size
        crossing = nodes.min(1) != nodes.max(1)
        if not crossing.any():
            return 0
        return max(Counter(node for row in nodes[crossing].tolist() for node in set(row)).values())
