"""One rank's failure, published to the group's store, so that every rank reports the first cause and not its consequence."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

from meshwright.comm.call import Lost
from meshwright.errors import MeshwrightError

KEY = "failure"
PAUSE_S = 0.2  # a consequence waits this long for the cause to be published


class Failure:
    """The failure of a group. The first one that is published stays."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank = store, rank
        self.error: MeshwrightError | None = None

    def publish(self, error: MeshwrightError) -> MeshwrightError:
        """Publish an error of this rank unless another rank was first; return the error to raise here."""
        if self.error is None:
            if error.code == "MW-COMM-004":  # perhaps only a consequence: the peer may know more
                error = self.traced(error)
            first = self.published()
            if first is None:
                with contextlib.suppress(Exception):  # without the store this rank still raises its error
                    self.store.set(
                        KEY, json.dumps({"rank": self.rank, "exit_code": error.exit_code, **error.as_dict()})
                    )
            self.error = first or error
        return self.error

    def traced(self, error: MeshwrightError) -> MeshwrightError:
        """The error with the rank that all others wait for: a peer that does not answer may itself be waiting for another rank."""
        if isinstance(error, Lost) and error.peer >= 0:
            with contextlib.suppress(Exception):
                self.store.set(f"waits/{self.rank}", str(error.peer))
        time.sleep(PAUSE_S)
        if isinstance(error, Lost) and error.peer >= 0:
            with contextlib.suppress(Exception):
                peer, seen = error.peer, {self.rank}
                while peer not in seen and self.store.check([f"waits/{peer}"]):
                    seen.add(peer)
                    peer = int(self.store.get(f"waits/{peer}"))
                if peer not in seen:
                    return Lost(error.place, peer, error.cause + self.refusal(peer))
        return error

    def refuse(self, error: MeshwrightError) -> None:
        """Publish that this rank rejected a call. It may repeat the call; if it does not, its peers report the reason at their timeout."""
        with contextlib.suppress(Exception):
            self.store.set(f"refused/{self.rank}", str(error))

    def refusal(self, peer: int) -> str:
        """Why a rank that does not answer rejected its last call, if it did."""
        key = f"refused/{peer}"
        return f"; it rejected a call: {self.store.get(key).decode()}" if self.store.check([key]) else ""

    def published(self) -> MeshwrightError | None:
        """The error that another rank has published, if any."""
        with contextlib.suppress(Exception):  # the store may have ended with its rank
            if self.store.check([KEY]):
                fields = json.loads(self.store.get(KEY))
                if fields.pop("rank") != self.rank:
                    return MeshwrightError(**fields)
        return None

    def check(self) -> None:
        """Raise if this group has failed, here or on another rank."""
        self.error = self.error or self.published()
        if self.error is not None:
            raise self.error
