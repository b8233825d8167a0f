"""The instructions of a rank, and arguments that no builder takes."""

import pytest

from meshwright.errors import MeshwrightError
from meshwright.programs.collectives import accepts, build
from meshwright.programs.collectives.lists import instructions


def test_a_rank_reads_its_list():
    lines = [str(i) for i in instructions(build("all-reduce", "ring", 2, 4), rank=0)]
    assert lines == [
        "step 0: send chunk 1 to rank 1",
        "step 0: reduce chunk 0 from rank 1",
        "step 1: send chunk 0 to rank 1",
        "step 1: receive chunk 1 from rank 1",
    ]
    assert str(instructions(build("scatter", "binomial", 4, 8), rank=0)[0]) == "step 0: send chunks 2 to 3 to rank 2"


def test_bad_arguments_give_clear_errors():
    for arguments, words in [
        (("all-reduce", "rings", 4, 8), "Fix: ring"),
        (("allreduce", "ring", 4, 8), "Fix: all-reduce"),
        (("all-reduce", "ring", 0, 8), "ranks = 0"),
        (("all-reduce", "ring", 10**9, 8), "ranks = 1000000000"),
        (("all-reduce", "ring", 4, -1), "elements = -1"),
        (("all-reduce", "ring", 4, 2.5), "elements = 2.5"),
    ]:
        with pytest.raises(MeshwrightError, match=words):
            build(*arguments)
    with pytest.raises(MeshwrightError, match="option of ring all-reduce 'root'"):
        build("all-reduce", "ring", 4, 8, root=1)
    with pytest.raises(MeshwrightError, match="root = 4"):
        build("broadcast", "naive", 4, 8, root=4)
    assert accepts("broadcast", "chain") == ["root", "segments"]
