"""What is costed but not run is refused before any rank starts, with the way back; each model has its table."""

import pytest
from meshwright.parallel.supported import check_supported

from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.parallel.tensor.tables import LLAMA, TABLES, phi3, table_of

MODEL = Model(hidden=16, layers=4, heads=4, kv_heads=2, ffn=24, vocab=32)


@pytest.mark.parametrize(
    "plan",
    [{"tp": 3, "tp_form": "all-gather"}, {"tp": 5, "tp_form": "all-gather"}],
)
def test_refused_with_a_fix(plan):
    with pytest.raises(MeshwrightError, match="MW-PAR-001") as error:
        check_supported(MODEL, Plan(**plan))
    assert error.value.fix.startswith("--set plan.")
    assert error.value.why


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"tp": 2, "sp": True},
        {"shard": 2, "zero": 3, "reduce": "microbatch"},
        {"tp": 4},
        {"tp": 2, "tp_form": "all-gather"},
        {"offload": "activations", "tp": 2, "sp": True},
        {"tp": 3},
        {"replicate": 2, "reduce": "microbatch"},
        {"pp": 2, "reduce": "microbatch"},
        {"replicate": 2, "pp": 2, "reduce": "microbatch"},
        {"shard": 2, "zero": 3, "pp": 2, "reduce": "microbatch"},
        {"shard": 2, "cp": 2, "zero": 3, "pp": 2, "reduce": "microbatch"},
        {"cp": 2, "zero": 3, "pp": 2, "reduce": "microbatch"},
    ],
)
def test_accepted(plan):
    check_supported(MODEL, Plan(**plan))


def test_an_mlp_has_no_sequence_and_odd_columns_do_not_divide():
    mlp, odd = Model(kind="mlp", hidden=15, layers=2), Model(hidden=15, layers=2, heads=3, ffn=24, vocab=32)
    for model, plan, field in (
        (mlp, {"tp": 2, "sp": True}, "sp"),
        (odd, {"tp": 2, "tp_form": "all-gather"}, "tp_form"),
    ):
        with pytest.raises(MeshwrightError, match=f"MW-PAR-001: plan.{field}="):
            check_supported(model, Plan(**plan))
    for model, plan in (
        (mlp, {"tp": 2}),
        (mlp, {"sp": True}),
        (mlp, {"tp": 2, "tp_form": "all-gather"}),
        (odd, {"tp": 2, "sp": True}),
    ):
        check_supported(model, Plan(**plan))


def test_each_kind_of_model_has_its_table():
    latent = {"attention": "mla", "kv_heads": 0, "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 5}
    assert table_of(MODEL) is TABLES["transformer"]
    assert table_of(MODEL.but(**latent)) is TABLES["mla"]
    assert table_of(Model(kind="mlp", hidden=16, layers=2)) is TABLES["mlp"]
    assert {name.rpartition(".")[2] for name, _ in LLAMA} - {name.rpartition(".")[2] for name, _ in phi3(4, 2)} == {
        "q_proj",
        "[kv]_proj",
        "gate_proj",
        "up_proj",
    }
