"""What a file that a person opens on the page is: a model, a cluster, a plan file or settings of another framework, as sections of a plan file."""

import json
from collections.abc import Sequence
from typing import Any

from meshwright.describe.base import SECTIONS
from meshwright.describe.config import Config, cluster_table
from meshwright.describe.files import check_depth, parse_toml
from meshwright.describe.hf.reader import interpret
from meshwright.errors import MeshwrightError
from meshwright.interop.files import read_settings, sections
from meshwright.units import Json
from meshwright.view.settings import KINDS

OF_TRANSFORMERS = {"architectures", "model_type"}
PLANNED = ("model", "cluster", "stack", "workload", "plan", "adapter")  # the sections that the page keeps


def opened(name: str, text: str, gpus: int = 0) -> Json:
    """{"kind": what the file is, "config": the sections that it describes, "unread": what of it was not read, "problems": warnings about settings};
    raises if it is none of these.

    `gpus`: data parallelism of settings takes what is left of them, and a cluster without a size gets them."""
    document = table(name, text)
    if OF_TRANSFORMERS & document.keys():
        model = interpret(document).as_dict()
        stem = name.rpartition("/")[2].removesuffix(".json")  # config.json names no model: then its architecture does
        return answer("Hugging Face model", {"model": model if stem.startswith("config") else {**model, "name": stem}})
    names = {key.partition(".")[0] for key in document}
    if names and names <= {*SECTIONS, "plugins", "extends"}:
        return plan_file(name, text, document, gpus)
    reading = read_settings(name, gpus=gpus, text=text)
    unread = [f"{key} ({kind})" for kind in KINDS for key in reading.understood.others.get(kind, [])]
    lacking = "" if reading.shape.complete else f", without the model's {', '.join(reading.shape.missing) or 'shape'}"
    kind = f"settings of {reading.framework.title}, {len(reading.understood.used)} read{lacking}"
    return answer(kind, sections(reading), unread, [problem.as_dict() for problem in reading.problems])


def table(name: str, text: str) -> dict[str, Any]:
    """The top level of a JSON or TOML file; {} of any other, which may be settings of another framework."""
    if name.endswith(".toml"):
        return parse_toml(text, name)
    try:
        found = check_depth(json.loads(text), name)
    except RecursionError:
        raise MeshwrightError("MW-CONF-007", f"{name} is nested too deep") from None
    except MeshwrightError:
        raise
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def plan_file(name: str, text: str, document: dict[str, Any], gpus: int) -> Json:
    """The sections of a plan file, a run file or a calibrated cluster. No file is read that it extends."""
    given = {key: part for key, part in document.items() if key in PLANNED}
    unread = [key for key in document if key not in PLANNED]
    if "extends" in document:
        raise MeshwrightError("MW-CONF-012", f"'{name}' extends another file", why="The page opens one file at a time")
    if set(given) == {"cluster"} and name.endswith(".toml"):
        cluster = cluster_table(text)
        cluster = {"extends": cluster} if isinstance(cluster, str) else cluster
        return answer("cluster", {"cluster": {**cluster, "gpus": cluster.get("gpus") or gpus}}, unread)
    if {"model", "cluster"} <= given.keys():
        given = {key: part for key, part in Config.from_document(given).to_dict().items() if key in PLANNED}
    if not given:
        raise MeshwrightError("MW-CONF-002", f"'{name}' has no section of a plan file", valid=PLANNED)
    return answer("plan file" if {"model", "plan"} <= given.keys() else "part of a plan file", given, unread)


def answer(kind: str, config: Json, unread: Sequence[str] = (), problems: Sequence[Json] = ()) -> Json:
    found = {"kind": kind, "config": config, "unread": [*unread], "problems": [*problems]}
    try:
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError):
        why = "It is a date, a number that is not finite, or a text that is not Unicode"
        raise MeshwrightError("MW-CONF-003", "the file has a value that no field takes", why=why) from None
    return found
