"""Variants that are registered by name: activations, attention kinds, gradient compressions and optimizers (schedules: `describe.schedules`)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic_core import PydanticCustomError, core_schema

from meshwright.errors import MeshwrightError, nearest
from meshwright.units import Json

# --- Variants by name: pipeline schedules, and every other choice of which a user may add one.
#
# A variant is one frozen object: what it is called, what it accepts, and its *parts*, functions that build it, count it or run it. A registry
# holds the variants of one kind. A room above `describe` provides the parts that only it can compute, under the same name:
#
#     SCHEDULES.register(Schedule("mine", about="…", build=mine, paths=…, in_flight=…))    # a plug-in: one object
#     SCHEDULES.provide("1f1b", build=one_forward_one_backward)                            # ours: joined from `programs`
#
# A reader asks for a part. One that is missing raises MW-VARI-001 with the names of the variant and of the part, where it is first needed:
# there is no default that means "the usual one".
#
# Batches of plans hold a variant as its position in `names`, a list that grows when a variant is registered.

V = TypeVar("V", bound=Any)  # a frozen dataclass with a `name`


class Registry(Mapping[str, V]):
    """The variants of one kind, in the order in which they were registered."""

    def __init__(self, kind: str, *variants: V) -> None:
        self.kind = kind
        self.names: list[str] = []
        self._variants: dict[str, V] = {}
        self._columns: dict[str, np.ndarray] = {}
        for variant in variants:
            self.register(variant)

    def register(self, variant: V) -> V:
        """Add a variant; its name must be new."""
        if variant.name in self._variants:
            raise MeshwrightError(
                "MW-VARI-002", f"the {self.kind} '{variant.name}' exists already", fix="Choose another name"
            )
        self.names.append(variant.name)
        self._variants[variant.name] = variant
        self._columns.clear()
        return variant

    def provide(self, name: str, **parts: Any) -> None:
        """Add parts to a registered variant."""
        self._variants[name] = replace(self[name], **parts)
        self._columns.clear()

    def remove(self, name: str) -> None:
        """Take out the variant that was registered last."""
        assert self.names[-1] == name, "positions of later variants would change"
        self.names.pop()
        del self._variants[name]
        self._columns.clear()

    def part(self, name: str, part: str) -> Any:
        """A part of a variant; raise if it lacks it."""
        value = getattr(self[name], part)
        if value is None:
            raise MeshwrightError(
                "MW-VARI-001",
                f"the {self.kind} '{name}' has no part '{part}'",
                why="It was registered without it, and this command needs it",
                fix=f"register '{name}' with {part}=…; see docs/extending.md",
            )
        return value

    def having(self, *parts: str) -> tuple[str, ...]:
        """The names of the variants that have all these parts."""
        return tuple(n for n, v in self.items() if all(getattr(v, part) is not None for part in parts))

    def column(self, field: str) -> np.ndarray:
        """One field of all variants, indexed by their positions."""
        if field not in self._columns:
            self._columns[field] = np.array([getattr(variant, field) for variant in self.values()])
        return self._columns[field]

    def __getitem__(self, name: str) -> V:
        return self._variants[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class NameIn:
    """The type annotation of a field that holds the name of a variant: `Annotated[str, NameIn(SCHEDULES)]`."""

    def __init__(self, registry: Registry[Any]) -> None:
        self.registry = registry

    def check(self, name: str) -> str:
        if name not in self.registry:
            expected = ", ".join(f"'{known}'" for known in self.registry)
            raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
        return name

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Json:
        return {"type": "string", "enum": list(self.registry)}


# --- The activation functions of the FFN: names, costs, and the torch function, which `models.parts` joins by name.


@dataclass(frozen=True)
class Activation:
    """One activation function. A gated one multiplies a second projection of the input by the activation of the first."""

    name: str
    about: str
    gated: bool = False
    exponential: bool = True  # computes one exponential, error function or tanh for each element
    hf: str = ""  # its name in a Hugging Face config; empty: it has none
    function: Callable[..., Any] | None = None


ACTIVATIONS: Registry[Activation] = Registry(
    "activation",
    Activation("gelu", "x·Φ(x)", hf="gelu"),
    Activation("gelu-tanh", "the tanh approximation of GELU (GPT-2)", hf="gelu_new"),
    Activation("quick-gelu", "x·sigmoid(1.702·x)", hf="quick_gelu"),
    Activation("relu", "max(x, 0)", exponential=False, hf="relu"),
    Activation("relu2", "max(x, 0)²", exponential=False, hf="relu2"),
    Activation("swiglu", "gated by x·sigmoid(x)", gated=True, hf="silu"),
    Activation("geglu", "gated by GELU", gated=True, hf="gelu"),
    Activation("geglu-tanh", "gated by the tanh approximation of GELU", gated=True, hf="gelu_pytorch_tanh"),
)
ActivationName = Annotated[str, NameIn(ACTIVATIONS)]

# --- The attention kinds: their names, the fields of `[model]` that each one reads, and its parts.
#
# `ATTENTIONS` is the only table of attention kinds. All parts but the last two are functions of a model:
#
#     part         room                      what it returns or does
#     block        describe.mixers    the `Block` of a mixer: matrices, vectors, saved tensors and the core (arguments: model, mixer).
#                                              Parameters, FLOPs, saved activations and the sharding table are counted from it
#     check        describe.shape_checks       raises for fields that do not fit
#     key_width    here                        the width of a query and a key: scores are divided by its square root
#     rotated      here                        elements of each head that rotary positions rotate
#     cached       here                        elements that a position leaves in the KV cache of a layer (`describe.cache`)
#     summary      here                        a few words for one line about the model
#     small        here                        narrow widths of a model that `verify` runs in place of this one; widths not named stay
#     lower        lower.layer_kinds           adds the operations of one layer to a `LayerLowering`
#     module       models.transformer          the torch module (arguments: model, geometry, layer); none for a kind that is `planning_only`

SMALL_HEAD = 8  # width of a head in the models that `verify` runs


@dataclass(frozen=True)
class Attention:
    """One attention kind, and its parts."""

    name: str
    about: str
    fields: tuple[str, ...] = ()  # fields of [model] that it reads besides hidden and heads
    mixers: tuple[str, ...] = ("attention",)  # the mixers of a pattern that it has (`describe.shape_checks`)
    options: Mapping[str, float] = field(default_factory=dict)  # keys of [model.attention_options], and their defaults
    heads_in: str = "attention"  # the module of a layer whose matrices are cut by heads: tensor parallelism begins here
    not_trained: tuple[str, ...] = ()  # flags of [model] that its module does not compute
    frameworks: tuple[str, ...] = ()  # other frameworks that have it; "*": all whose models have it
    planning_only: bool = False  # has no module: `train` and `verify` refuse it
    cached_whole: bool = False  # every tensor-parallel rank keeps the whole cache: it is not one of heads
    block: Callable[..., Any] | None = None
    check: Callable[..., None] | None = None  # none: it accepts all values
    key_width: Callable[..., int] | None = None
    rotated: Callable[..., int] | None = None
    cached: Callable[..., int] | None = None
    summary: Callable[..., str] | None = None  # none: its name
    small: Callable[..., Json] | None = None
    lower: Callable[..., None] | None = None
    module: Callable[..., Any] | None = None

    def reads(self, name: str) -> bool:
        """Whether it reads a field of `[model]`."""
        return name in self.fields

    def check_options(self, options: Mapping[str, float]) -> None:
        """Raise for a key of `[model.attention_options]` that this kind does not have."""
        for key in options:
            if key not in self.options:
                near = nearest(key, list(self.options))
                raise MeshwrightError(
                    "MW-CONF-001",
                    f"model.attention_options.{key} does not exist for attention={self.name}",
                    valid=list(self.options),
                    fix=f"--set model.attention_options.{near}={options[key]:g}" if near else "",
                )


def _small_latents(model: Any) -> dict[str, int]:
    widths = {"q_rank": 6, "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 5}
    return {name: min(size, getattr(model, name)) for name, size in widths.items()}


ATTENTIONS: Registry[Attention] = Registry(
    "attention kind",
    Attention(
        "gqa",
        "groups of queries share a key and a value; multi-head and multi-query attention are its ends",
        ("kv_heads", "head_dim"),
        ("attention", "query"),
        frameworks=("*",),
        key_width=lambda m: m.head_width,
        rotated=lambda m: m.rope_dim or m.head_width,
        cached=lambda m: 2 * m.kv_groups * m.head_width,
        summary=lambda m: f" ({m.kv_groups} KV)" if m.kv_groups != m.heads else "",
        small=lambda m: {"rope_dim": SMALL_HEAD // 2 if m.rope_dim else 0},
    ),
    Attention(
        "mla",
        "multi-head latent attention (DeepSeek-V2): keys and values of all heads from one small vector of each token",
        ("q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim", "latent_norm_epsilon"),
        heads_in="attention.heads",
        frameworks=("*",),
        not_trained=("qk_norm", "sinks"),
        cached_whole=True,
        key_width=lambda m: m.nope_dim + m.rope_dim,
        rotated=lambda m: m.rope_dim,
        cached=lambda m: m.kv_rank + m.rope_dim,
        summary=lambda m: f" (MLA, latent {m.kv_rank})",
        small=_small_latents,
    ),
    Attention(
        "compressed",
        "compressed attention (DeepSeek-V4): one KV head, and distant positions pooled into one (`describe.mixer_options`)",
        ("q_rank", "head_dim", "window", "compressed"),
        ("window", "selected", "compressed"),
        frameworks=("*",),
        planning_only=True,
        cached_whole=True,
        key_width=lambda m: m.head_width,
        rotated=lambda m: m.rope_dim or m.head_width,
        cached=lambda m: m.head_width,
        summary=lambda m: f" ({m.kv_groups} KV)" if m.kv_groups != m.heads else "",
    ),
)
AttentionName = Annotated[str, NameIn(ATTENTIONS)]

# --- The gradient compressions: their names, the fields of a plan that each one reads, and what it costs on the device.
#
# `COMPRESSIONS` is the only table of compressions. The other parts join by name:
#
#     part       room                  arguments                what it returns
#     wire       lower.compressed      a Request                the collectives of one message, with the bytes of the full buffer
#     buffers    lower.compressed      a Request, bytes sent    bytes of device memory: while collectives run, and at most
#     make       parallel.numerics     options                  a Compressor, which the trainer runs
#     emulate    proof.emulation       a plan, backwards        a CompressedSum: the same sum on one device, written a second time


@dataclass(frozen=True)
class Compression:
    """One way to send gradients, and its parts."""

    name: str
    about: str
    passes: float = 0.0  # over the gradients in device memory, to compress and expand them
    # Torch operators to compress and expand: of each message, of each parameter
    operators: tuple[float, float] = (4.0, 0.0)
    keeps_error: bool = True  # the unsent part of a gradient is added to the next one
    proportional: bool = False  # bytes are proportional to the elements, however they are cut into messages
    selects: bool = False  # selects the largest values of a message
    by_matrix: bool = False  # sends factors of each matrix, so that a message holds whole parameters
    counts_values: bool = False  # how many values are sent depends on the gradients: ranks first exchange a count
    options: tuple[str, ...] = ()  # fields of a plan that it reads
    wire: Callable[..., Any] | None = None
    buffers: Callable[..., Any] | None = None
    make: Callable[..., Any] | None = None
    emulate: Callable[..., Any] | None = None


RATIO, RANK, THRESHOLD = "compression_ratio", "compression_rank", "compression_threshold"
QUANTISED = (35.0, 0.0)
COMPRESSIONS: Registry[Compression] = Registry(
    "gradient compression",
    Compression("none", "gradients as they are", keeps_error=False, proportional=True),
    Compression("fp16", "a cast; summed in 16 bits", 1.5, keeps_error=False, proportional=True),
    Compression("bf16", "a cast; summed in 16 bits", 1.5, keeps_error=False, proportional=True),
    Compression("int8", "x ≈ q·s with s = max|x| / 127", 3.0, QUANTISED),
    Compression("int4", "x ≈ q·s with s = max|x| / 7", 3.0, QUANTISED),
    Compression("top-k", "the largest values and their indices", 8.0, (23.0, 0.0), selects=True, options=(RATIO,)),
    Compression("powersgd", "two factors of each matrix", 4.0, (6.0, 25.0), by_matrix=True, options=(RANK,)),
    Compression("fp8", "x ≈ q·s with q in E4M3", 3.0, QUANTISED),
    Compression("random-k", "values at indices that are equal on all ranks", 4.0, options=(RATIO,)),
    Compression(
        "threshold", "the values above τ times the root mean square", 5.0, counts_values=True, options=(THRESHOLD,)
    ),
    Compression(
        "absolute-threshold",
        "the values above τ, whatever their root mean square; predicted with the share that is expected to pass",
        4.0,
        counts_values=True,
        options=(THRESHOLD, RATIO),
    ),
)
CompressionName = Annotated[str, NameIn(COMPRESSIONS)]

# --- The optimizers: what each one keeps for a parameter, which settings it reads, and its parts.
#
# `OPTIMIZERS` is the only table of optimizers. The memory of a plan and the bytes of the update follow from `states`; the torch wing joins:
#
#     part      room                        arguments                              what it returns
#     make      training.optimizer.make     groups, settings, rate, parallel       the torch optimizer of this rank
#     replay    proof.emulation.update      memory, settings, w, g, rate, r        one update of a tensor in NumPy, written a second time; `memory`
#                                                                                  is its state, `r` rounds after each operation


@dataclass(frozen=True)
class OptimizerKind:
    """One optimizer, and its parts."""

    name: str
    about: str
    states: tuple[str, ...] = ()  # tensors that it keeps for each parameter, as torch names them
    numbers: tuple[str, ...] = ()  # and numbers, one for each parameter
    matrix_states: tuple[str, ...] | None = None  # states of the matrices of layers, if it updates whole matrices
    settings: tuple[str, ...] = ()  # fields of [optimizer] that it reads, besides those that all read
    divides: bool = False  # by the root of squared gradients, which underflow in fp16
    scales_linearly: bool = False  # with the batch, instead of with its root
    make: Callable[..., Any] | None = None
    replay: Callable[..., Any] | None = None

    @property
    def by_matrix(self) -> bool:
        """Whether it updates the matrices of layers as wholes, with other states than the rest."""
        return self.matrix_states is not None

    @property
    def moments(self) -> int:
        """States of a parameter; of a matrix of a layer where they differ."""
        return len(self.states if self.matrix_states is None else self.matrix_states)


MOMENTS, MOMENTUM = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)
ADAM_SETTINGS, DECAY_SETTINGS = ("betas", "epsilon", "scale_with_width"), ("weight_decay", "decay_embeddings")
OPTIMIZERS: Registry[OptimizerKind] = Registry(
    "optimizer",
    OptimizerKind(
        "adamw",
        "Adam with decoupled weight decay",
        MOMENTS,
        ("step",),
        settings=ADAM_SETTINGS + DECAY_SETTINGS,
        divides=True,
    ),
    OptimizerKind("adam", "Adam without weight decay", MOMENTS, ("step",), settings=ADAM_SETTINGS, divides=True),
    OptimizerKind(
        "muon",
        "orthogonalised momentum for the matrices of layers, AdamW for other parameters",
        MOMENTS,
        ("step",),
        MOMENTUM,
        (*ADAM_SETTINGS, *DECAY_SETTINGS, "momentum"),
        divides=True,
    ),
    OptimizerKind("momentum", "SGD with momentum", MOMENTUM, settings=("momentum",), scales_linearly=True),
    OptimizerKind("sgd", "stochastic gradient descent", scales_linearly=True),
)
OptimizerName = Annotated[str, NameIn(OPTIMIZERS)]


def readers(setting: str) -> tuple[str, ...]:
    """The optimizers that read a field of `[optimizer]`."""
    return tuple(name for name, kind in OPTIMIZERS.items() if setting in kind.settings)
