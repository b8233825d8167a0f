"""The general engine of the walk: a discrete-event simulation with shared links.

There are two kinds of future events. **Scheduled events** have a known time: a rank enters a step, the latency α of a
message is over, a message on private ports has arrived. **Flows** share ports, and their end times change whenever the
rates change. Each iteration advances all flows to the earliest event time and processes all events at that time
together, so that a thousand equal messages of a symmetric step cost one iteration. Rates are recomputed only when the
set of flows that share ports has changed.
"""

import numpy as np

from meshwright.programs.collectives.network import Array, LinkRoutes, Messages, max_min_rates

ENTERS, FLOWS, ARRIVES = 0, 1, 2  # a rank enters a step · the latency of a message is over · a message has arrived
SAME_TIME = 1e-12  # relative difference below which two times are equal


def play(sent: Messages, via: LinkRoutes, private: Array, ranks: int) -> tuple[Array, Array, Array]:
    """Return the time at which each message started, arrived, and was added."""
    if len(sent.step) == 0:
        return np.zeros(0), np.zeros(0), np.zeros(0)
    return Events(sent, via, private, ranks).run()


class Events:
    def __init__(self, sent: Messages, via: LinkRoutes, private: Array, ranks: int) -> None:
        self.sent, self.via = sent, via
        self.private = private[via.pair] | (sent.bytes == 0)
        self.alpha = via.alpha[via.pair]
        self.private_time = self.alpha + np.where(sent.bytes == 0, 0.0, sent.bytes / via.bottleneck[via.pair])
        self._visits()
        count = len(sent.step)
        self.start, self.end, self.done = np.zeros(count), np.zeros(count), np.zeros(count)
        self.absent = np.full(count, 2)  # ranks (of sender and receiver) that have not entered the message's step yet
        self.busy = np.zeros(ranks)  # time until which a rank is adding
        self.when, self.kind, self.subject = np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        self.flows, self.left, self.rates = np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0)

    def _visits(self) -> None:
        """Find the visits, that is the (rank, step) pairs in which a rank sends or receives, in order, and their messages."""
        sent, steps = self.sent, len(self.sent.bounds)
        keys = [rank.astype(np.int64) * steps + sent.step for rank in (sent.source, sent.target)]
        visits, number = np.unique(np.concatenate(keys), return_inverse=True)
        self.source_visit, self.target_visit = np.split(number, 2)
        self.rank_of = visits // steps
        self.has_next = np.append(self.rank_of[1:] == self.rank_of[:-1], False)
        self.first_visits = np.flatnonzero(np.append(True, self.rank_of[1:] != self.rank_of[:-1]))
        ends = np.concatenate([self.target_visit, self.source_visit])
        message = np.tile(np.arange(len(sent.step)), 2)
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
            self.process(now)
        return self.start, self.end, self.done

    def process(self, now: float) -> None:
        """Process all events at time `now`."""
        slack = SAME_TIME * now
        due = self.when <= now + slack
        kind, subject = self.kind[due], self.subject[due]
        self.when, self.kind, self.subject = self.when[~due], self.kind[~due], self.subject[~due]
        over = self.left <= self.rates * slack
        arrived = np.concatenate([subject[kind == ARRIVES], self.flows[over]])
        begun = subject[kind == FLOWS]
        if over.any() or len(begun):
            stay = ~over
            self.flows = np.concatenate([self.flows[stay], begun])
            self.left = np.concatenate([self.left[stay], self.sent.bytes[begun]])
            self.rates = max_min_rates(self.via.ports[self.via.pair[self.flows]], self.via.capacity)
        if len(arrived):
            self.arrive(arrived, now)
        entered = subject[kind == ENTERS]
        if len(entered):
            self.enter(entered, now)

    def schedule(self, when: Array, kind: int, subject: Array) -> None:
        self.when = np.concatenate([self.when, when])
        self.kind = np.concatenate([self.kind, np.full(len(subject), kind)])
        self.subject = np.concatenate([self.subject, subject])

    def enter(self, visits: Array, now: float) -> None:
        """Ranks enter a step; messages start if both of their ranks have entered it."""
        spans = zip(self.edge[visits], self.edge[visits + 1], strict=True)
        sent = self.message_of[np.concatenate([np.arange(low, high) for low, high in spans])]
        np.subtract.at(self.absent, sent, 1)
        ready = np.unique(sent[self.absent[sent] == 0])
        self.start[ready] = now
        private = self.private[ready]
        self.schedule(now + self.private_time[ready[private]], ARRIVES, ready[private])
        self.schedule(now + self.alpha[ready[~private]], FLOWS, ready[~private])

    def arrive(self, arrived: Array, now: float) -> None:
        """Messages have arrived: their targets add them, and ranks that have completed a step enter the next one."""
        self.end[arrived] = now
        target = self.sent.target[arrived]
        away = self.sent.source[arrived] != target
        over = np.concatenate([self.target_visit[arrived], self.source_visit[arrived[away]]])
        np.subtract.at(self.pending, over, 1)
        adds = self.sent.work[arrived] > 0
        self.busy[target[adds]] = np.maximum(self.busy[target[adds]], now)
        np.add.at(self.busy, target[adds], self.sent.work[arrived[adds]])
        self.done[arrived] = np.where(adds, self.busy[target], now)
        finished = np.unique(over[self.pending[over] == 0])
        until = np.maximum(self.busy[self.rank_of[finished]], now)
        goes_on = self.has_next[finished]
        self.schedule(until[goes_on], ENTERS, finished[goes_on] + 1)
