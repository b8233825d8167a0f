"""Configurations to start from: each is a state of the page."""

from __future__ import annotations

from typing import Any

PRESETS: list[dict[str, Any]] = [
    {
        "name": "llama3-70b",
        "title": "Llama 3 70B on 1,024 H100",
        "about": "tensor parallelism inside a node, four pipeline stages, optimizer states sharded",
        "state": {
            "model": "llama3-70b",
            "cluster": {"extends": "dgx-h100", "gpus": 1024},
            "stack": "default",
            "workload": {"batch": 1024, "seq": 8192},
            "plan": {"tp": 8, "sp": True, "pp": 4, "shard": 32, "zero": 1},
        },
    },
]
