"""`meshwright check watch` under real frameworks: what must hold does in healthy trainings, and what a planted bug breaks is reported."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from recordings import Training

STEPS = 6
COPIES, CHANGE = "replicas", "parameters change"


@dataclass(frozen=True)
class WatchedTraining:
    """A training, what must have been compared and found in order, and the codes of what must be reported."""

    script: str
    layout: str
    world: int
    held: tuple[str, ...] = (COPIES, CHANGE)
    broken: frozenset[str] = frozenset()


HEALTHY = (
    WatchedTraining("megatron_gpt", "tp2 --clip 1.0", 4),
    WatchedTraining("megatron_gpt", "sp2 dopt --clip 1.0", 4),
    WatchedTraining("megatron_gpt", "pp2 vpp2 --accumulate 2 --clip 1.0", 4),
    WatchedTraining("megatron_gpt", "moe ep2 a2a --clip 1.0", 2),
    WatchedTraining("megatron_gpt", "tied rope gqa swiglu qknorm pp2 --accumulate 2", 2, (CHANGE,)),
    *(WatchedTraining("deepspeed_engine", f"zero{stage} --clip 0.5", 2, (COPIES, CHANGE)) for stage in range(3)),
    WatchedTraining("deepspeed_engine", "zero3 --accumulate 2", 2, (CHANGE,)),
    WatchedTraining("titan", "fsdp2 --clip 0.5", 2, (CHANGE, "norm")),
    WatchedTraining("titan", "hsdp --clip 0.5", 4, (COPIES, CHANGE, "norm")),
    WatchedTraining("titan", "tp2 --clip 0.5", 2),
    WatchedTraining("titan", "ddp --clip 0.5", 2),
)
BROKEN = (
    WatchedTraining("megatron_gpt", "--bug copies_are_not_reduced", 2, broken=frozenset({"MW-WATCH-001", "MW-WATCH-002"})),
    WatchedTraining("megatron_gpt", "sp2 --bug norms_are_not_summed", 2, broken=frozenset({"MW-WATCH-001"})),
    WatchedTraining("megatron_gpt", "tp2 --clip 0.1 --bug norm_is_local", 2, broken=frozenset({"MW-WATCH-001", "MW-WATCH-002"})),
    WatchedTraining("deepspeed_engine", "zero0 --bug copies_are_not_reduced", 2, broken=frozenset({"MW-WATCH-001"})),
    WatchedTraining("deepspeed_engine", "zero1 --bug parameters_are_not_gathered", 2, broken=frozenset({"MW-WATCH-001"})),
    # No bug: `seed_layers` gives each layer the same seed on all data-parallel ranks.
    WatchedTraining("deepspeed_engine", "pipe pp2 zero1 --accumulate 2", 4, broken=frozenset({"MW-WATCH-003"})),
    WatchedTraining("titan", "tp2 --bug norm_gradients_are_not_summed", 2, broken=frozenset({"MW-WATCH-001"})),
)  # fmt: skip


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", [*HEALTHY, *BROKEN], ids=lambda case: f"{case.script}: {case.layout} on {case.world}")
def test_the_watch_reports_what_does_not_hold_and_nothing_else(tmp_path: Path, case: WatchedTraining) -> None:
    about = Training(case.script, case.layout, case.world).watch(tmp_path / "watch", STEPS)
    print("held:", *about["held"], "not seen:", *about["not_seen"])
    assert {violation["code"] for violation in about["violations"]} == case.broken, about["violations"]
    assert about["checks"] >= 3
    assert about["ranks"] == case.world
    if not case.broken:
        assert set(case.held) <= set(about["held"]), about
