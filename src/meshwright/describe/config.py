"""A configuration: the sections of a plan file or a run file, merged from names, files and overrides.

    extends = "base.toml"                    # a file, relative to this one: read first, then changed by this one
    model = "llama3-70b"                     # a catalog name, or the path of a Hugging Face config.json
    cluster = "cluster.toml"                 # a catalog name, or a file with a [cluster]: what `calibrate` writes
    stack = "megatron-core"
    [cluster]                                # or a table, which may start from a catalog entry or from such a file
    extends = "dgx-h100"
    gpus = 64
    [workload]
    batch = 1024
    [plan]
    tp = 8
    [data]                                   # what a run trains on; only `train` reads it
    path = "tokens"
    [optimizer]                              # and how: likewise [checkpoint] and [run]
    learning_rate = 3e-4

Later values win, key by key: catalog entry, then `extends` files from the first base on, then the file, then each `--set a.b=c`.
A section that names an entry (a string, or a table with `extends`) replaces what was there; a table without `extends` changes
some of its keys. The origin of every value is kept. A cluster without `gpus` takes the plan's world size where its levels
reach that far.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

from meshwright.describe import catalog, legality, plugins
from meshwright.describe.adapter import Adapter
from meshwright.describe.base import SECTIONS, Described
from meshwright.describe.cluster import Cluster
from meshwright.describe.draft import HERE, NAMED, Draft, leaves
from meshwright.describe.files import parse_toml
from meshwright.describe.legality import Case
from meshwright.describe.model import Model
from meshwright.describe.optimizer import Optimizer
from meshwright.describe.plan import Plan
from meshwright.describe.plan_fields import Dtype
from meshwright.describe.run import Checkpoint, Data, Run
from meshwright.describe.shown import Shown
from meshwright.describe.stack import Stack
from meshwright.describe.toml_values import to_toml_value
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError

CLASSES: dict[str, type[Described]] = {
    "model": Model,
    "cluster": Cluster,
    "stack": Stack,
    "workload": Workload,
    "plan": Plan,
    "adapter": Adapter,
    "data": Data,
    "optimizer": Optimizer,
    "checkpoint": Checkpoint,
    "run": Run,
}
PRECISIONS = ("workload.precision", "plan.param_dtype", "plan.grad_dtype")
CHOSEN_BY_DEVICE = "the device"  # origin of a precision that no file names
Part = str | dict[str, Any] | Described


@dataclass(frozen=True)
class Config(Shown):
    """The described objects, and the origin of every value that is not a default (by dotted path)."""

    model: Model
    cluster: Cluster
    plan: Plan = field(default_factory=Plan)
    workload: Workload = field(default_factory=Workload)
    stack: Stack = field(default_factory=Stack)
    origins: dict[str, str] = field(default_factory=dict, compare=False)
    assumed: tuple[str, ...] = field(default=(), compare=False)  # what nobody said and the answer depends on
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    run: Run = field(default_factory=Run)

    def __post_init__(self) -> None:
        """Copy `ema` of the optimizer to the workload, which counts its memory."""
        if self.optimizer.ema and not self.workload.ema:
            object.__setattr__(self, "workload", self.workload.but(ema=True))
            self.origins.setdefault("workload.ema", "optimizer.ema")

    @classmethod
    def from_parts(
        cls,
        model: Part = "",
        cluster: Part = "",
        stack: Part = "default",
        workload: Part | None = None,
        plan: Part | None = None,
        overrides: Iterable[str] = (),
        **of_run: Part | None,
    ) -> Self:
        """Merge names, tables or objects, one for each section."""
        draft = Draft()
        sections = {"model": model, "cluster": cluster, "stack": stack, "workload": workload, "plan": plan, **of_run}
        for section, part in sections.items():
            if part:
                draft.merge(section, part.as_dict() if isinstance(part, Described) else part, "given", HERE)
        return cls._resolved(draft, overrides)

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Self:
        """Build a configuration from nested tables that another program sent: names are catalog names, and no file is read."""
        if "extends" in document:
            what = "extends names a file, and a plan sent as JSON cannot read files"
            why = "Only the names of the catalog may be extended, inside a section"
            raise MeshwrightError("MW-CONF-012", what, why=why, fix="send the sections of that file in full")
        draft = Draft(files=False)
        for section, part in document.items():
            if part is not None and part != "":
                draft.merge(section, part, "the request", HERE)
        return cls._resolved(draft, ())

    @classmethod
    def _resolved(cls, draft: Draft, overrides: Iterable[str]) -> Self:
        # `run.start_from` names a model
        words = sorted(overrides, key=lambda word: not word.strip().startswith("run."))
        of_run = sum(word.strip().startswith("run.") for word in words)
        for word in words[:of_run]:
            draft.override(word)
        draft.model_from_start()
        for word in words[of_run:]:
            draft.override(word)
        if "stack" not in draft.tables:
            draft.merge("stack", "default", "default", HERE)
        for section in ("model", "cluster"):
            if section not in draft.tables:
                raise MeshwrightError(
                    "MW-CONF-002",
                    f"[{section}] is missing",
                    why="It has no default",
                    valid=catalog.names(NAMED[section]),
                    fix=f"--set {section}=NAME" if section == "model" else "--cluster NAME",
                )
        for section in SECTIONS:
            draft.tables.setdefault(section, {})
        inside = draft.tables["model"].pop("adapter", {})  # of a model that was given as an object
        draft.tables["adapter"] = {**inside, **draft.tables["adapter"]}
        draft.refuse_bare_names()
        parts: dict[str, Any] = {name: CLASSES[name](**draft.tables[name]) for name in SECTIONS}
        if (adapter := parts.pop("adapter")) != Adapter():
            parts["model"] = parts["model"].but(adapter=adapter)
        config = cls(**parts, origins=draft.origins)
        peak = config.cluster.accelerator.peak
        if peak and "bf16" not in peak:
            config = config.in_precision("fp16" if "fp16" in peak else "fp32")
        return config._with_plan_size()

    def but(self, **changes: Any) -> Self:
        """The configuration with some of its parts replaced."""
        if "adapter" in changes:
            changes["model"] = changes.get("model", self.model).but(adapter=changes.pop("adapter"))
        return replace(self, **changes)

    @property
    def adapter(self) -> Adapter:
        """The section [adapter], which is a part of the model: it says which of its parameters train, and adds some."""
        return self.model.adapter

    def in_precision(self, dtype: Dtype) -> Self:
        """The configuration in a precision that its device computes; unchanged if the user chose one."""
        ours = self.origin("workload.precision") == CHOSEN_BY_DEVICE
        chosen = not ours and any(name in self.origins for name in PRECISIONS)
        if chosen or (not ours and (self.workload.precision, self.plan.param_dtype) != ("bf16", "bf16")):
            return self
        return self.but(
            workload=self.workload.but(precision=dtype),
            plan=self.plan.but(param_dtype=dtype),
            origins={**self.origins, "workload.precision": CHOSEN_BY_DEVICE},
        )

    @property
    def precision_note(self) -> str:
        """Says that the device decided; '' if the user did, or if nothing had to be decided."""
        if self.origin("workload.precision") != CHOSEN_BY_DEVICE:
            return ""
        dtype = self.workload.precision
        return f"precision {dtype}: the plan names none, and the device computes it (workload.precision and plan.param_dtype choose one)"

    def _with_plan_size(self) -> Self:
        """Give a cluster without `gpus` the size of the plan, if its levels reach that far."""
        world = self.plan.world
        reaches = len(self.cluster.levels) > 1 or world <= self.cluster.node_size
        planned = any(path.startswith("plan.") for path in self.origins if path not in PRECISIONS)
        if self.cluster.gpus or not planned or not reaches:
            return self
        origins = {**self.origins, "cluster.gpus": "the plan's world size"}
        return self.but(cluster=self.cluster.with_gpus(world), origins=origins)

    def check(self) -> Self:
        """Raise the first rule of `describe.legality` that the plan breaks here; return the configuration otherwise."""
        self._refuse_illegal()
        return self

    def check_trainable(self) -> Self:
        """Raise if the plan is illegal, or if `train` and `verify` do not run it: one predicate decides for both."""
        self._refuse_illegal(trains=True)
        self.optimizer.check(self.workload, self.plan)
        return self

    def _refuse_illegal(self, trains: bool = False) -> None:
        """Raise the first rule that the plan breaks. In place of a fix that undoes a data-parallel degree of `--set`, other GPUs are offered."""

        def problem(cluster: Cluster) -> MeshwrightError | None:
            return legality.problem(Case(self.plan, self.model, self.workload, cluster, self.stack, trains, trains))

        error, world = problem(self.cluster), self.plan.world
        if error is None:
            return
        set_again = [name for name in ("replicate", "shard") if self.origin(f"plan.{name}") == "--set"]
        if any(f"plan.{name}=" in error.fix for name in set_again):
            fix = error.fix if problem(self.cluster.with_gpus(world)) else f"--set cluster.gpus={world}"
            error = MeshwrightError(error.code, error.what, why=error.why, valid=error.valid, fix=fix)
        raise error

    def parts(self) -> dict[str, Any]:
        out = {name: getattr(self, name) for name in SECTIONS}
        return out if self.adapter == Adapter() else {**out, "model": self.model.but(adapter=Adapter())}

    def origin(self, path: str) -> str:
        """Return the origin of the value at a dotted path."""
        return self.origins.get(path, "default")

    def values(self) -> dict[str, Any]:
        """Every value by its dotted path, defaults included."""
        return {path: value for name, part in self.parts().items() for path, value in leaves(part.model_dump(), name)}

    def to_dict(self) -> dict[str, Any]:
        """The sections as in a plan file: a name where the catalog has the same entry."""
        return {name: to_toml_value(part) for name, part in self.parts().items()}

    def to_toml(self) -> str:
        """A file that `load` reads back to the same configuration."""
        import tomli_w

        sections = {name: value for name, value in self.to_dict().items() if value}
        return tomli_w.dumps({**({"plugins": plugins.LOADED} if plugins.LOADED else {}), **sections})


class Configured:
    """An object that answers a question about a configuration: the parts of its `config` under their own names."""

    config: Config

    @property
    def model(self) -> Model:
        """The model of the configuration."""
        return self.config.model

    @property
    def cluster(self) -> Cluster:
        """The cluster of the configuration."""
        return self.config.cluster

    @property
    def workload(self) -> Workload:
        """The workload of the configuration."""
        return self.config.workload

    @property
    def stack(self) -> Stack:
        """The training stack of the configuration."""
        return self.config.stack


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load a TOML file with the files that it extends, and apply `--set` overrides."""
    draft = Draft()
    draft.merge_file(Path(path))
    return Config._resolved(draft, overrides)


