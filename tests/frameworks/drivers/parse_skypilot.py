"""Read tasks with SkyPilot's own parser: `sky.Task.from_yaml`."""

import os
import tempfile
from pathlib import Path
from typing import Any

from parse_common import main

HOME = tempfile.mkdtemp()  # SkyPilot writes its database and catalogs below the home folder
os.environ["HOME"] = HOME


def parse(case: dict[str, Any]) -> dict[str, Any]:
    import sky

    folder = Path(tempfile.mkdtemp())
    (folder / "task.yaml").write_text(case["text"])
    task = sky.Task.from_yaml(str(folder / "task.yaml"))
    (resources,) = task.resources
    return {
        "num_nodes": task.num_nodes,
        "accelerators": resources.accelerators,
        "cpus": resources.cpus,
        "network_tier": resources.network_tier and resources.network_tier.value,
        "job_recovery": resources.job_recovery,
        "envs": task.envs,
        "name": task.name,
        "run": task.run,
        "setup": task.setup,
        "written": task.to_yaml_config(),
    }


if __name__ == "__main__":
    main(parse)
