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
    {
        "name": "modeler",
        "title": "Bandwidth and efficiency modeler",
        "about": "a published tool's example: 4 stages × 8 micro-batches of 64 MB, with its numbers and the corrected ones",
        "state": {
            "model": {
                "name": "modeler",
                "layers": 80,
                "hidden": 8192,
                "heads": 64,
                "ffn": 32768,
                "activation": "gelu",
                "vocab": 32000,
            },
            "cluster": {"extends": "dgx-h100", "gpus": 32},
            "stack": "default",
            "workload": {"batch": 8, "seq": 4096},
            "plan": {"tp": 8, "pp": 4},
        },
        "page": {"view": "modeler"},
    },
]
