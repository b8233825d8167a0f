"""The messages of one rank, to the byte: by hand, and compared with the closed form of the step program if it has no rounding."""

import pytest

from lower.cases import MOE
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.sharding import parameters
from meshwright.describe.workload import Workload
from meshwright.lower.compressed import exchanges
from meshwright.lower.rank import OURS, Given, Routed, traffic_of_rank
from meshwright.lower.step import step_program

ODD = Model(hidden=16, layers=4, heads=4, kv_heads=2, ffn=24, vocab=33)
WORK = Workload(batch=16, seq=32)
LAYER = 16 * 16 * 2 + 2 * 16 * 8 + 3 * 16 * 24 + 2 * 16  # q and o, k and v, the gated network, two norms


def messages(plan, rank=0, model=ODD, work=WORK, element=0.0, **more):
    plan = Plan(param_dtype="fp32", master=False, **plan).check(model, work)
    found = traffic_of_rank(step_program(model, plan, work, OURS, element), plan, rank, **more)
    return {(r.axis, r.collective): (r.count, r.bytes) for r in found}


# By hand


def test_an_indivisible_vocabulary_gives_the_first_ranks_one_more_row():
    embedding, head = 17 * 16, 17 * 16 + 16  # of 33 rows; and the final norm
    layer = 8 * 16 * 2 + 2 * 4 * 16 + 3 * 12 * 16 + 2 * 16
    for rank, less in ((0, 0), (1, 2 * 16)):
        rows = messages({"replicate": 2, "tp": 2}, rank)
        assert rows["dp_cp", "all_reduce"] == (
            1 + 1,
            (4 * layer + embedding + head - less) * 4 + 8,
        )  # and the tokens' count


