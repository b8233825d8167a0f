"""Collectives as programs: each algorithm is a table of moves, which can be checked, simulated, drawn and run.

    program = build("all-reduce", "ring", ranks=8, elements=1000)
    check(program)                                 # proves it, or raises an error with rank, step and chunk
    walk(program, cluster).makespan                # seconds over the cluster's links
    run_on_arrays(program, inputs)                 # the output of each rank

Read `program` for the representation, then `ring` for the most used algorithm; `formulas` has the closed-form costs.
"""

# Algorithms are listed in the order of these imports, the simplest first.
from meshwright.programs.collectives import (  # noqa: I001
    trees,
    ring,
    recursive,
    exchange,
    bruck,
    double_tree,
    nodes,
    rails,
    switches,
)
from meshwright.programs.collectives.checker import check
from meshwright.programs.collectives.compose import in_sequence, reverse
from meshwright.programs.collectives.contract import OPERATIONS
from meshwright.programs.collectives.program import Program
from meshwright.programs.collectives.registry import ALGORITHMS, accepts, build, groups_of
from meshwright.programs.collectives.walker import Walk, walk

__all__ = [
    "ALGORITHMS", "OPERATIONS", "Program", "Walk", "accepts", "bruck", "build", "check", "double_tree", "exchange", "groups_of",
    "in_sequence", "nodes", "rails", "recursive", "reverse", "ring", "switches", "trees", "walk",
]  # fmt: skip
