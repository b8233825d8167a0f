"""What is costed but not run is refused before any rank starts, with the way back."""

import pytest

from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.parallel.supported import check_supported

MODEL = Model(hidden=16, layers=4, heads=4, kv_heads=2, ffn=24, vocab=32)


@pytest.mark.parametrize(
    "plan",
    [{"tp": 3, "tp_form": "all-gather"},
     {"replicate": 2, "pp": 2, "reduce": "microbatch"}, {"replicate": 2, "pp": 2, "zero": 1, "reduce": "microbatch"},
     {"cp": 2, "pp": 2, "reduce": "microbatch"}],
)  # fmt: skip
def test_refused_with_a_fix(plan):
    with pytest.raises(MeshwrightError, match="MW-PAR-001") as error:
        check_supported(MODEL, Plan(**plan))
    assert error.value.fix.startswith("--set plan.")
    assert error.value.why


@pytest.mark.parametrize("plan", [
    {}, {"tp": 2, "sp": True}, {"shard": 2, "zero": 3, "reduce": "microbatch"}, {"tp": 4}, {"tp": 2, "tp_form": "all-gather"},
    {"offload": "activations", "tp": 2, "sp": True}, {"tp": 3}, {"replicate": 2, "reduce": "microbatch"},
    {"pp": 2, "reduce": "microbatch"}, {"shard": 2, "zero": 3, "pp": 2, "reduce": "microbatch"},
    {"shard": 2, "cp": 2, "zero": 3, "pp": 2, "reduce": "microbatch"}, {"cp": 2, "zero": 3, "pp": 2, "reduce": "microbatch"},
])  # fmt: skip
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
