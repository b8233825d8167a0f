"""Ranks that do one thing together: each does its part, all learn of every result, and if one failed all raise the same error.

Without it a rank whose disk is full would raise while the other ranks wait for it in the next collective until a timeout.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from torch.distributed import ProcessGroup

from meshwright.comm.bench.backends import gather_texts
from meshwright.errors import MeshwrightError, cannot_write


def together(work: Callable[[], Any], group: ProcessGroup | None) -> list[Any]:
    """Call `work` on every rank of a group and return all results, which must be JSON, on every rank."""
    try:
        result: dict[str, Any] = {"value": work()}
    except MeshwrightError as error:
        result = {"error": {**error.as_dict(), "exit_code": error.exit_code}}
    except OSError as error:
        failed = cannot_write(error.filename or "the checkpoint", error)
        result = {"error": {**failed.as_dict(), "exit_code": failed.exit_code}}
    found = [json.loads(text) for text in gather_texts(json.dumps(result), group)]
    for each in found:
        if "error" in each:
            fields = each["error"]
            raise MeshwrightError(fields.pop("code"), fields.pop("what"), **fields)
    return [each["value"] for each in found]


def on_first(work: Callable[[], Any], group: ProcessGroup | None) -> Any:
    """Call `work` on the first rank of a group and return its result on every rank."""
    return together(work if is_first(group) else lambda: None, group)[0]


def is_first(group: ProcessGroup | None) -> bool:
    return group is None or group.rank() == 0
