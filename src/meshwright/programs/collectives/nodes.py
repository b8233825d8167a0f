"""Node-aware algorithms: they use the fast links inside a node and send less over the slow links between nodes.

**Hierarchical all-reduce**, the textbook form: all-reduce inside every node, all-reduce between one leader of each
node, broadcast inside every node. With g ranks in each of N nodes, α' and β' between nodes:

    T = 2(g−1)(α + n/g·β) + 2(N−1)(α' + n/N·β') + ⌈log₂g⌉(α + nβ)

The slow links carry 2(N−1) messages instead of 2(P−1) with a flat ring. But the leader sends 2(N−1)/N·n bytes through
its one network card while the other cards of the node are idle. A flat ring whose order follows the nodes sends about
as many bytes through one card of each node.

**Two-level**: reduce-scatter inside every node, all-reduce of each shard between the ranks with the same *local rank*
(`place`) in each node, and all-gather inside every node. Every card transfers 1/g of the buffer:

    T = 2(g−1)(α + n/g·β) + 2(N−1)(α' + n/(gN)·β')

Nodes may have different sizes: in a small node of g ranks, local rank l also takes the role of the missing local ranks
l+g, l+2g, ….

**Two-level all-to-all**: first exchange inside the node, so that the rank with the receiver's local rank holds all
blocks for that local rank. Then exchange between ranks of equal local rank, g blocks per message:
(g−1)(α + n/g·β) + (N−1)(α' + n/N·β'), with N−1 instead of (N−1)g slow messages.
"""

import numpy as np

from meshwright.programs.collectives import ring
from meshwright.programs.collectives.compose import composition, dual, grid, in_turn, relabelled, together
from meshwright.programs.collectives.contract import collective
from meshwright.programs.collectives.program import Array, Moves, Program, moves
from meshwright.programs.collectives.registry import Groups, algorithm
from meshwright.programs.collectives.trees import binomial_broadcast


@algorithm("all-reduce", "hierarchical")
def hierarchical_all_reduce(ranks: int, elements: int, groups: Groups = ()) -> Program:
    """All-reduce inside nodes, all-reduce between the leaders, broadcast inside nodes."""
    sizes, edges = grid(elements, {1, len(groups), *(len(group) for group in groups)})

    def inside(group: tuple[int, ...]) -> Moves:
        return relabelled(ring.all_reduce(len(group), elements).moves, group, edges[len(group)])

    def spread(group: tuple[int, ...]) -> Moves:
        return relabelled(binomial_broadcast(len(group), elements).moves, group, edges[1])

    if len(groups) == 1:
        table = inside(groups[0])
    else:
        leaders = [group[0] for group in groups]
        between = relabelled(ring.all_reduce(len(groups), elements).moves, leaders, edges[len(groups)])
        local, down = together([inside(g) for g in groups]), together([spread(g) for g in groups])
        table = in_turn(local, between, down)
    return collective("all-reduce", ranks, elements, table, sizes=sizes, groups=groups)


@algorithm("all-gather", "two-level")
def two_level_all_gather(ranks: int, elements: int, groups: Groups = ()) -> Program:
    """A ring between nodes for each local rank; then a ring inside each node forwards all chunks that its ranks hold."""
    node, place, at = coordinates(groups)
    nodes, chunk = len(groups), np.arange(ranks)
    hop = np.arange(nodes - 1)[:, None]
    source, target = (at[(node + hop + k) % nodes, place] for k in (0, 1))
    between = moves(hop, source, target, chunk)
    local = []
    for group in groups:
        g, members = len(group), np.asarray(group)
        hop = np.arange(g - 1)[:, None]
        source, target = (members[(place + hop + k) % g] for k in (0, 1))
        local.append(moves(hop, source, target, chunk))
    table = in_turn(between, together(local))
    return collective("all-gather", ranks, elements, table, groups=groups)


two_level_reduce_scatter = dual("reduce-scatter", "two-level", two_level_all_gather)
two_level_all_reduce = composition(
    "all-reduce", "two-level", two_level_reduce_scatter, two_level_all_gather, options=("groups",)
)


@algorithm("all-to-all", "two-level")
def two_level_all_to_all(ranks: int, elements: int, groups: Groups = ()) -> Program:
    """Inside nodes to the rank with the receiver's local rank, then between nodes at equal local rank; pairwise both times."""
    node, place, at = coordinates(groups)
    size = np.array([len(group) for group in groups])[node]
    source, target = np.nonzero(~np.eye(ranks, dtype=bool))
    block = source * ranks + target
    mate = np.where(node[source] == node[target], target, at[node[source], place[target]])
    first, second = mate != source, mate != target
    distance = (place[mate] - place[source]) % size[source]
    inside = moves(distance[first] - 1, source[first], mate[first], block[first])
    distance = (node[target] - node[source]) % len(groups)
    between = moves(distance[second] - 1, mate[second], target[second], block[second])
    return collective("all-to-all", ranks, elements, in_turn(inside, between), groups=groups)


def coordinates(groups: Groups) -> tuple[Array, Array, Array]:
    """Return the node and local rank (place) of each rank, and the rank at each (node, place); small nodes repeat their ranks."""
    ranks, width = sum(map(len, groups)), max(map(len, groups))
    node, place = np.zeros((2, ranks), dtype=np.int64)
    for k, group in enumerate(groups):
        node[list(group)], place[list(group)] = k, np.arange(len(group))
    return node, place, np.array([np.resize(group, width) for group in groups])
