"""The general engine of the walk: from one moment at which something changes to the next.

Two kinds of things lie ahead: **appointments** with a known time (a rank enters a step, a message has paid its α, a
message whose ports are private has arrived), and **flows** that share ports, whose ends move whenever the rates change.
Each turn takes the earliest moment, carries all flows forward to it, and treats everything that happens then at once,
so that a thousand equal messages of a symmetric step cost one turn. Rates are found anew only when the set of sharing
flows has changed.
"""

from __future__ import annotations

import numpy as np

from meshwright.programs.collectives.network import Array, Messages, Routes, max_min_rates

ENTERS, FLOWS, ARRIVES = 0, 1, 2  # a visit (rank at a step) begins · a message has paid its α · a message is there
SAME_TIME = 1e-12  # moments that differ by less, relatively, are one


def play(sent: Messages, via: Routes, private: Array, ranks: int) -> tuple[Array, Array, Array]:
    """When every message started, arrived, and was added up."""
    if len(sent.step) == 0:
        return np.zeros(0), np.zeros(0), np.zeros(0)
    return Events(sent, via, private, ranks).run()


class Events:
    def __init__(self, sent: Messages, via: Routes, private: Array, ranks: int) -> None:
        self.sent, self.via = sent, via
        self.private = private[via.pair] | (sent.bytes == 0)
        self.alpha = via.alpha[via.pair]
        self.alone = self.alpha + np.where(sent.bytes == 0, 0.0, sent.bytes / via.bottleneck[via.pair])
        self._visits(ranks)
        count = len(sent.step)
        self.start, self.end, self.done = np.zeros(count), np.zeros(count), np.zeros(count)
        self.absent = np.where(sent.source == sent.target, 1, 2)  # ranks that have not entered the message's step yet
        self.busy = np.zeros(ranks)  # until when a rank adds
        self.when, self.what, self.whom = np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        self.flows, self.left, self.rates = np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0)

    def _visits(self, ranks: int) -> None:
        """Every (rank, step) at which a rank has something to do, in order; and the messages of each."""
        sent, steps = self.sent, len(self.sent.bounds)
        keys = [rank.astype(np.int64) * steps + sent.step for rank in (sent.source, sent.target)]
        visits, number = np.unique(np.concatenate(keys), return_inverse=True)
        self.source_visit, self.target_visit = np.split(number, 2)
        self.rank_of = visits // steps
        self.has_next = np.append(self.rank_of[1:] == self.rank_of[:-1], False)
        self.first_visits = np.flatnonzero(np.append(True, self.rank_of[1:] != self.rank_of[:-1]))
        away = np.flatnonzero(sent.source != sent.target)
        ends = np.concatenate([self.target_visit, self.source_visit[away]])
        message = np.concatenate([np.arange(len(sent.step)), away])
        order = np.argsort(ends, kind="stable")
        self.message_of = message[order]
        self.pending = np.bincount(ends, minlength=len(visits))
        self.edge = np.concatenate([[0], np.cumsum(self.pending)])

    def run(self) -> tuple[Array, Array, Array]:
        now = 0.0
        self.enter(self.first_visits, now)
        while len(self.when) or len(self.flows):
            soonest = self.when.min(initial=np.inf)
            if len(self.flows):
                soonest = min(soonest, now + (self.left / self.rates).min())
            self.left = self.left - self.rates * (soonest - now)
            now = soonest
            self.turn(now)
        return self.start, self.end, self.done

    def turn(self, now: float) -> None:
        """All that happens now."""
        slack = SAME_TIME * now
        due = self.when <= now + slack
        what, whom = self.what[due], self.whom[due]
        self.when, self.what, self.whom = self.when[~due], self.what[~due], self.whom[~due]
        over = self.left <= self.rates * slack
        arrived = np.concatenate([whom[what == ARRIVES], self.flows[over]])
        begun = whom[what == FLOWS]
        if over.any() or len(begun):
            stay = ~over
            self.flows = np.concatenate([self.flows[stay], begun])
            self.left = np.concatenate([self.left[stay], self.sent.bytes[begun]])
            self.rates = max_min_rates(self.via.ports[self.via.pair[self.flows]], self.via.capacity)
        if len(arrived):
            self.arrive(arrived, now)
        entered = whom[what == ENTERS]
        if len(entered):
            self.enter(entered, now)

    def book(self, when: Array, what: int, whom: Array) -> None:
        self.when = np.concatenate([self.when, when])
        self.what = np.concatenate([self.what, np.full(len(whom), what)])
        self.whom = np.concatenate([self.whom, whom])

    def enter(self, visits: Array, now: float) -> None:
        """Ranks enter a step; messages whose both ranks are there start."""
        spans = zip(self.edge[visits], self.edge[visits + 1], strict=True)
        here = self.message_of[np.concatenate([np.arange(low, high) for low, high in spans])]
        np.subtract.at(self.absent, here, 1)
        ready = np.unique(here[self.absent[here] == 0])
        self.start[ready] = now
        alone = self.private[ready]
        self.book(now + self.alone[ready[alone]], ARRIVES, ready[alone])
        self.book(now + self.alpha[ready[~alone]], FLOWS, ready[~alone])

    def arrive(self, here: Array, now: float) -> None:
        """Messages have arrived; targets add them, and ranks that are done with their step enter the next."""
        self.end[here] = now
        target = self.sent.target[here]
        away = self.sent.source[here] != target
        over = np.concatenate([self.target_visit[here], self.source_visit[here[away]]])
        np.subtract.at(self.pending, over, 1)
        adds = self.sent.work[here] > 0
        self.busy[target[adds]] = np.maximum(self.busy[target[adds]], now)
        np.add.at(self.busy, target[adds], self.sent.work[here[adds]])
        self.done[here] = np.where(adds, self.busy[target], now)
        finished = np.unique(over[self.pending[over] == 0])
        until = np.maximum(self.busy[self.rank_of[finished]], now)
        goes_on = self.has_next[finished]
        self.book(until[goes_on], ENTERS, finished[goes_on] + 1)


__all__ = ["play"]