def load_plan(source: str | Path | dict[str, Any], overrides: Iterable[str] = ()) -> Plan:
    """Load a plan from a file, which may lack other sections, or from a table of its fields."""
    draft = Draft()
    if isinstance(source, dict):
        draft.merge("plan", source, "plan", HERE)
    else:
        draft.merge_file(Path(source))
    check_section(draft, "plan", source, "[plan]\ntp = 8")
    for word in overrides:
        draft.override(word)
    return Plan(**draft.tables["plan"])


def check_section(draft: Draft, section: str, source: object, fix: str) -> None:
    """Raise if the files of a draft lack a section."""
    if section not in draft.tables:
        raise MeshwrightError(
            "MW-CONF-002", f"'{source}' has no [{section}]", why=f"There is no {section} to read", fix=fix
        )


def load_model(name: str | Path) -> Model:
    """Load a model by catalog name, from a Hugging Face config.json or its folder, or from a run file, which may lack other sections."""
    draft = Draft()
    if str(name).endswith(".toml"):
        draft.merge_file(Path(name))
        draft.model_from_start()
    else:
        draft.merge("model", str(name), "given", HERE)
    check_section(draft, "model", name, 'model = "llama3-8b"')
    return Model(**draft.tables["model"])


def load_cluster(name: str | Path) -> Cluster:
    """Load a cluster by catalog name or from a TOML file with a [cluster]."""
    draft = Draft()
    draft.merge("cluster", str(name), "given", HERE)
    return Cluster(**draft.tables["cluster"])


