"""torchtitan: sections of a TOML file, or the same names as flags, in version 0.2; fields of a Python config in version 0.3 (`torchtitan_python`).

Data parallelism is FSDP2 (ZeRO-3) over `data_parallel_shard_degree` ranks, and DDP where that is 1; -1 takes the GPUs that are left. With a
pipeline the local batch is divided into micro-batches of `pipeline_parallel_microbatch_size`.
"""

from meshwright.describe import catalog
from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError
from meshwright.interop.keys import Facts, Settings
from meshwright.interop.shapes import same_shape
from meshwright.interop.tables import framework

LOOPED = ("interleaved", "looped-bfs", "interleaved-zb")
CONVERTERS = (("nvfp4", "fp4"), ("mx", "mxfp8"), ("float8", "fp8"))  # words in their names
# torchtitan's name and flavor of the models of the catalog that it has; its settings cannot state another shape.
MODELS = {
    "llama3-8b": ("llama3", "8B"), "llama3.1-8b": ("llama3", "8B"), "llama3-70b": ("llama3", "70B"), "llama3.1-70b": ("llama3", "70B"),
    "llama3.1-405b": ("llama3", "405B"), "deepseek-v2-lite": ("deepseek_v3", "16B"), "deepseek-v3": ("deepseek_v3", "671B"),
    "qwen3-0.6b": ("qwen3", "0.6B"), "qwen3-1.7b": ("qwen3", "1.7B"), "qwen3-4b": ("qwen3", "4B"), "qwen3-8b": ("qwen3", "8B"),
    "qwen3-14b": ("qwen3", "14B"), "qwen3-32b": ("qwen3", "32B"), "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
    "qwen3-235b-a22b": ("qwen3", "235B-A22B"), "gpt-oss-20b": ("gpt_oss", "20b"), "gpt-oss-120b": ("gpt_oss", "120b"),
}  # fmt: skip


def named_model(model: Model, models: dict[str, tuple[str, str]], title: str) -> tuple[str, str]:
    """The name and flavor of a model; raises if torchtitan does not have it."""
    entry = catalog.load("models", model.name) if model.name in models else None
    if entry is None or not same_shape(entry, model):
        raise MeshwrightError(
            "MW-LAUNCH-005",
            f"{title} has no model that we know as {model.name}" + " with this shape" * (entry is not None),
            why="Its settings name one of the models that it has; they cannot state another shape",
            valid=models,
            fix="--for meshwright, or --stack torchtitan to plan without settings",
        )
    return models[model.name]


def _model_settings(model: Model) -> Settings:
    name, flavor = named_model(model, MODELS, "torchtitan")
    return {"model.name": name, "model.flavor": flavor}


def _derive(facts: Facts) -> None:
    seq, tokens = facts.get("seq"), facts.get("microbatch_tokens")
    if tokens and seq:
        facts["microbatch"] = max(1, tokens // seq)
    if facts.get("batch_tokens") and seq:
        facts["batch"] = max(1, facts["batch_tokens"] // seq)
    facts["sharding"] = "parameters"
    every = facts.get("recompute_every")
    if facts.get("recompute") == "selective" and isinstance(every, int):
        facts["recompute"] = "full"  # every n-th layer
    else:
        facts.pop("recompute_every", None)
    facts["eight"] = next(
        (p for word, p in CONVERTERS if word in str(facts.get("converters", "")).lower()), facts.get("eight")
    )
    facts["sp"] = facts.get("sp", True) and facts.get("tp", 1) > 1
    compiled, parts = facts.pop("compiled", False), facts.get("compiled_parts")
    facts["fused_loss"] = compiled and "loss" in (parts or "loss")
    # The compiler cuts products.
    layers = compiled and "model" in (parts or "model")
    facts["overlap_tp"] = bool(facts.get("overlap_tp") and layers)
    facts["fused_activation"] = layers
    if facts.get("model") and facts.get("flavor"):
        facts["model"] = f"{facts['model']} {facts['flavor']}"


def stated_stages(layers: int, stages: int) -> Facts:
    """The layers per stage that give a number of stages; embedding and head count as layers unless that gives another number."""
    for ends in (1, 0):
        size = -(-(layers + 2 * ends) // stages)
        if -(-(layers + 2 * ends) // size) == stages:
            return {"layers_per_chunk": size, "first_less": ends, "last_less": ends}
    return {"layers_per_chunk": -(-(layers + 2) // stages)}  # another number: `legality.stack_rules.StackStatesStages`


def _restate(facts: Facts) -> None:
    if facts.get("recompute_every", 1) > 1 and facts.get("recompute") == "full":
        facts["recompute"] = "selective"
        facts["recompute_every"] = str(facts["recompute_every"])  # torchtitan's field is a text
    elif facts.get("recompute") == "selective":
        facts["recompute_every"] = "op"
    else:
        facts.pop("recompute_every", None)
    if facts.get("tp", 1) == 1:
        facts["sp"] = True  # without effect
    facts.setdefault("compiled", True)  # as the stack is predicted
    facts["converters"] = {"fp8": ["quantize.linear.float8"], "mxfp8": ["quantize.linear.mx"]}.get(
        str(facts.pop("eight", None))
    )
    pp, virtual, layers = facts.get("pp", 1), facts.get("virtual", 1), facts.get("model.layers")
    facts.pop("layers_per_chunk", None)
    if pp == 1:
        facts.pop("schedule", None)
        facts.pop("pipeline_microbatch", None)
    elif layers and facts.get("schedule") in LOOPED and virtual != 2:  # two stages per rank are the default
        facts |= stated_stages(layers, pp * virtual)


TORCHTITAN = framework(
    "torchtitan",
    not_modelled=(
        r"^job\.", r"^profiling", r"^metrics", r"^checkpoint\.", r"^lr_scheduler", r"^validation", r"^comm\.", r"^debug", r"dataloader",
        r"^training\.(steps|warmup_steps|max_norm|dataset|dataset_path|seed|deterministic|gc_)", r"^data\.", r"^fault_tolerance",
        r"filter_fqns|\.fqns$|pad_multiple|model_compile_enabled|\.emulate$", r"^model\.(tokenizer|hf_assets|print)", r"^optimizer\.(lr|eps|beta|weight)",
        r"context_parallel_(load_balancer|ptrr)", r"pipeline_parallel_schedule_csv", r"module_fqns", r"^override\.imports",
        r"spmd_backend", r"^training\.fp8_linear$", r"^model\.norm_type$",
        r"compile", r"symm_mem", r"^optimizer", r"float8\.(enable_fsdp|precompute|force)", r"^float8\.", r"^quantize\.",
        r"^model_spec", r"cuda_graphs", r"early_step_in_backward", r"^experimental\.",
        r"^(?!training\.|parallelism\.|activation_checkpoint|model\.)",  # other sections,
    ),
    derive=_derive,
    restate=_restate,
    model_settings=_model_settings,
)  # fmt: skip
