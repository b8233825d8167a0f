"""The table of a framework's settings: which key means which fact, with which words.

    Key("parallelism.tensor_parallel_degree", "tp", was=("training.tensor_parallel_degree",), default=1)

One table serves both directions, so reading and writing cannot disagree: `read_facts` turns settings into facts, `write_settings` turns
facts into settings. A *fact* is a value under a neutral name (`facts.FACTS` lists them all). `words` translates values that the framework
spells in its own way; `was` has older spellings, which are read but never written. Keys that no row of the table names are sorted by
patterns: those that change neither time nor memory (`NO_EFFECT`, by name, for all frameworks), those that may change them in a way that the
cost model does not have, and unknown ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from meshwright.interop.facts import FACTS, fact_value

if TYPE_CHECKING:
    from meshwright.describe.model import Model

Facts = dict[str, Any]
Settings = dict[str, Any]

OPEN_EXPANSION = re.compile(r"\$[\w({]|`")
LEAST_LETTERS, MOST_WRONG_LETTERS = 6, 2
# A key that no table names matters if it speaks of one of these.
MATTERS = re.compile(
    r"para|degree|shard|replicat|pipeline|stage|virtual|micro|batch_?size|num_?tokens|seq_?len|max_length|context_len|recompute|"
    r"checkpoint_activ|activation|offload|zero|fsdp|dtype|precision|bf16|fp16|fp8|fp4|mxfp|expert|num_layers|n_layers|hidden_size|"
    r"num_attention_heads|kv_heads|vocab_size|pad\w*_vocab|bucket|freeze|frozen|[a-z][eg]lu$|glu_activation|sliding_window|deepspeed_config|lora|adapter|load_in|optimizer|nodes|gpus|world|_size$|(^|[._-])(tp|pp|cp|ep|dp|vp|sp)([._-]|$)"
)
# Last parts of keys that change neither time nor memory of a step: hyperparameters of the update, lengths of a run, names and paths, logging.
NO_EFFECT = re.compile(
    r"(\w+_)?seed|(\w+_)?lr(_\w+)?|learning_rate|(lr_)?(warmup|decay|cooldown)(_\w+)?|(\w+_)?betas?[12]?|(\w+_)?eps(ilon)?|weight_decay|wd|"
    r"momentum|nesterov|loss_scale(_window)?|initial_(loss_scale|scale_power)|min_loss_scale|hysteresis|rope_theta|rotary_base|init_method_std|"
    r"initializer_range|norm_topk_prob|routed_scaling_factor|label_smoothing(_factor)?|(\w+_)?(loss|aux_loss|z_loss)_(coeff?|coefficient|weight)|"
    r"((max|train|num|num_train|total)_)?(steps|iters|samples|epochs)|max_duration|(save|eval|log|logging)_(interval|steps|iters|strategy|freq|every)|"
    r"save|save_total_limit|load|resume_from_checkpoint|(wandb|tensorboard|mlflow|comet|log|logging|report)(_\w+)?|steps_per_print|verbose|"
    r"(run|exp|experiment|project|job)_name|tokenizer(_(type|model|path|name))?|vocab_file|merge_file|(?!use_|\w*model)(\w+_)?(path|dir|folder)|split|shuffle|"
    r"num_machines|machine_rank|main_process_(ip|port)|main_training_function|rdzv_\w+|same_network|compute_environment|deepspeed_multinode_launcher|"
    r"config_file|trust_remote_code|recipe|target|component|architectures|model_type|imports|print_args|enable_straggler_on_startup|"
    r"master_(addr|port)|node_rank|local_rank|exit_\w+|special_tokens|pad_token(_id)?|chat_template(_\w+)?"
)


@dataclass(frozen=True)
class Key:
    """One key of a framework and the fact that it sets."""

    name: str
    fact: str
    words: Mapping[Any, Any] | None = None
    match: tuple[tuple[str, Any], ...] = ()  # patterns of text and the fact they mean, for what `words` lacks
    was: tuple[str, ...] = ()
    default: Any = None  # the value of the fact where the key is absent; None: the fact is then unknown
    always: bool = False  # written also where it equals the default
    read_only: bool = False
    unset: Sequence[Any] = ()  # values that state nothing, such as "auto"

    def __post_init__(self) -> None:
        assert self.fact in FACTS, f"{self.name}: '{self.fact}' is a fact without a meaning"

    def decode(self, value: Any) -> Any:
        """The fact of a value of the framework; `INVALID` if the table has no such word."""
        if self.words is not None:
            spelled = [value, value.lower()] if isinstance(value, str) else [value]
            for each in spelled:
                if isinstance(each, str | int | float | bool | None) and each in self.words:
                    return self.words[each]
        if self.match:
            text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            return next((fact for pattern, fact in self.match if re.search(pattern, text, re.IGNORECASE)), INVALID)
        if self.words is not None:
            return INVALID
        found = fact_value(self.fact, value)
        return INVALID if found is None else found

    def only_read(self) -> Key:
        """The row in the table of another framework, which reads the key, has another default and never writes it."""
        return replace(self, default=None, always=False, read_only=True)

    @property
    def writable(self) -> bool:
        return not self.read_only and (self.words is not None or not self.match)

    def encode(self, fact: Any) -> Any:
        """The framework's value of a fact; `INVALID` if the framework has no word for it."""
        if self.words is None:
            return fact
        return next((word for word, meaning in self.words.items() if meaning == fact), INVALID)