def cluster_table(text: str) -> str | dict[str, Any]:
    """Parse the [cluster] of a TOML text: a catalog name, or a table of its values. No file is read."""
    document = parse_toml(text, "the text")
    section = document.get("cluster", {})
    if not isinstance(section, dict) or not section:
        what = "the text has no [cluster]"
        why = "There is no cluster to read"
        raise MeshwrightError("MW-CONF-002", what, why=why, fix='[cluster]\nextends = "dgx-h100"')
    draft = Draft(files=False)
    draft.merge("cluster", section, "the request", HERE)
    return to_toml_value(Cluster(**draft.tables["cluster"]))


class Asked(TypedDict, total=False):
    """What a command or a Python function may be asked beside its model and cluster. All but `plan` replace what the plan file says."""

    plan: Part | Path | None  # a plan file, a table or a `Plan`
    stack: Part
    workload: Part | None
    nodes: int
    gpus: int
    batch: int
    seq: int
    tokens: str | float
    set: Sequence[str]  # overrides ("plan.tp=8"), which come last


def configure(model: Part | Path | Config = "", cluster: Part | Path = "", **asked: Unpack[Asked]) -> Config:
    """Build the configuration that the arguments of a command or of a Python function describe.

    `model` is a plan file (`.toml`), a catalog name, a Hugging Face `config.json`, a table, a `Model`, or a whole `Config`; `cluster` is a
    catalog name, a TOML file with a [cluster], a table or a `Cluster`.
    """
    if unexpected := asked.keys() - Asked.__annotations__.keys():
        raise TypeError(f"unexpected argument {min(unexpected)!r}")
    draft, plan = Draft(), asked.get("plan")
    if isinstance(model, Config):
        for section, part in model.parts().items():
            draft.merge(section, part.as_dict(), "given", HERE)
        draft.origins.update(model.origins)
        model = ""
    if isinstance(plan, str | Path) and plan:
        draft.merge_file(Path(plan))
        plan = None
    elif is_plan_file(model):
        draft.merge_file(Path(str(model)))
        model = ""
    parts: dict[str, Any] = {"model": model, "cluster": cluster, "stack": asked.get("stack")}
    for section, part in {**parts, "workload": asked.get("workload"), "plan": plan}.items():
        if part:
            if isinstance(part, Described):  # an object replaces the section; a table changes some of its keys
                draft.clear(section)
                part = part.as_dict()
            draft.merge(section, str(part) if isinstance(part, Path) else part, "given", HERE)
    tokens, nodes, gpus = asked.get("tokens"), asked.get("nodes", 0), asked.get("gpus", 0)
    sizes = {"batch": asked.get("batch"), "seq": asked.get("seq"), "tokens": tokens and f'"{tokens}"'}
    words = [f"workload.{name}={value}" for name, value in sizes.items() if value]
    config = Config._resolved(draft, [*words, *asked.get("set", ())])
    if nodes and gpus:
        raise MeshwrightError("MW-CLI-003", "--nodes and --gpus both say how many devices", fix="give one of them")
    if nodes or gpus:
        config = config.but(cluster=config.cluster.with_nodes(nodes) if nodes else config.cluster.with_gpus(gpus))
    return config


def is_plan_file(model: object) -> bool:
    """Whether the argument `model` names a plan file: a path, or a string that ends in .toml."""
    return (
        str(model).endswith(".toml") if isinstance(model, str) else isinstance(model, Path) and model.suffix != ".json"
    )


def diff(a: Config, b: Config) -> dict[str, tuple[Any, Any]]:
    """Values that differ, by dotted path; None where one side has no such value."""
    left, right = a.values(), b.values()
    return {
        path: (left.get(path), right.get(path))
        for path in {**left, **right}
        if left.get(path) != right.get(path) or (path in left) != (path in right)
    }
