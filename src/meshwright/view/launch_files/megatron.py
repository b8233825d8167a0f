"""The words that start Megatron-LM's `pretrain_gpt.py`: the flags of the plan, of the model, of the optimizer and of the checkpoints.

The flags of the plan and of the model's sizes come from `interop.write`. The flags here are those without which Megatron-LM would train another
model than the plan's: the base of the rotary embedding, dropout (0.1 by default there), the router. The data are mock data until they are
replaced, so that the file can be started as it is and its step compared with the prediction.
"""

from __future__ import annotations

from meshwright.describe.config import Config
from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError
from meshwright.interop.frameworks import FRAMEWORKS
from meshwright.interop.write import flag_words, settings_of
from meshwright.view.launch_files.program import TrainingProgram

SCRIPT = "pretrain_gpt.py"
NOTES = (
    "Start it in a checkout of Megatron-LM, which has pretrain_gpt.py.",
    "It trains on mock data: replace --mock-data and --tokenizer-type by --data-path and your tokenizer.",
)
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": ("1", "kernels start in the order of their launches, as overlap needs")}
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
DECAY = {"constant": "constant", "cosine": "cosine", "linear": "linear", "wsd": "WSD"}


def program(config: Config, plan: str, folder: str, save_every: int) -> TrainingProgram:
    """Megatron-LM loads the last checkpoint of `--load` if there is one, so the same words begin and continue a run."""
    framework = FRAMEWORKS["megatron-lm"]
    settings = settings_of(config, framework).settings
    words = [word for name, value in settings.items() for word in flag_words(framework, name, value)]
    begin = (
        SCRIPT,
        *words,
        *model_words(config.model),
        *training_words(config),
        *("--mock-data", "--tokenizer-type", "NullTokenizer"),
        *("--save", f"{folder}/checkpoints", "--load", f"{folder}/checkpoints", "--save-interval", str(save_every)),
        *("--log-interval", "1", "--log-throughput"),
    )
    return TrainingProgram(framework.name, begin, notes=NOTES, install="megatron-core", variables=ONE_QUEUE)


def model_words(model: Model) -> list[str]:
    """Flags of the model beyond its sizes; raises if the model has parts that `pretrain_gpt.py` has no flags for."""
    check_model(model)
    words = [*ACTIVATIONS[model.activation], "--norm-epsilon", f"{model.norm_epsilon:g}"]
    words += ["--hidden-dropout", f"{model.dropout_rate:g}", "--attention-dropout", f"{model.attention_dropout:g}"]
    if model.positions == "rope":
        words += ["--rotary-base", f"{model.rope_theta:.0f}", *rope_words(model)]
    if model.qkv_bias and not (model.out_bias or model.ffn_bias):
        words.append("--add-qkv-bias")
    return [*words, *ATTENTIONS[model.attention]] + (expert_words(model) if model.experts else [])


def rope_words(model: Model) -> list[str]:
    """Scaling of the rotary embedding."""
    rope = model.rope
    words = ["--rotary-interleaved"] if rope.interleaved and model.attention != "mla" else []
    if rope.kind == "llama3":
        words += ["--use-rope-scaling", "--rope-scaling-factor", f"{rope.factor:g}"]
    elif rope.kind == "yarn":  # with latent attention only: `check_model`
        words += ["--rotary-scaling-factor", f"{rope.factor:g}"]
        words += ["--mscale", f"{rope.mscale:g}", "--mscale-all-dim", f"{rope.mscale_all_dim:g}"]
    elif model.attention == "mla":
        words += ["--rope-type", "rope"]  # latent attention has yarn by default
    return words


def expert_words(model: Model) -> list[str]:
    """The router. Tokens go to the experts by all-to-all, and the products of a rank's experts are one grouped kernel."""
    router = model.router
    score = router.score or ("sigmoid" if model.balance_bias else "softmax")
    words = ["--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm", "--moe-router-score-function", score]
    kind = "none" if not router.aux else "seq_aux_loss" if router.aux_scope == "sequence" else "aux_loss"
    words += ["--moe-router-load-balancing-type", kind]
    if router.aux:
        words += ["--moe-aux-loss-coeff", f"{router.aux:g}"]
    if router.z:
        words += ["--moe-z-loss-coeff", f"{router.z:g}"]
    if router.capacity:
        words += ["--moe-expert-capacity-factor", f"{router.capacity:g}"]
    if router.normalise is False:
        words.append("--moe-router-pre-softmax")  # the weights of a token do not sum to one
    if router.scale != 1:
        words += ["--moe-router-topk-scaling-factor", f"{router.scale:g}"]
    if router.groups > 1:
        words += ["--moe-router-num-groups", str(router.groups)]
        words += ["--moe-router-group-topk", str(router.groups_kept or router.groups)]
    if model.balance_bias:
        words += ["--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", f"{router.balance_rate:g}"]
    return words


def training_words(config: Config) -> list[str]:
    """Steps, learning rate, weight decay and clipping of the run file."""
    optimizer, run = config.optimizer, config.run
    rate = optimizer.learning_rate
    words = ["--train-iters", str(run.steps), "--lr", f"{rate:g}", "--lr-decay-style", DECAY[optimizer.schedule]]
    words += ["--lr-warmup-iters", str(min(optimizer.warmup, run.steps - 1)), "--seed", str(run.seed or 1234)]
    if optimizer.schedule != "constant":
        words += ["--min-lr", f"{rate * optimizer.min_learning_rate:g}"]
    if optimizer.schedule == "wsd":
        words += ["--lr-wsd-decay-iters", str(optimizer.decay_steps or max(1, run.steps // 10))]
    words += ["--adam-beta1", f"{optimizer.betas[0]:g}", "--adam-beta2", f"{optimizer.betas[1]:g}"]
    words += ["--weight-decay", f"{optimizer.weight_decay:g}"]
    return [*words, "--clip-grad", f"{optimizer.clip if config.workload.clip else 0:g}"]


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