class _Invalid:
    def __repr__(self) -> str:
        return "INVALID"


INVALID = _Invalid()


@dataclass(frozen=True)
class Table:
    """The keys of a framework, and patterns of keys that set no fact."""

    keys: Sequence[Key]
    not_modelled: tuple[str, ...] = ()  # time or memory may depend on them, in a way that the cost model does not have
    derive: Callable[[Facts], None] = lambda facts: None  # facts that follow from several keys
    restate: Callable[[Facts], None] = lambda facts: None  # its inverse, before writing

    @property
    def known_as(self) -> str:
        """The framework in the table of known key names, which has the name of its table of keys; "": it is not there."""
        return getattr(self.keys, "name", "")

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(name for key in self.keys for name in (key.name, *key.was))

    def facts(self) -> set[str]:
        return {key.fact for key in self.keys if key.writable}

    def meant(self, name: str) -> str:
        """The key that an unknown one may be a misspelling of; "": none."""
        return next((each for each in sorted(self.names) if is_misspelling(name, each)), "")

    def kind_of(self, name: str) -> str:
        """Classify an unlisted key: "no effect", "not modelled", "unknown" (it could matter) or "ignored"."""
        last = last_part(name)
        if NO_EFFECT.fullmatch(last):
            return "no effect"
        known = known_keys(self.known_as)
        if last not in known and any(is_misspelling(last, each, 2) for each in known):
            return "unknown"
        if any(is_misspelling(name, each) for each in self.names if last not in known or last_part(each) == last):
            return "unknown"
        matters = MATTERS.search(name.lower().replace("-", "_")) is not None
        if known and last not in known and matters:
            return "unknown"
        if any(re.search(pattern, name) for pattern in self.not_modelled):
            return "not modelled"
        return "unknown" if matters else "ignored"


@dataclass
class Understood:
    """Settings as read: facts by name, the key behind each, and the keys that set no fact, by kind."""

    facts: Facts = field(default_factory=dict)
    stated: Facts = field(default_factory=dict)  # by a key, before others are derived
    sources: dict[str, str] = field(default_factory=dict)  # fact → key
    used: dict[str, Any] = field(default_factory=dict)  # key → value, of keys that set a fact
    others: dict[str, list[str]] = field(default_factory=dict)  # kind → keys
    open_facts: dict[str, str] = field(default_factory=dict)  # fact → key whose value the file leaves open

    @property
    def unknown(self) -> list[str]:
        return self.others.get("unknown", [])

    def kind_of(self, name: str) -> str:
        """The kind of a key that sets no fact, or has a value that is not known; "" if it sets one."""
        return next(
            (kind for kind, keys in self.others.items() if name in {key.partition(" = ")[0] for key in keys}), ""
        )

    def note(self, kind: str, text: str) -> None:
        self.others.setdefault(kind, []).append(text)


