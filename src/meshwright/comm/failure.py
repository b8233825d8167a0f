"""One rank's failure, published to the group's store, so that every rank reports the first cause and not its consequence."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed

from meshwright.comm.call import Lost
from meshwright.errors import MeshwrightError

KEY = "failure"
PAUSE_S = 0.2  # a consequence waits this long for the cause to be published
Result = TypeVar("Result")


class Failure:
    """The failure of a group. The first one that is published stays."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank, self.store_ended = store, rank, False
        self.error: MeshwrightError | None = None

    def publish(self, error: MeshwrightError) -> MeshwrightError:
        """Publish an error of this rank unless another rank was first; return the error to raise here."""
        if self.error is None:
            if error.code == "MW-COMM-004":  # perhaps only a consequence: the peer may know more
                error = self.traced(error)
            first = self.published()
            if first is None:
                fields = {"rank": self.rank, "exit_code": error.exit_code, **error.as_dict()}
                self._ask(lambda store: store.set(KEY, json.dumps(fields)))
            self.error = first or error
        return self.error

    def traced(self, error: MeshwrightError) -> MeshwrightError:
        """The error with the rank that all others wait for: a peer that does not answer may itself be waiting for another rank."""
        if not isinstance(error, Lost) or error.peer < 0:
            time.sleep(PAUSE_S)
            return error
        self._ask(lambda store: store.set(f"waits/{self.rank}", str(error.peer)))
        time.sleep(PAUSE_S)
        return self._ask(lambda store: self._last_of_chain(store, error)) or error

    def _last_of_chain(self, store: Any, error: Lost) -> Lost:
        peer, seen = error.peer, {self.rank}
        while peer not in seen and store.check([f"waits/{peer}"]):
            seen.add(peer)
            peer = int(store.get(f"waits/{peer}"))
        return error if peer in seen else Lost(error.place, peer, error.cause + refusal(store, peer))

    def refuse(self, error: MeshwrightError) -> None:
        """Publish that this rank rejected a call. It may repeat the call; if it does not, its peers report the reason at their timeout."""
        self._ask(lambda store: store.set(f"refused/{self.rank}", str(error)))

    def published(self) -> MeshwrightError | None:
        """The error that another rank has published, if any."""
        fields = self._ask(lambda store: json.loads(store.get(KEY)) if store.check([KEY]) else None)
        return MeshwrightError(**fields) if fields and fields.pop("rank") != self.rank else None

    def check(self) -> None:
        """Raise if this group has failed, here or on another rank."""
        self.error = self.error or self.published()
        if self.error is not None:
            raise self.error

    def _ask(self, use: Callable[[Any], Result]) -> Result | None:
        """The result of `use(store)`; None if that fails: without the store a rank still raises its own error. A store ends with the process that
        serves it; then it is not asked again, because torch prints a stack of C++ functions each time."""
        if self.store_ended:
            return None
        try:
            return use(self.store)
        except distributed.DistNetworkError:
            self.store_ended = True
        except Exception:
            pass
        return None


def refusal(store: Any, peer: int) -> str:
    """Why a rank that does not answer rejected its last call, if it did."""
    key = f"refused/{peer}"
    return f"; it rejected a call: {store.get(key).decode()}" if store.check([key]) else ""
