"""Make `init_process_group("meshwright")` available, and hold the settings of the groups that are created afterwards.

    MESHWRIGHT_CLUSTER=FILE        the calibration (`meshwright calibrate`) by which programs are chosen
    MESHWRIGHT_SHARED_MEMORY=0     messages between ranks of one host use gloo too

The variables are for ranks that torchrun or another launcher starts; Python code passes the same to `register`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import distributed

from meshwright.comm.backend.group import MeshwrightGroup
from meshwright.describe.cluster import Cluster

NAME = "meshwright"


@dataclass
class Settings:
    """How new groups are created."""

    cluster: Cluster | None = None
    shared_memory: bool = True


SETTINGS = Settings()


def register(cluster: Cluster | None = None, shared_memory: bool | None = None) -> None:
    """Register the backend with torch.distributed; call it again to change the settings of later groups."""
    file = os.environ.get("MESHWRIGHT_CLUSTER", "")
    if cluster is None and file:
        from meshwright.describe.config import load_cluster

        cluster = load_cluster(file)
    SETTINGS.cluster = cluster
    if shared_memory is None:
        shared_memory = os.environ.get("MESHWRIGHT_SHARED_MEMORY", "1") != "0"
    SETTINGS.shared_memory = shared_memory
    if NAME not in distributed.Backend.backend_list:
        distributed.Backend.register_backend(NAME, create, devices=["cpu", "cuda"])


def create(store: Any, rank: int, size: int, timeout: timedelta) -> MeshwrightGroup:
    """What torch.distributed calls for each new group, on all of its ranks."""
    return MeshwrightGroup(store, rank, size, timeout, SETTINGS.cluster, SETTINGS.shared_memory)