def read_facts(table: Table, settings: Mapping[str, Any]) -> Understood:
    """The facts in settings. A key later in the table overrides an earlier one of the same fact."""
    out = Understood()
    for key in table.keys:
        present = next((name for name in (key.name, *key.was) if name in settings), None)
        if present is None:
            if key.default is not None:
                out.facts.setdefault(key.fact, key.default)
            continue
        value = plain(settings[present])
        out.used[present] = value
        spelled = value not in key.unset and (value is not None or (key.words is not None and None in key.words))
        fact = key.decode(value) if spelled else None
        if is_open(value) and not isinstance(fact, str):
            out.note("left open", f"{present} = {str(value)[:60]}")
            out.open_facts[key.fact] = present
        elif fact is INVALID:
            out.note("unknown", f"{present} = {str(value)[:60]}")
        elif fact is not None:
            out.facts[key.fact], out.sources[key.fact] = fact, present
        elif key.default is not None:
            out.facts.setdefault(key.fact, key.default)
    for name in settings:
        if name not in table.names:
            states_nothing = settings[name] is None  # `fsdp_config:` without a value
            out.note("no effect" if states_nothing else table.kind_of(name), name)
    out.stated = {fact: out.facts[fact] for fact in out.sources}
    table.derive(out.facts)
    return out


def write_settings(table: Table, facts: Facts) -> tuple[Settings, list[str]]:
    """The settings that say these facts, and the names of facts that the framework has no word for."""
    facts = dict(facts)
    table.restate(facts)
    out: Settings = {}
    inexpressible: list[str] = []
    for key in table.keys:
        fact = facts.get(key.fact)
        if not key.writable or fact is None or key.name in out or (fact == key.default and not key.always):
            continue
        value = key.encode(fact)
        if value is not INVALID:
            out[key.name] = value
        elif not any(k.encode(fact) is not INVALID for k in table.keys if k.fact == key.fact and k is not key):
            inexpressible.append(key.fact)
    return out, inexpressible


KNOWN_KEYS = Path(__file__).parent / "frameworks" / "known_keys.json"


@cache
def known_keys(framework: str) -> frozenset[str]:
    """Last parts of the keys that a framework's packages define (`benchmarks/framework_keys.py` writes the table)."""
    table = json.loads(KNOWN_KEYS.read_text("utf-8")) if framework else {}
    return frozenset(table.get(framework, {}).get("keys", "").split())


def last_part(name: str) -> str:
    """The last part of a key, as the table of known keys has it: `--DDP-impl` is ddp_impl, `model._target_` is target_."""
    return name.lstrip("-").rpartition(".")[2].replace("-", "_").lower().lstrip("_")


def is_misspelling(name: str, known: str, least: int = LEAST_LETTERS) -> bool:
    """Whether two names of at least so many letters differ in one place only, by at most two letters: `context_parapllel_size`.

    A name that is shorter than six letters may differ by one."""
    if name == known or abs(len(name) - len(known)) > 1 or len(name) < least:
        return False
    if "." in name and re.sub(r"\.\d+\.", ".0.", name) == re.sub(r"\.\d+\.", ".0.", known):  # two entries of a list
        return False
    shorter = min(len(name), len(known))
    start = next((i for i in range(shorter) if name[i] != known[i]), shorter)
    end = next((i for i in range(shorter - start) if name[-1 - i] != known[-1 - i]), shorter - start)
    parts = name[start : len(name) - end], known[start : len(known) - end]
    most = MOST_WRONG_LETTERS if len(name) >= LEAST_LETTERS else 1
    return all(len(part) <= most for part in parts)


def is_open(value: Any) -> bool:
    """Whether a value is an expansion that the file leaves open: `$SEQ`, `$(nproc)` or `${oc.env:SEQ}`."""
    return isinstance(value, str) and OPEN_EXPANSION.search(value) is not None


def plain(value: Any) -> Any:
    """A number or a flag that a file has as text becomes a number or a flag."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"[+-]?\d{1,18}", text):
        return int(text)
    if re.fullmatch(r"[+-]?(\d+\.\d*|\.\d+|\d+(\.\d+)?[eE][+-]?\d{1,3})", text):
        number = float(text)
        return int(number) if number.is_integer() else number
    return text


def flags(args: Sequence[str]) -> Settings:
    """Command-line flags as settings: `--name value`, `--name=value`, `--name` alone is true; the last one wins."""
    out: Settings = {}
    name = ""
    for word in args:
        if word.startswith("--"):
            name, sign, value = word.partition("=")
            if len(name) == 2:  # the end of a list of flags
                name = ""
            else:
                out[name] = value if sign else True
        elif name:
            held = out[name]
            out[name] = word if held is True else [*held, word] if isinstance(held, list) else [held, word]
    return out


def flattened(tables: Mapping[str, Any], prefix: str = "") -> Settings:
    """Nested tables as flat keys joined with dots."""
    out: Settings = {}
    for name, value in tables.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            out |= flattened(value, f"{path}.")
        else:
            out[path] = value
    return out


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Flat keys joined with dots as nested tables."""
    out: dict[str, Any] = {}
    for path, value in settings.items():
        *folders, name = path.split(".")
        node = out
        for folder in folders:
            inner = node.setdefault(folder, {})
            node = inner if isinstance(inner, dict) else node
        node[name] = value
    return out


