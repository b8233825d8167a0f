"""The flags of a model for Megatron-LM beyond its sizes: without them `pretrain_gpt.py` trains another model.

Its defaults are those of GPT-2: dropout of 0.1, a rotary base of 10,000, no balancing of experts. The flags of the sizes are rows of the table.
"""

from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError
from meshwright.interop.keys import Settings

SCRIPT = "pretrain_gpt.py"
BALANCE = 1e-2  # weight of the balancing loss where the model states none: Megatron's documentation recommends it to start with
# Fields of a model that the flags state, and those that describe it without changing it.
STATED = {
    "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "activation", "vocab", "vocab_multiple", "tied", "max_positions", "rope_theta",
    "rope", "positions", "norm", "norm_epsilon", "latent_norm_epsilon", "qk_norm", "qkv_bias", "out_bias", "ffn_bias", "dropout", "dropout_rate",
    "embedding_dropout", "attention_dropout", "attention", "q_rank", "kv_rank", "rope_dim", "nope_dim", "value_dim", "experts", "top_k",
    "expert_ffn", "shared_experts", "shared_ffn", "dense_layers", "moe_every", "balance_bias", "router",
    "name", "kind", "published", "notes", "not_run", "allow_differences",
}  # fmt: skip
ACTIVATIONS = {
    "gelu": (),
    "gelu-tanh": (),
    "swiglu": (),
    "relu2": ("--squared-relu",),
}  # --swiglu is among the plan's flags
ATTENTIONS = {"gqa": (), "mla": ("--multi-latent-attention",)}


def model_settings(model: Model) -> Settings:
    """Flags of the model beyond its sizes; raises if the model has parts that `pretrain_gpt.py` has no flags for."""
    check_model(model)
    flags: Settings = dict.fromkeys(ACTIVATIONS[model.activation], True)
    flags |= {"--norm-epsilon": f"{model.norm_epsilon:g}"}
    flags |= {"--hidden-dropout": f"{model.dropout_rate:g}", "--attention-dropout": f"{model.attention_dropout:g}"}
    if model.positions == "rope":
        flags |= {"--rotary-base": f"{model.rope_theta:.0f}", **rope_settings(model)}
    if model.qkv_bias and not (model.out_bias or model.ffn_bias):
        flags["--add-qkv-bias"] = True
    flags |= dict.fromkeys(ATTENTIONS[model.attention], True)
    return flags | (expert_settings(model) if model.experts else {})


def rope_settings(model: Model) -> Settings:
    """Scaling of the rotary embedding."""
    rope = model.rope
    flags: Settings = {}
    if rope.interleaved and model.attention != "mla":
        flags["--rotary-interleaved"] = True
    if rope.kind == "llama3":
        flags |= {"--use-rope-scaling": True, "--rope-scaling-factor": f"{rope.factor:g}"}
    elif rope.kind == "yarn":  # with latent attention only: `check_model`
        flags |= {"--rotary-scaling-factor": f"{rope.factor:g}"}
        flags |= {"--mscale": f"{rope.mscale:g}", "--mscale-all-dim": f"{rope.mscale_all_dim:g}"}
    elif model.attention == "mla":
        flags["--rope-type"] = "rope"  # latent attention has yarn by default
    return flags


def expert_settings(model: Model) -> Settings:
    """The router. Tokens go to the experts by all-to-all, and the products of a rank's experts are one grouped kernel."""
    router = model.router
    score = router.score or ("sigmoid" if model.balance_bias else "softmax")
    flags: Settings = {"--moe-token-dispatcher-type": "alltoall", "--moe-grouped-gemm": True}
    flags["--moe-router-score-function"] = score
    weight = router.aux or (0.0 if model.balance_bias else BALANCE)
    kind = "none" if not weight else "seq_aux_loss" if router.aux_scope == "sequence" else "aux_loss"
    flags["--moe-router-load-balancing-type"] = kind
    if weight:
        flags["--moe-aux-loss-coeff"] = f"{weight:g}"
    if router.z:
        flags["--moe-z-loss-coeff"] = f"{router.z:g}"
    if router.capacity:
        flags["--moe-expert-capacity-factor"] = f"{router.capacity:g}"
    if router.normalise is False:
        flags["--moe-router-pre-softmax"] = True  # the weights of a token do not sum to one
    if router.scale != 1:
        flags["--moe-router-topk-scaling-factor"] = f"{router.scale:g}"
    if router.groups > 1:
        flags["--moe-router-num-groups"] = router.groups
        flags["--moe-router-group-topk"] = router.groups_kept or router.groups
    if model.balance_bias:
        flags |= {"--moe-router-enable-expert-bias": True, "--moe-router-bias-update-rate": f"{router.balance_rate:g}"}
    return flags


def check_model(model: Model) -> None:
    """Raise if the model has a part without a flag."""
    missing = sorted(set(model.as_dict()) - STATED)
    if model.activation not in ACTIVATIONS:
        missing.append(f"activation = {model.activation}")
    if model.attention not in ATTENTIONS:
        missing.append(f"attention = {model.attention}")
    if model.positions not in ("rope", "learned", "none"):
        missing.append(f"positions = {model.positions}")
    if model.rope.kind not in ("default", "llama3") and not (model.rope.kind == "yarn" and model.attention == "mla"):
        missing.append(f"rope.kind = {model.rope.kind}")
    if model.router.choice != "token":
        missing.append(f"router.choice = {model.router.choice}")
    if model.router.weigh_inputs:
        missing.append("router.weigh_inputs")
    if missing:
        raise MeshwrightError(
            "MW-LAUNCH-005",
            f"{SCRIPT} of Megatron-LM has no flags for {', '.join(missing)} of {model.name}",
            why="It would train another model",
            fix="--for meshwright, or Megatron-Bridge's recipe of the model",
        )
