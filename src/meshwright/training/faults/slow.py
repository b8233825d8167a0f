"""Slow ranks: one whose own work takes much longer than that of the ranks which do the same work.

All ranks of a run take the same time per step, since they wait for each other. The difference is in where they spend it: a slow rank computes
while the others are blocked in communication. So compare, between ranks of the same pipeline stage (stages may differ by design),

    own work = seconds of a step − seconds blocked in communication        (medians of the last steps)

A rank is slow if its own work exceeds the median of its peers by half, and the excess is a tenth of the step or more. A rank that is
alone in its stage is compared with its earlier steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from meshwright.training.faults.heartbeat import Heartbeat
from meshwright.units import format_seconds

FACTOR = 1.5
LEAST_SHARE = 0.1  # of a step


@dataclass(frozen=True)
class SlowRank:
    """A rank that makes the others wait in every step."""

    rank: int
    host: str
    own_s: float
    peers_s: float
    alone: bool = False  # compared with its earlier steps

    @property
    def text(self) -> str:
        return (
            f"rank {self.rank} on {self.host} is slow: it works {format_seconds(self.own_s)} per step, "
            f"{'before' if self.alone else 'ranks with the same work'} {format_seconds(self.peers_s)}; every step waits for it"
        )


def slow_ranks(heartbeats: Iterable[Heartbeat]) -> list[SlowRank]:
    """The slow ranks among these heartbeats."""
    measured = [beat for beat in heartbeats if beat.own_s > 0]
    found = []
    for beat in measured:
        peers = [other.own_s for other in measured if other.stage == beat.stage and other.rank != beat.rank]
        usual = median(peers) if peers else beat.usual_s
        if usual and beat.own_s > FACTOR * usual and beat.own_s - usual > LEAST_SHARE * beat.step_s:
            found.append(SlowRank(beat.rank, beat.host, beat.own_s, usual, not peers))
    return found
