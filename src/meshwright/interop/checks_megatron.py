"""Options that Megatron-Core refuses together: of its arguments, and of Megatron-Bridge, which runs on it.

Each rule is one that the framework checks when it starts, and that needs no default of another option to be certain: Megatron-LM's
`megatron/training/arguments.py` (validate_args) and Megatron-Core's `transformer/transformer_config.py` (__post_init__), read at commits
000c4ac24f and 002526d81b of https://github.com/NVIDIA/Megatron-LM. Flags and fields have the same names there: `--recompute-method` of the
command line is `model.recompute_method` of Megatron-Bridge, so a rule is written once, with the last part of the name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.interop.keys import Facts, Framework, SettingsProblem, plain

CORE = ("megatron-lm", "megatron-bridge")
FIRST_AND_LAST = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)
COUNTED_ENDS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
VIRTUAL = ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank", "vp_size")


@dataclass(frozen=True)
class MegatronOptions:
    """Settings by the last part of their names."""

    values: Mapping[str, Any]

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> MegatronOptions:
        return cls({_short(name): plain(value) for name, value in settings.items()})

    def on(self, name: str) -> bool:
        """Whether an option is set to something other than off, zero or nothing."""
        return self.values.get(name) not in (None, False, 0, "", "none", "None", [])

    def which(self, names: tuple[str, ...]) -> list[str]:
        return [name for name in names if self.on(name)]

    def words(self, name: str) -> set[str]:
        """The entries of an option that is a list, or text with separators."""
        value = self.values.get(name)
        entries = value if isinstance(value, list) else str(value or "").replace("/", " ").replace(",", " ").split()
        return {str(entry).strip("[]'\"") for entry in entries}


def check_megatron(facts: Facts, framework: Framework, settings: Mapping[str, Any]) -> Iterator[SettingsProblem]:
    """Options that the framework refuses together."""
    if framework.name not in CORE:
        return
    options = MegatronOptions.of(settings)
    yield from _recompute(options, facts)
    yield from _activation_offload(options, facts)
    yield from _stages_stated_twice(options, facts)
    yield from _sequence(options, facts)
    yield from _expert_overlap(options, facts)
    yield from _experts(options, facts)
    yield from _fsdp(options, facts)
    if framework.name == "megatron-lm":  # Megatron-Bridge turns these options off where they conflict
        yield from _overlap(options, facts)


def _recompute(options: MegatronOptions, facts: Facts) -> Iterator[SettingsProblem]:
    granularity = options.values.get("recompute_granularity")
    overlaps = options.on("overlap_moe_expert_parallel_comm")  # recomputes whole chunks of the model
    scripted = facts.get("scripted")  # scripts of measured runs add the method
    if granularity == "full" and not options.on("recompute_method") and not overlaps and not scripted:
        yield _refused(
            "full recompute without a recompute method",
            "The framework has no default method",
            "recompute method uniform, with recompute num layers 1",
        )
    if granularity == "selective":
        for name in options.which(("recompute_method", "recompute_num_layers")):
            yield _refused(
                f"selective recompute with {_spaced(name)}",
                "Only full recompute chooses layers",
                f"drop {_spaced(name)}, or full recompute",
            )
        if "shared_experts" in options.words("recompute_modules") and options.on("moe_shared_expert_overlap"):
            yield _refused(
                "recompute of shared experts while they overlap with the dispatcher",
                "Their forward is not kept in one piece",
                "drop shared_experts from the recompute modules, or the overlap",
            )


def _activation_offload(options: MegatronOptions, facts: Facts) -> Iterator[SettingsProblem]:
    if not (options.on("cpu_offloading") or options.on("cpu_offloading_num_layers")):
        return
    if facts.get("pp", 1) > 1:
        yield _refused(
            f"layers offloaded to the CPU in a pipeline of {facts['pp']} stages",
            "The framework offloads layers only without a pipeline",
            "pipeline size 1, or fine-grained activation offloading",
        )
    if options.on("recompute_granularity"):
        yield _refused(
            "layers offloaded to the CPU together with recompute",
            "Each of the two replaces saved activations",
            "drop one of the two",
        )


def _stages_stated_twice(options: MegatronOptions, facts: Facts) -> Iterator[SettingsProblem]:
    layout = options.on("pipeline_model_parallel_layout")
    ends, counted = options.which(FIRST_AND_LAST), options.which(COUNTED_ENDS)
    chunk = options.on("num_layers_per_virtual_pipeline_stage")
    if layout and (ends or counted):
        yield _stated_twice("pipeline_model_parallel_layout", (ends or counted)[0])
    elif ends and counted:
        yield _stated_twice(ends[0], counted[0])
    if chunk and (layout or ends or options.on("num_virtual_stages_per_pipeline_rank")):
        other = "pipeline_model_parallel_layout" if layout else ends[0] if ends else VIRTUAL[1]
        yield _stated_twice("num_layers_per_virtual_pipeline_stage", other)
    elif layout and options.on("num_virtual_stages_per_pipeline_rank"):
        yield _stated_twice("pipeline_model_parallel_layout", "num_virtual_stages_per_pipeline_rank")
    virtual = max((v for name in VIRTUAL if isinstance(v := options.values.get(name), int)), default=1)
    if (virtual > 1 or chunk) and facts.get("pp", 1) == 1 and not facts.get("scripted"):
        yield SettingsProblem(
            "MW-SET-003",
            f"{f'{virtual} virtual stages' if virtual > 1 else 'layers per virtual stage'} without a pipeline",
            why="Virtual stages divide the stage of a rank; the interleaved schedule needs a pipeline of at least 2 ranks",
            fix="pipeline size 2 or more, or no virtual stages",
        )
    elif virtual > 1 and facts.get("pp") == 2 and options.on("no_overlap_p2p_communication"):
        yield _refused(
            "an interleaved schedule of 2 ranks without overlap of its messages",
            "Two ranks would exchange several messages at once",
            "drop --no-overlap-p2p-communication, or pipeline size 4",
        )


def _sequence(options: MegatronOptions, facts: Facts) -> Iterator[SettingsProblem]:
    seq, most, cp = facts.get("seq"), facts.get("model.max_positions"), facts.get("cp", 1)
    if seq and most and seq > most and options.on("max_position_embeddings"):
        yield _refused(
            f"a sequence of {seq:,} tokens with {most:,} positions",
            "The framework refuses sequences longer than its positions",
            f"max position embeddings {seq}",
        )
    sizes = [int(w) for w in options.words("hierarchical_context_parallel_sizes") if w.isdigit()]
    stated = options.values.get("hierarchical_context_parallel_sizes")
    if isinstance(stated, list):
        sizes = [int(w) for w in (str(part).strip("[],") for part in stated) if w.isdigit()]
    if len(sizes) > 1 and math.prod(sizes) != cp:
        product = " × ".join(map(str, sizes))
        yield _refused(
            f"hierarchical context parallelism {product} = {math.prod(sizes)} with context parallelism {cp}",
            "The sizes of its levels multiply to the context-parallel size",
            f"context parallel size {math.prod(sizes)}",
        )
    if "a2a+p2p" in options.words("cp_comm_type") and cp > 1 and not stated:
        yield _refused(
            "context parallelism by a2a+p2p without the sizes of its two levels",
            "The framework does not choose them",
            "hierarchical context parallel sizes, or cp comm type p2p",
        )


def _expert_overlap(options: MegatronOptions, facts: Facts) -> Iterator[SettingsProblem]:
    """The exchange of expert parallelism during the compute of another micro-batch."""
    if not options.on("overlap_moe_expert_parallel_comm"):
        if options.on("delay_wgrad_compute"):
            yield _refused(
                "delayed weight gradients without overlap of expert parallelism",
                "They are delayed to be computed during its exchange",
                "overlap moe expert parallel comm",
            )
        return
    conflicts = {
        "recompute of whole expert layers": "moe" in options.words("recompute_modules"),
        "overlap of shared experts": options.on("moe_shared_expert_overlap"),
        "a recompute method": options.on("recompute_method"),
        "expert parallel size 1": facts.get("ep", 1) == 1,
    }
    for name in (name for name, found in conflicts.items() if found):
        yield _refused(
            f"overlap of the exchange of expert parallelism with {name}",
            "The framework cannot split the layer into compute and exchange then",
            "drop one of the two",
        )
    parts = ("pipeline_model_parallel_layout", "num_layers_per_virtual_pipeline_stage", "pp_layout", *VIRTUAL)
    if facts.get("pp", 1) > 1 and not options.which(parts):
        yield _refused(
            "overlap of the exchange of expert parallelism in a pipeline without virtual stages",
            "It overlaps the forward of one virtual stage with the backward of another",
            "virtual stages",
        )


def _overlap(options: MegatronOptions, facts: Facts) -> Iterator[SettingsProblem]:
    sharded = options.which(("use_distributed_optimizer", "use_megatron_fsdp", "use_custom_fsdp"))
    if options.on("overlap_param_gather") and not sharded:
        yield _refused(
            "overlap of the parameter gather without sharded optimizer states",
            "Only sharded states need a gather",
            "--use-distributed-optimizer",
        )
    elif options.on("overlap_param_gather") and not options.on("overlap_grad_reduce"):
        yield _refused(
            "overlap of the parameter gather without overlap of the gradient reduction",
            "The framework overlaps both or the reduction alone",
            "--overlap-grad-reduce",
        )
    if options.on("tp_comm_overlap") and not facts.get("sp"):
        yield _refused(
            "overlap of tensor-parallel communication without sequence parallelism",
            "It splits the gathers and reduce-scatters of sequence parallelism",
            "--sequence-parallel",
        )


def _experts(options: MegatronOptions, facts: Facts) -> Iterator[SettingsProblem]:
    if facts.get("ep", 1) > 1 and options.on("num_layers") and not facts.get("model.experts"):
        yield _refused(
            f"expert parallelism {facts['ep']} of a model without experts",
            "There are no experts to divide",
            "--num-experts, or expert parallelism 1",
        )
    if facts.get("tp", 1) > 1 and facts.get("model.experts") and not facts.get("sp"):
        yield _refused(
            f"experts with tensor parallelism {facts['tp']} and without sequence parallelism",
            "A layer of experts raises an error in training then (megatron/core/transformer/moe/moe_layer.py)",
            "sequence parallel",
        )
    if facts.get("ep", 1) > 1 and facts.get("half") == "fp16":
        yield _refused("expert parallelism in fp16", "The framework trains divided experts in bf16", "--bf16")
    for both in (("fp8_format", "fp4_format"), ("fp8", "fp4")):
        if len(options.which(both)) == 2:
            yield SettingsProblem("MW-SET-005", "fp8 and fp4 are both set", why="The two precisions exclude each other")


def _fsdp(options: MegatronOptions, facts: Facts) -> Iterator[SettingsProblem]:
    """The two implementations of FSDP, and what each excludes."""
    megatron = options.which(("use_megatron_fsdp", "use_custom_fsdp"))
    if options.on("use_torch_fsdp2"):
        conflicts = {
            "Megatron's FSDP": bool(megatron),
            f"a pipeline of {facts.get('pp', 1)} stages": facts.get("pp", 1) > 1,
            f"expert parallelism {facts.get('ep', 1)}": facts.get("ep", 1) > 1,
        }
        for name in (name for name, found in conflicts.items() if found):
            yield _refused(
                f"PyTorch's FSDP2 with {name}", "The framework refuses the two together", "drop one of the two"
            )
    if megatron and options.on("use_tp_pp_dp_mapping"):
        yield _refused(
            "Megatron's FSDP with ranks in the order tp, pp, dp",
            "Its shards need the default order",
            "drop use tp pp dp mapping",
        )


def _stated_twice(first: str, second: str) -> SettingsProblem:
    return SettingsProblem(
        "MW-SET-003",
        f"{_spaced(first)} and {_spaced(second)} are both set",
        why="Both state the layers of pipeline stages, and the framework refuses two statements",
        fix=f"drop {_spaced(second)}",
    )


def _refused(what: str, why: str, fix: str) -> SettingsProblem:
    return SettingsProblem("MW-SET-009", what, why=why, fix=fix)


def _short(name: str) -> str:
    return name.lstrip("-").rpartition(".")[2].replace("-", "_")


def _spaced(name: str) -> str:
    return name.replace("_", " ")