# --- What is wrong with settings, found before a plan is made of them.


@dataclass(frozen=True)
class SettingsProblem:
    """One contradiction in settings. `error`: the framework refuses them, or trains something else; `note`: worth knowing."""

    code: str
    what: str
    why: str = ""
    fix: str = ""
    severity: Literal["error", "warning", "note"] = "error"

    def as_dict(self) -> dict[str, Any]:
        return {"code": self.code, "severity": self.severity, "what": self.what, "why": self.why, "fix": self.fix}


# --- What the commands need to know of a framework: its names, its table of keys, its training stack and the form of its files.
#
# The part `program`, the command that starts it, is joined by name in `view.launch_files.frameworks`.

Form = Literal["toml", "yaml", "json", "args", "python"]


@dataclass(frozen=True)
class Framework:
    """One framework. `stack` is the entry of the catalog with its behaviour and its abilities."""

    name: str  # as on the command line
    title: str  # as its makers write it
    stack: str
    form: Form
    table: Table
    names: tuple[str, ...] = ()  # further names in collections of recipes
    # Flags name keys with this prefix removed; "": the keys of the table have the prefix themselves.
    flag_prefix: str = "--"
    splits_evenly: bool = False  # every stage has the same number of layers unless the settings name them
    layout_in_code: bool = False  # settings are a program, which may set the pipeline's layout without a key
    ends_are_layers: bool = False  # the embedding and the head may fill a pipeline stage alone
    expert_tp: Literal["tp", "one"] = "one"  # inside experts where it is not set
    old_paths: str = ""  # pattern of the paths of recipes from versions in which unset meant tensor parallelism
    # Multi-token prediction is trained where the model has it, unless the settings switch it off.
    trains_mtp: bool = False
    # The pipeline is torch.distributed.pipelining, which keeps buffers for all micro-batches.
    torch_pipeline: bool = False
    # Pattern of the paths of recipes whose number of GPUs is the smallest that their degrees allow.
    least_gpus: str = ""
    # FSDP reduces gradients once per step, not after each micro-batch, unless settings say so.
    defers_reduction: bool = False
    launcher_shards: bool = False  # ZeRO or FSDP may be set in a file of the launcher, apart from the settings
    vocab_of_tokenizer: bool = False  # settings need not state the size of the vocabulary
    dropout: float = 0.0  # what a script that states no dropout drops
    on_gpus: bool = True  # False: most recipes are for TPUs
    usual_cluster: str = ""  # entry of the catalog with the GPUs on which the framework's own recipes are run
    comment: str = ""  # the first line of a written file
    package: str = ""  # what pip installs; "": its name
    tried: tuple[str, ...] = ()  # versions of the package whose own parser was given what we write (tests/frameworks)
    tried_part: str = ""  # what that parser read; "": all of it
    takes_flags: bool = False  # also where its usual form is a file
    python: Callable[[Settings], str] | None = None  # the text of settings that are a program
    # Settings of a model that the table has no rows for; raises if the framework does not have the model.
    model_settings: Callable[[Model], Settings] = lambda model: {}
    left_to_script: tuple[str, ...] = ()  # fields of a plan that its settings leave to the training script
    # Of a plan, the paths of plan file and run folder, and the steps between checkpoints (`view.launch_files`).
    program: Callable[..., Any] | None = None

    @property
    def versions(self) -> str:
        """The package and its versions that were tried: "megatron-core 0.17.0 and 0.19.0"."""
        package = self.name if ":" in self.package or not self.package else self.package
        return f"{package} {' and '.join(self.tried)}"

    def at(self, path: str) -> Framework:
        """The framework in the version that a recipe at this path of its repository belongs to."""
        return replace(self, expert_tp="tp") if self.old_paths and re.search(self.old_paths, path) else self

    def names_least_gpus(self, path: str) -> bool:
        """Whether the number of GPUs of a recipe at this path of the framework's repository is the smallest that its degrees allow."""
        return bool(self.least_gpus and re.search(self.least_gpus, path))
