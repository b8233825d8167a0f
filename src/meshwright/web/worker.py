"""A worker process: receives one request after another over a pipe and answers each with lines of JSON.

    request    {"task": "estimate", "body": {…}}
    answers    b"+" and lines, any number of times; then b"." (done) or b"!" and {"status", "error"}

The views that follow from an estimate are sent together: they are ready within milliseconds of each other, and the page draws once instead of
once for each.

Worker processes are forked from a process that has imported everything here and imports no torch, so a new one is ready in
milliseconds. A worker computes one request at a time and may be killed at any moment. It ends when the server has ended, also in the
middle of a request.
"""

import contextlib
import json
import os
import resource
import signal
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

from meshwright.describe import plugins
from meshwright.errors import MeshwrightError
from meshwright.host import end_with_parent
from meshwright.web import tasks

LINE, DONE, FAILED = b"+", b".", b"!"
MEMORY_BYTES = 8 * 2**30  # address space of a worker: a request for more fails, and the machine stays usable
GRACE_S = 5.0  # a worker that the server could not stop in time stops itself
# Cheap views first, then the first answers of searches, then chips; advice and other slow views wait for them.
NICENESS = {"search": 5, "chips": 10, "slow": 19}


def serve(pipe: Connection, kind: str, limit_s: float, plugin_names: list[str]) -> None:
    """Answer requests until the pipe closes."""
    end_with_parent()
    plugins.load(plugin_names)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which then ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    with contextlib.suppress(OSError):
        os.nice(NICENESS.get(kind, 0))
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = json.loads(pipe.recv_bytes())
            signal.setitimer(signal.ITIMER_REAL, limit_s + GRACE_S)
            answer(pipe, request["task"], request["body"], together=kind == "quick")
            signal.setitimer(signal.ITIMER_REAL, 0)


def answer(pipe: Connection, task: str, body: Any, together: bool) -> None:
    """Send the lines of one request as they are ready, or together, and whether it succeeded."""
    lines: Iterable[bytes] = map(to_line, tasks.lines(task, body))
    try:
        for line in [b"".join(lines)] if together else lines:
            pipe.send_bytes(LINE + line)
    except OSError:
        raise
    except Exception as error:
        pipe.send_bytes(FAILED + to_line(failure(error)))
    else:
        pipe.send_bytes(DONE)


def failure(error: Exception) -> dict[str, Any]:
    """The status and the error of a request that raised: the input is wrong, it is too large, or Meshwright has a bug."""
    known = error if isinstance(error, MeshwrightError) else tasks.internal_error(error)
    return {"status": 500 if known.code == "MW-WEB-009" else 400, "error": known.as_dict()}


def to_line(value: Any) -> bytes:
    """A value as one line of JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8") + b"\n"
