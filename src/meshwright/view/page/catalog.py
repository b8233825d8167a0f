"""What the page's inputs offer: the entries of the catalog with one line about each, schedules, fields and presets."""

from collections.abc import Collection
from functools import cache

from meshwright.describe import catalog
from meshwright.describe.base import descriptions
from meshwright.describe.config import CLASSES
from meshwright.describe.plan_fields import PlanFields
from meshwright.describe.schedules import SCHEDULES
from meshwright.describe.variants import ACTIVATIONS, ATTENTIONS
from meshwright.interop.frameworks import FRAMEWORKS
from meshwright.units import Json, format_bytes, format_count, format_rate
from meshwright.view.launch_files import LAUNCHERS
from meshwright.view.page.presets import presets
from meshwright.view.page.registry import VIEWS

REGISTERED = {"activation": list(ACTIVATIONS), "attention": list(ATTENTIONS)}
# Fields of a model that decide its cost, in the order of the form, with their labels.
SHAPE = {
    "layers": "Layers", "hidden": "Hidden size", "heads": "Attention heads", "kv_heads": "KV heads", "head_dim": "Width of a head",
    "ffn": "FFN width", "activation": "Activation", "vocab": "Vocabulary", "tied": "Tied embeddings", "attention": "Attention",
    "q_rank": "Rank of latent queries", "kv_rank": "Rank of latent KV", "rope_dim": "Rotated width of a head",
    "nope_dim": "Unrotated width of a head", "value_dim": "Width of a value", "window": "Attention window, tokens",
    "full_every": "Full attention every n layers", "experts": "Experts", "top_k": "Experts per token", "expert_ffn": "FFN width of an expert",
    "shared_experts": "Shared experts", "shared_ffn": "FFN width of shared experts", "dense_layers": "First layers without experts",
    "moe_every": "Experts every n layers", "mtp_layers": "Multi-token prediction layers", "dropout": "Dropout", "max_positions": "Longest sequence",
}  # fmt: skip


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
        "fields": {"model": fields_of("model", SHAPE)}
        | {part: fields_of(part) for part in ("workload", "plan", "adapter")},
        "shape": SHAPE,
        "frameworks": [{"name": f.name, "title": f.title} for f in FRAMEWORKS.values()],
        "launchers": [{"name": name} for name in LAUNCHERS],
        "presets": presets(),
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


def fields_of(section: str, names: Collection[str] = ()) -> Json:
    """The fields of a section: default, description, and the values of a word that is registered."""
    cls = PlanFields if section == "plan" else CLASSES[section]
    about = descriptions(cls)
    return {
        name: {
            "default": list(info.default) if isinstance(info.default, tuple) else info.default,
            "about": about.get(name, ""),
            "values": REGISTERED.get(name),
        }
        for name, info in cls.model_fields.items()
        if name in names or not names
    }
