"""What the page's inputs offer: the entries of the catalog with one line about each, schedules, fields and presets."""

from functools import cache

from meshwright.describe import catalog
from meshwright.describe.base import descriptions
from meshwright.describe.config import CLASSES
from meshwright.describe.plan_fields import PlanFields
from meshwright.describe.schedules import SCHEDULES
from meshwright.interop.frameworks import FRAMEWORKS
from meshwright.units import Json, format_bytes, format_count, format_rate
from meshwright.view.page.registry import VIEWS

# Configurations to start from: each is a state of the page.
PRESETS: list[Json] = [
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


@cache
def listing() -> Json:
    """Models, clusters, accelerators, links and stacks by name; schedules; the fields of workload and plan; frameworks; presets; views."""
    return {
        "models": [model_line(name) for name in catalog.names("models")],
        "clusters": [cluster_line(name) for name in catalog.names("clusters")],
        "accelerators": [{"name": name} for name in catalog.names("accelerators")],
        "links": [{"name": name} for name in catalog.names("links")],
        "stacks": [stack_line(name) for name in catalog.names("stacks")],
        "schedules": [{"name": name, "about": rule.about, "virtual": rule.virtual} for name, rule in SCHEDULES.items()],
        "fields": {name: fields_of(name) for name in ("workload", "plan")},
        "frameworks": [{"name": f.name, "title": f.title} for f in FRAMEWORKS.values()],
        "presets": PRESETS,
        "views": [{"name": v.name, "title": v.title, "kind": v.kind} for v in VIEWS.values()],
    }


def model_line(name: str) -> Json:
    model = catalog.load("models", name)
    active = f" ({format_count(model.active)} active)" if model.experts else ""
    about = f"{format_count(model.total)}{active}, {model.describe_shape()}"
    return {"name": name, "about": about, "parameters": model.total, "kind": model.kind, "seq": model.max_positions}


def cluster_line(name: str) -> Json:
    cluster = catalog.load("clusters", name)
    links = [f"{level.link.name} {format_rate(cluster.device_bandwidth(k))}" for k, level in enumerate(cluster.levels)]
    memory = format_bytes(cluster.accelerator.memory)
    about = f"{cluster.node_size} × {cluster.accelerator.name} ({memory}) per node; " + ", ".join(dict.fromkeys(links))
    return {"name": name, "about": about, "gpus": cluster.world, "node": cluster.node_size}


def stack_line(name: str) -> Json:
    stack = catalog.load("stacks", name)
    return {"name": name, "about": stack.source, "overlap": list(stack.overlap)}


def fields_of(section: str) -> Json:
    """The fields of a section: default and description."""
    cls = PlanFields if section == "plan" else CLASSES[section]
    about = descriptions(cls)
    return {
        name: {
            "default": list(info.default) if isinstance(info.default, tuple) else info.default,
            "about": about.get(name, ""),
        }
        for name, info in cls.model_fields.items()
    }
