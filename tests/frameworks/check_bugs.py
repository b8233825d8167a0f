"""Bugs that users reported, planted in the frameworks' own code (training/bugs_*.py), and what a comparison must say of each.

`phase`, `module` (a pattern of the name) and `pattern` were written down before the first run. Corrected after it: `row_parallel_is_not_summed`
(the wrong module was written down; its own output is a DTensor that is still to be summed, so the module around it is named),
`positions_begin_again` (rows of positions are found by their content, wherever they begin: the next module is named), torchtitan's
`rotary_is_shifted` (its attention is a module of its own), and the pattern of two sums that are missing in forward. Of the last fourteen bugs
ten were named right by the comparison as it was when they were written down. `quiet`: the loss of the first step is unchanged.
"""

from dataclasses import dataclass

GITHUB = "https://github.com/"


@dataclass(frozen=True)
class PlantedBug:
    """A bug, the training that it is planted in, and what must be named."""

    script: str
    bug: str
    layout: str
    world: int
    phase: str
    module: str  # a regular expression
    pattern: str  # of the numbers; "": any
    report: str  # where a user reported one of its kind
    words: str = ""  # of the model and of clipping, for the reference too
    dtype: str = "fp32"
    alone: str = ""
    quiet: bool = False

    @property
    def candidate(self) -> str:
        """The words of the script that has the bug."""
        return f"{self.layout} --dtype {self.dtype} {self.words}" + (f" --bug {self.bug}" if self.bug else "")

    @property
    def link(self) -> str:
        return GITHUB + self.report.replace("#", "/issues/")


def torch_bug(
    bug: str, layout: str, phase: str, module: str, pattern: str, report: str, world: int = 2, **more: object
) -> PlantedBug:
    return PlantedBug("torch_native", bug, layout, world, phase, module, pattern, report, **{"dtype": "fp64", **more})  # type: ignore[arg-type]


def pipeline_bug(
    bug: str, layout: str, phase: str, module: str, pattern: str, report: str, **more: object
) -> PlantedBug:
    return PlantedBug("torch_pipeline", bug, layout, 2, phase, module, pattern, report, dtype="fp64", **more)  # type: ignore[arg-type]


def megatron_bug(
    bug: str, layout: str, phase: str, module: str, pattern: str, report: str, world: int = 2, **more: object
) -> PlantedBug:
    return PlantedBug("megatron_gpt", bug, layout, world, phase, module, pattern, report, **more)  # type: ignore[arg-type]


def deepspeed_bug(
    bug: str, layout: str, phase: str, module: str, pattern: str, report: str, **more: object
) -> PlantedBug:
    return PlantedBug("deepspeed_engine", bug, layout, 2, phase, module, pattern, report, **more)  # type: ignore[arg-type]