def test_each_stage_has_separate_buckets():
    first = 33 * 16 + LAYER
    for stages, per_stage in (({}, [first, LAYER]), ({"schedule": "interleaved", "virtual": 2}, None)):
        rows = messages({"replicate": 2, "pp": 4 if not stages else 2, "bucket": 5000, **stages}, 0)
        sizes = [4 * (33 * 16 + LAYER)] if per_stage else [4 * (33 * 16 + LAYER), 4 * LAYER]
        assert rows["dp_cp", "all_reduce"] == (sum(-(-n // 5000) for n in sizes) + 1, sum(sizes) + 8)


def test_zero_units_pad_each_parameter_to_the_ranks():
    work = Workload(batch=9, seq=32)
    rows = messages({"shard": 3, "zero": 3}, work=work)
    rounded = [18 * 16 * 2, 2 * 9 * 16, 2 * 24 * 16, 18 * 24, 2 * 18]  # q and o; k and v; gate and up; down; norms
    n = 4 * sum(rounded) + 2 * 33 * 16 + 18
    assert rows["shard_cp", "all_gather"] == (
        6 * 2 * 3,
        4 * n * 2 * 3,
    )  # six units, twice in each of three micro-batches
    assert rows["shard_cp", "reduce_scatter"] == (6 * 3, 4 * n * 3)
    wrapped = messages({"shard": 3, "zero": 3, "wrap": 3}, work=work)
    assert wrapped["shard_cp", "all_gather"] == (4 * 2 * 3, 4 * n * 2 * 3)  # three layers, one, and the ends
    tied = messages({"shard": 3, "zero": 1}, work=work, model=ODD.but(tied=True))
    assert tied["shard_cp", "all_gather"] == (5, 4 * (n - 33 * 16))  # both ends are one


def test_shards_of_partial_gradients_have_the_rows_of_this_rank():
    rows = [
        messages({"shard": 3, "zero": 1, "tp": 2, "sp": True}, rank, work=Workload(batch=9, seq=32))
        for rank in (0, 2, 4)
    ]
    found = [n["tp", "all_reduce"][1] for n in rows]
    tokens = found[0] - 9 * 6 * 4  # nine norms of 16 in shares of 6, 6 and 4, and what the loss sums
    assert [n - tokens for n in found] == [9 * 6 * 4, 9 * 6 * 4, 9 * 4 * 4]


def test_frozen_parameters_are_gathered_but_not_reduced():
    frozen = frozenset(p.name for p in parameters(ODD, range(4)) if p.name.startswith("layers.1."))
    every, some = (messages({"shard": 2, "zero": 3}, data=Given(frozen=names)) for names in (frozenset(), frozen))
    assert some["shard_cp", "all_gather"] == every["shard_cp", "all_gather"]
    count, n = every["shard_cp", "reduce_scatter"]
    assert some["shard_cp", "reduce_scatter"] == (count - 8, n - 8 * 4 * LAYER)
    gathers = [
        messages({"tp": 2, "sp": True}, data=Given(frozen=names))["tp", "all_gather"] for names in (frozenset(), frozen)
    ]
    assert gathers[0][0] - gathers[1][0] == 2 * 16  # no gradient needs the input of that layer's two regions


@pytest.mark.parametrize(
    ("plan", "key", "spared"),
    [
        ({"tp": 2}, ("tp", "all_reduce"), 2),  # gradients of the inputs of the first layer's two regions
        ({"tp": 2, "sp": True}, ("tp", "all_gather"), 5),  # the embedding's, two outputs' gradients, two inputs again
        ({"cp": 2}, ("cp", "send"), 2),
        ({"shard": 2, "zero": 3}, ("shard_cp", "all_gather"), 1),  # layer 0 was asked for ahead
        ({"shard": 2, "zero": 3, "prefetch": False}, ("shard_cp", "all_gather"), 2),
        ({"tp": 2, "recompute": "full"}, ("tp", "all_reduce"), 3),
        ({"tp": 2, "pp": 2}, ("pp", "send"), 0),
    ],
)
def test_backward_ends_at_the_first_trained_parameter(plan, key, spared):
    frozen = frozenset(p.name for p in parameters(ODD, range(4)) if p.name.startswith(("embedding.", "layers.0.")))
    micro = 16 // plan.get("shard", 1)
    (every, n), (some, less) = (messages(plan, data=Given(frozen=names))[key] for names in (frozenset(), frozen))
    assert every - some == spared * micro
    assert (less < n) == bool(spared)


def test_replicas_average_in_the_configured_step():
    plan = {"replicate": 2, "average_every": 3}
    assert ("replicate", "all_reduce") not in messages(plan, data=Given(step=2))
    total = int(ODD.total)
    assert messages(plan, data=Given(step=3))["replicate", "all_reduce"] == (1, 4 * (total + 1))


def test_a_split_backward_gathers_twice_on_all_stages_but_the_first():
    plain, split = (
        [messages({"tp": 2, "sp": True, "pp": 2, "schedule": s}, rank)["tp", "all_gather"] for rank in (0, 2)]
        for s in ("1f1b", "zb-h1")
    )
    assert split[0] == plain[0]
    assert split[1][0] - plain[1][0] == 16 * (2 * 2 + 1)  # two regions of two layers, and the head's


def test_routing_is_even_unless_given():
    plan, n = {"replicate": 2, "ep": 2}, 4 * MOE.hidden
    layers = range(MOE.layers)
    even = messages(plan, model=MOE)["ep", "all_to_all"]
    copies = 32 * MOE.top_k
    same = {layer: [Routed(copies, copies, copies, copies)] * 8 for layer in layers}
    assert (
        messages(plan, model=MOE, data=Given(routed=same), element=4.0)["ep", "all_to_all"]
        == messages(plan, model=MOE, element=4.0)["ep", "all_to_all"]
    )
    more = {
        **same,
        0: [Routed(copies - 9, copies + 3, copies, copies)] * 8,
    }  # what it says of copies sent cannot be: none is dropped
    got = messages(plan, model=MOE, data=Given(routed=more), element=4.0)["ep", "all_to_all"]
    assert got == (
        even[0],
        messages(plan, model=MOE, element=4.0)["ep", "all_to_all"][1] + 2 * 8 * 3 * n,
    )  # there and back


def test_ranks_with_parts_of_an_operand_reduce_its_scale():
    work = WORK.but(precision="fp8")
    wide, fp8 = (messages({"tp": 2, "cp": 2}, work=w, element=2.0)["tp", "all_reduce"] for w in (WORK, work))
    assert fp8[0] - wide[0] == 16 * 4 * 7 * 2  # seven products a layer, forward and backward
    assert fp8[1] - wide[1] == 16 * 4 * 7 * (8 + 4)
    plain, split = (
        [messages({"tp": 2, "pp": 2, "schedule": s}, rank, work=work)["tp", "all_reduce"][0] for rank in (0, 2)]
        for s in ("1f1b", "zb-h1")
    )
    assert [b - a for a, b in zip(plain, split, strict=True)] == [0, 16 * 2 * 7]  # of the gradient in I and in W


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("bf16", {"all_reduce": 200}),
        ("int8", {"all_to_all": 4 * (26 + 4), "all_gather": 4 * (26 + 4)}),
        ("int4", {"all_to_all": 4 * (13 + 4), "all_gather": 4 * (13 + 4)}),
        ("top-k", {"all_gather": 4 * 1 * 8}),
        ("random-k", {"all_reduce": 4}),
        ("powersgd", {"all_reduce": 4 * (2 * 10 + 2 * 10)}),
    ],
)
def test_sizes_of_compressed_messages(name, sizes):
    plan = Plan(replicate=4, compression=name, compression_ratio=0.005, compression_rank=2)
    found: dict[str, float] = {}
    for operation, n in exchanges(plan, 100, 4, [(10, 10)], 4):
        found[operation] = found.get(operation, 0.0) + n
    assert found == sizes
