"""The planner with adapters: other plans win than for full training, and models fit that otherwise do not."""

import pytest

from meshwright.describe.config import Config, configure
from meshwright.planner import api
from meshwright.predict.estimate import estimate

FULL: list[str] = []
LORA = ["adapter.rank=16"]
QLORA = ["adapter.rank=16", "adapter.targets=all-linear", "adapter.base=nf4"]


def question(*words: str) -> Config:
    return configure("llama3-70b", "dgx-h100", gpus=8, batch=64, seq=4096, set=words)


@pytest.fixture(scope="module")
def winners() -> dict[str, Config]:
    found = {"full": FULL, "lora": LORA}
    return {name: question(*words).but(plan=api.plan(question(*words)).plan) for name, words in found.items()}


def test_70b_on_one_node_needs_offload_in_full_and_none_with_adapters(winners: dict[str, Config]) -> None:
    assert winners["full"].plan.offload == "states"
    assert winners["lora"].plan.offload == "none"


def test_the_plan_of_adapters_fits_only_with_them(winners: dict[str, Config]) -> None:
    lora = winners["lora"]
    assert estimate(lora).prediction.fits
    assert not estimate(question().but(plan=lora.plan)).prediction.fits


def test_whole_copies_of_70b_fit_a_card_with_four_bits() -> None:
    """ZeRO is needless: each GPU has the base in 4 bits, and only adapters are reduced."""
    replicas = ["plan.replicate=8", "plan.recompute=full"]
    four, sixteen = (estimate(question(*words, *replicas)).prediction for words in (QLORA, QLORA[:-1]))
    assert four.fits
    assert not sixteen.fits
    assert four.memory_gib is not None
    assert four.memory_by_stage[0]["parameters"] == pytest.approx(
        (68.45e9 * 0.5625 + 2.1e9 * 2 + 2 * 207e6) / 2**30, rel=0.01
    )