ANY = ".*"
BUGS = [
    torch_bug("ddp_never_reduces", "ddp", "reduction", ANY, "missing sum", "pytorch/pytorch#104336", quiet=True),
    torch_bug("ddp_is_bypassed", "ddp", "reduction", ANY, "missing sum", "jingyaogong/minimind#853", quiet=True),
    torch_bug(
        "loss_is_not_divided", "ddp --accumulate 2", "reduction", ANY, "factor", "Lightning-AI/pytorch-lightning#12811"
    ),
    torch_bug("gradients_are_kept", "ddp", "reduction", ANY, "stale", "NVIDIA/Megatron-LM#4609", quiet=True),
    torch_bug("same_data", "ddp", "forward", "inputs", "part", "pytorch/pytorch#31771"),
    torch_bug("other_learning_rate", "ddp", "update", ANY, "factor", "deepspeedai/DeepSpeed#966", quiet=True),
    torch_bug("other_weight_decay", "ddp", "update", ANY, "", "mosaicml/composer#3493", quiet=True),
    torch_bug("forgotten_layer", "fsdp2", "update", "norm|head", "stale|zero", "pytorch/pytorch#149205", quiet=True),
    torch_bug(
        "clips_with_the_local_norm",
        "fsdp1",
        "clipping",
        ANY,
        "missing sum|",
        "pytorch/pytorch#72548",
        words="--clip 0.1",
        dtype="fp32",
        quiet=True,
    ),
    torch_bug(
        "row_parallel_is_not_summed",
        "tp2",
        "forward",
        r"layers\.0\.attention",
        "missing sum|",
        "karpathy/build-nanogpt#17",
    ),
    torch_bug(
        "gradient_of_input_is_not_summed",
        "tp2",
        "backward",
        r"layers\.1\.norm2",
        "missing sum",
        "NovaSky-AI/SkyRL#1886",
        quiet=True,
    ),
    torch_bug("other_dropout", "tp2", "forward", r"layers\.0\.drop", "", "tenstorrent/tt-metal#55947", words="dropout"),
    torch_bug(
        "reduces_in_bf16",
        "fsdp2",
        "reduction",
        ANY,
        "noise",
        "pytorch/pytorch#171874",
        words="",
        dtype="fp32",
        quiet=True,
    ),
    torch_bug("labels_are_not_shifted", "ddp", "backward", "^(head|)$", "", "huggingface/transformers#37766"),
    torch_bug("positions_begin_again", "ddp", "forward", r"positions|layers\.0\.norm1", "", "NVIDIA/Megatron-LM#560"),
    torch_bug("attention_sees_the_future", "ddp", "forward", r"layers\.0\.attention", "", "pytorch/torchtitan#1750"),
    torch_bug(
        "last_batch_is_dropped",
        "ddp --accumulate 2",
        "forward",
        "inputs",
        "part",
        "Lightning-AI/pytorch-lightning#19987",
    ),
    torch_bug(
        "zeroes_in_between", "--accumulate 4", "reduction", ANY, "", "huggingface/accelerate#3877", world=1, quiet=True
    ),
    torch_bug("gradients_are_summed", "fsdp2", "reduction", ANY, "factor", "pytorch/torchtitan#2318", quiet=True),
    torch_bug("rate_is_scheduled_twice", "ddp", "update", ANY, "factor", "deepspeedai/DeepSpeed#5188", quiet=True),
    torch_bug(
        "loss_is_not_divided",
        "--accumulate 4",
        "reduction",
        ANY,
        "factor",
        "Lightning-AI/pytorch-lightning#87",
        world=1,
    ),
    pipeline_bug(
        "pipeline_does_not_divide",
        "1f1b pp2 --accumulate 4",
        "reduction",
        ANY,
        "factor",
        "pytorch/torchtitan#1733",
        quiet=True,
    ),
    pipeline_bug(
        "gradient_sent_is_halved",
        "1f1b pp2 --accumulate 4",
        "backward",
        r"layers\.1",
        "factor",
        "pytorch/pytorch#144352",
        quiet=True,
    ),
    pipeline_bug(
        "targets_are_reversed", "1f1b pp2 --accumulate 4", "backward", "^(head|)$", "", "pytorch/torchtitan#2972"
    ),
    megatron_bug(
        "input_gradient_is_not_summed",
        "tp2",
        "backward",
        "final_layernorm|decoder$",
        "missing sum",
        "NVIDIA/Megatron-LM#7452",
        quiet=True,
    ),
    megatron_bug(
        "norms_are_not_summed", "sp2", "reduction", "norm|bias", "missing sum", "NVIDIA/Megatron-LM#1446", quiet=True
    ),
    megatron_bug(
        "tied_weights_are_not_summed",
        "pp2 --accumulate 2",
        "reduction",
        "word_embeddings",
        "missing sum",
        "NVIDIA/Megatron-LM#844",
        words="tied rope gqa swiglu qknorm",
        quiet=True,
    ),
    megatron_bug(
        "experts_are_not_scaled",
        "ep2",
        "reduction",
        "experts",
        "factor",
        "NVIDIA/Megatron-LM#5656",
        words="moe",
        quiet=True,
    ),
    megatron_bug("loss_is_not_divided", "pp2 --accumulate 4", "reduction", ANY, "factor", "pytorch/torchtitan#2972"),
    megatron_bug("parameters_are_not_gathered", "dopt", "update", ANY, "", "NVIDIA/Megatron-LM#663", quiet=True),
    megatron_bug("copies_are_not_reduced", "", "reduction", ANY, "missing sum", "NVIDIA/Megatron-LM#1012", quiet=True),
    megatron_bug(
        "norm_is_local", "tp2", "clipping", ANY, "", "NVIDIA/Megatron-LM#5916", words="--clip 0.1", quiet=True
    ),
    megatron_bug(
        "norm_counts_copies", "tp2", "clipping", ANY, "", "NVIDIA-NeMo/RL#3788", words="--clip 0.1", quiet=True
    ),
    megatron_bug("embedding_is_not_summed", "tp2", "forward", "word_embeddings", "", "NVIDIA/Megatron-LM#1736"),
    megatron_bug("bias_is_added_by_each", "tp2", "forward", "linear_proj", "", "Wenyueh/MinivLLM#80"),
    megatron_bug("softmax_is_local", "tp2", "forward", "^$", "", "NVIDIA/Megatron-LM#1736"),
    megatron_bug(
        "rotary_is_stretched",
        "tp2",
        "forward",
        "rotary_pos_emb",
        "",
        "NVIDIA/Megatron-LM#560",
        words="tied rope gqa swiglu qknorm",
    ),
    megatron_bug(
        "tokens_come_back_in_another_order", "ep2 a2a", "forward", "mlp", "", "pytorch/torchtitan#2842", words="moe"
    ),
    megatron_bug("row_parallel_is_not_summed", "tp2", "forward", "word_embeddings", "", "NVIDIA/Megatron-LM#1736"),
    megatron_bug("step_of_one_rank_only", "", "update", ANY, "", "NVIDIA/Megatron-LM#950", quiet=True),
    deepspeed_bug(
        "loss_is_not_divided", "zero1 --accumulate 2", "reduction", ANY, "factor", "deepspeedai/DeepSpeed#7773"
    ),
    deepspeed_bug(
        "gradients_are_summed", "zero2", "reduction", ANY, "factor", "deepspeedai/DeepSpeed#7718", quiet=True
    ),
    deepspeed_bug("parameters_are_not_gathered", "zero1", "update", ANY, "", "deepspeedai/DeepSpeed#1488", quiet=True),
    deepspeed_bug(
        "norm_is_local",
        "zero1",
        "clipping",
        ANY,
        "",
        "deepspeedai/DeepSpeed#8475",
        words="--clip 0.1",
        alone="zero1",
        quiet=True,
    ),
    deepspeed_bug("gradients_are_kept", "zero0", "reduction", ANY, "stale", "deepspeedai/DeepSpeed#545", quiet=True),
    deepspeed_bug(
        "copies_are_not_reduced", "zero0", "reduction", ANY, "missing sum", "deepspeedai/DeepSpeed#7697", quiet=True
    ),
    deepspeed_bug(
        "tied_weights_are_not_summed",
        "pp2 --accumulate 2",
        "reduction",
        "embed",
        "missing sum",
        "NVIDIA/Megatron-LM#844",
        words="pipe tied",
        quiet=True,
    ),
    deepspeed_bug(
        "gradient_sent_is_halved",
        "pp2 --accumulate 2",
        "backward",
        r"^\d$",
        "factor",
        "deepspeedai/DeepSpeed#7773",
        words="pipe",
        quiet=True,
    ),
    PlantedBug(
        "accelerate_loop",
        "loss_is_not_divided",
        "ddp --accumulate 2",
        2,
        "reduction",
        ANY,
        "factor",
        "huggingface/accelerate#3877",
    ),
    PlantedBug(
        "accelerate_loop",
        "clips_with_another_norm",
        "ddp",
        2,
        "clipping",
        ANY,
        "factor",
        "huggingface/accelerate#3807",
        words="--clip 0.1",
        quiet=True,
    ),
    PlantedBug("accelerate_loop", "same_data", "ddp", 2, "forward", "inputs", "part", "pytorch/pytorch#40043"),
    PlantedBug(
        "hf_trainer",
        "means_of_means",
        "--accumulate 4",
        1,
        "backward",
        ANY,
        "",
        "huggingface/transformers#34191",
        words="padded",
    ),
    PlantedBug(
        "hf_trainer",
        "tokens_of_this_rank",
        "ddp",
        2,
        "reduction",
        ANY,
        "",
        "huggingface/transformers#35438",
        words="padded",
    ),
    PlantedBug("hf_trainer", "rotary_is_shifted", "ddp", 2, "forward", "rotary_emb", "", "NVIDIA/Megatron-LM#560"),
    PlantedBug(
        "titan", "loss_is_divided_by_local_tokens", "fsdp2", 2, "reduction", ANY, "factor", "pytorch/torchtitan#2318"
    ),
    PlantedBug(
        "titan",
        "rotary_is_shifted",
        "fsdp2",
        2,
        "forward",
        r"layers\.0\.attention\.inner_attention",
        "",
        "pytorch/torchtitan#1750",
    ),
    PlantedBug(
        "titan",
        "gradients_are_divided_twice",
        "fsdp2",
        2,
        "reduction",
        ANY,
        "factor",
        "pytorch/torchtitan#2318",
        quiet=True,
    ),
    PlantedBug(
        "lightning_fit",
        "loss_is_not_divided",
        "ddp --accumulate 2",
        2,
        "reduction",
        ANY,
        "factor",
        "Lightning-AI/pytorch-lightning#87",
    ),
    PlantedBug("lightning_fit", "same_data", "ddp", 2, "forward", "inputs", "part", "mlcommons/training#625"),
    PlantedBug(
        "lightning_fit",
        "gradients_are_kept",
        "ddp",
        2,
        "reduction",
        ANY,
        "stale",
        "Lightning-AI/pytorch-lightning#12811",
        quiet=True,
    ),
    # Labels of the rest were written before their first run.
    torch_bug(
        "small_parameters_are_not_decayed", "ddp", "update", "norm|bias", "", "verl-project/verl#5070", quiet=True
    ),
    torch_bug(
        "gelu_is_approximated", "ddp", "forward", r"layers\.0\.mlp\.down", "", "NVIDIA-NeMo/Megatron-Bridge#4661"
    ),
    torch_bug("norms_have_another_epsilon", "fsdp2", "forward", r"layers\.0\.norm1", "", "huggingface/candle#271"),
    torch_bug(
        "replicas_are_not_reduced",
        "hsdp",
        "reduction",
        ANY,
        "missing sum",
        "ByteDance-Seed/VeOmni#862",
        world=4,
        quiet=True,
    ),
    # Nothing is planted: PyTorch itself leaves the sum over replicas out.
    torch_bug("", "fsdp1 hybrid", "reduction", ANY, "missing sum", "pytorch/pytorch#154888", quiet=True),
    torch_bug(
        "clips_each_micro_batch",
        "ddp --accumulate 2",
        "clipping",
        ANY,
        "",
        "huggingface/transformers#1563",
        words="--clip 0.1",
        quiet=True,
    ),
    torch_bug("updates_each_micro_batch", "ddp --accumulate 2", "forward", "inputs", "part", "QwenLM/Qwen3-TTS#326"),
    torch_bug(
        "root_is_not_sharded",
        "fsdp2",
        "reduction",
        "^(embedding|positions|norm|head)",
        "missing sum",
        "areal-project/AReaL#313",
        quiet=True,
    ),
    torch_bug(
        "norm_counts_replicas",
        "hsdp",
        "clipping",
        ANY,
        "factor",
        "ByteDance-Seed/VeOmni#862",
        world=4,
        words="--clip 0.1",
        quiet=True,
    ),
    megatron_bug(
        "router_is_not_summed",
        "tp2 ep2 sp2 a2a",
        "reduction",
        "router",
        "missing sum",
        "NVIDIA/Megatron-LM#599",
        world=4,
        words="moe",
        quiet=True,
    ),
    megatron_bug(
        "router_is_detached",
        "ep2",
        "backward",
        "pre_mlp_layernorm",
        "",
        "NVIDIA-NeMo/Automodel#2995",
        words="moe",
        quiet=True,
    ),
    megatron_bug(
        "head_norms_are_not_summed",
        "tp2",
        "reduction",
        "[qk]_layernorm",
        "missing sum",
        "NVIDIA-NeMo/RL#3716",
        words="tied rope gqa swiglu qknorm",
        quiet=True,
    ),
    PlantedBug(
        "accelerate_loop",
        "clips_each_micro_batch",
        "ddp --accumulate 2",
        2,
        "clipping",
        ANY,
        "",
        "huggingface/accelerate#641",
        words="--clip 0.1",
        quiet=True,
    ),
    PlantedBug(
        "titan",
        "norm_gradients_are_not_summed",
        "tp2",
        2,
        "update",
        "norm",
        "",
        "pytorch/torchtitan#2388",
        quiet=True,
    ),
]
