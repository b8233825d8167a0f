"""The guide, parts 2 to 4: bytes and times of collectives, from walking their programs."""

import math

import numpy as np

from figures.cases import MB, POINT, slow_steps, walked
from figures.figure import Figure, Row, rows
from meshwright.programs.collectives import build
from meshwright.programs.collectives.arrays import run_on_arrays

holds, _, convention, wrong = rows("guide")
AT = "P = 8, n = 80 MB, α = 5 µs, 50 GB/s"


def basics() -> list[Figure]:
    ranks = 4
    own = [[10.0 * r] for r in range(ranks)]
    buffer = np.arange(0.0, 10.0 * ranks, 10.0)
    nothing = np.zeros(0)
    scattered = run_on_arrays(build("scatter", "binomial", ranks, ranks), [buffer, nothing, nothing, nothing])
    gathered = run_on_arrays(build("gather", "binomial", ranks, ranks), own)
    broadcast = run_on_arrays(build("broadcast", "binomial", ranks, 3), [np.array([1.0, 2.0, 3.0])] + [nothing] * 3)
    n, p = POINT[1], POINT[0]
    reduce = build("reduce", "binomial", p, int(n) // 4)
    shards = build("reduce-scatter", "ring", ranks, 4000)
    # fmt: off
    return [
        holds("2.2", "after broadcast all ranks have [1.0, 2.0, 3.0]", "4", sum(np.array_equal(x, [1, 2, 3]) for x in broadcast), "ranks"),
        holds("2.2", "naive broadcast sends n × (P−1)", (p - 1) * n / MB, walked("broadcast", "naive").sent[0] / MB, "MB", "root, 80 MB, P = 8"),
        holds("2.2", "optimal broadcast sends n", n / MB, walked("broadcast", "chain").sent[0] / MB, "MB", "a pipelined chain's root"),
        holds("2.3", "reduce computes (P−1) × n operations", (p - 1) * n / 4e6, reduce.moved[reduce.moves.reduce].sum() / 1e6, "M additions"),
        holds("2.4", "scatter: rank r receives [10·r]", "4", sum(np.array_equal(x, [10.0 * r]) for r, x in enumerate(scattered)), "ranks"),
        holds("2.4", "scatter moves n × (P−1) bytes from the root, n a rank", 7 * n / 8 / MB, walked("scatter", "naive").sent[0] / MB, "MB"),
        holds("2.5", "gather: rank 0 has 0, 10, 20, 30", "30", gathered[0][-1], ""),
        holds("4.1", "all-gather: P ranks of 1000 end with P × 1000", "4000", build("all-gather", "ring", ranks, 4000).sizes.sum(), "elements",
              "P = 4"),
        holds("4.2", "reduce-scatter: rank 0 gets elements [0:1000] of 4000", "1000", shards.sizes[0], "elements"),
        holds("2.5", "gather moves n × (P−1) bytes to the root", 7 * n / 8 / MB, walked("gather", "naive").sent[1:].sum() / MB, "MB"),
    ]
    # fmt: on


def all_reduce() -> list[Figure]:
    p, n, alpha, rate = POINT
    log, beta, share = math.log2(p), 1 / rate, (p - 1) / p
    ring = walked("all-reduce", "ring")
    tree = build("reduce", "binomial", p, int(n) // 4)
    flat = build("all-reduce", "ring", 64, 6400)
    groups = [list(range(8 * k, 8 * k + 8)) for k in range(8)]
    nested = build("all-reduce", "hierarchical", 64, 6400, groups=groups)
    naive = 2 * (p - 1) * (alpha + n * beta)
    phase = "one of the two phases of an all-reduce; the sentence before counts both"
    rabenseifner = 2 * log * alpha + 2 * share * n * beta
    # fmt: off
    return [
        holds("3.1", "naive: 2(P−1)α + 2(P−1)nβ", naive * 1e3, walked("all-reduce", "naive").makespan * 1e3, "ms", AT),
        holds("3.2", "tree: 2log₂P·α + 2log₂P·nβ", 2 * log * (alpha + n * beta) * 1e3, walked("all-reduce", "tree").makespan * 1e3, "ms", AT),
        holds("3.2", "tree reduce takes log₂P steps", log, tree.steps, "steps", "P = 8"),
        holds("3.2", "tree reduce moves (P−1)n in total", (p - 1) * n / MB, 4 * tree.moved.sum() / MB, "MB"),
        holds("3.3", "ring: 2(P−1)α + 2(P−1)/P·nβ", (2 * (p - 1) * alpha + 2 * share * n * beta) * 1e3, ring.makespan * 1e3, "ms", AT),
        holds("3.3", "ring: 2(P−1) steps", 2 * (p - 1), ring.steps, "steps"),
        holds("3.3", "ring: each link carries 2n(P−1)/P", 2 * share * n / MB, ring.sent[0] / MB, "MB"),
        holds("3.4", "halving-doubling: 2log₂P·α + 2(P−1)/P·nβ", rabenseifner * 1e3, walked("all-reduce", "halving-doubling").makespan * 1e3,
              "ms", AT),
        holds("3.6", "flat ring on 64 GPUs: 2×63 steps", "126", flat.steps, "steps"),
        convention("3.6", "… of which the slow link sees ~63", "63", slow_steps(flat, 8), "steps", phase, slow_steps(flat, 8) / 2,
                   "every step of a ring crosses every link"),
        convention("3.6", "hierarchical: the slow link sees only N−1 = 7 steps", "7", slow_steps(nested, 8), "steps", phase, slow_steps(nested, 8) / 2,
                   "if the ring visits the nodes one after another, both algorithms send the same bytes through a node's network cards"),
        holds("3.6", "hierarchical: 2×7 slow steps", "14", slow_steps(nested, 8), "steps"),
    ]
    # fmt: on


def complexity() -> list[Figure]:
    """The table of 4.4, where n is the *shard*: a rank of P starts or ends with n, the whole is nP."""
    p, whole, alpha, rate = POINT
    shard, beta, log = whole / p, 1 / rate, math.log2(p)
    remark = (
        "by the sizes in its own table (nP → n) the term is (P−1)nβ; the printed one needs n to be the whole buffer"
    )

    def row(
        verdict: Row, name: str, claim: str, seconds: float, operation: str, algorithm: str, note: str = ""
    ) -> Figure:
        return verdict(
            "4.4", f"{name}: {claim}", seconds * 1e3, walked(operation, algorithm).makespan * 1e3, "ms", note
        )

    a = log * alpha
    # fmt: off
    return [
        row(wrong, "broadcast, binomial tree", "log₂P·α + nβ", a + whole * beta, "broadcast", "binomial",
            "every round of a binomial tree sends all of n: log₂P(α + nβ); also 5.2"),
        row(wrong, "reduce, binomial tree", "log₂P·α + nβ", a + whole * beta, "reduce", "binomial", "log₂P(α + nβ); also 5.2"),
        row(wrong, "scatter", "log₂P·α + (P−1)/P·nβ", a + 7 / 8 * shard * beta, "scatter", "binomial", remark),
        row(wrong, "gather", "log₂P·α + (P−1)/P·nβ", a + 7 / 8 * shard * beta, "gather", "binomial", remark),
        row(holds, "all-reduce", "2log₂P·α + 2(P−1)/P·nβ", 2 * a + 14 / 8 * whole * beta, "all-reduce", "halving-doubling"),
        row(holds, "all-gather", "log₂P·α + (P−1)/P·nPβ", a + 7 * shard * beta, "all-gather", "recursive-doubling"),
        row(holds, "all-gather, ring (4.1)", "(P−1)α + (P−1)nβ", 7 * alpha + 7 * shard * beta, "all-gather", "ring"),
        row(wrong, "reduce-scatter", "log₂P·α + (P−1)/P·nβ", a + 7 / 8 * shard * beta, "reduce-scatter", "recursive-halving", f"{remark}; also 5.2"),
        row(wrong, "all-to-all", "(P−1)α + (P−1)/P·nβ", 7 * alpha + 7 / 8 * shard * beta, "all-to-all", "pairwise", f"{remark}; also 5.2"),
        holds("4.4", "all-to-all has the worst latency, (P−1)α", 7 * alpha * 1e6,
              walked("all-to-all", "pairwise", (8, 0, alpha, rate)).makespan * 1e6, "µs",
              "for the pairwise algorithm that the table names; Bruck's algorithm needs log₂P messages, 15 µs"),
        holds("4.4", "all-reduce moves 2 × what reduce-scatter moves", "2",
              walked("all-reduce", "ring").sent[0] / walked("reduce-scatter", "ring").sent[0], "×"),
    ]
    # fmt: on


def table() -> list[Figure]:
    return [*basics(), *all_reduce(), *complexity()]
