"""How to run somebody's training on one device: the same settings with all degrees 1 and the same global batch by accumulation.

The settings are read to a plan (`interop`); plan and reference are written in the framework's keys, and keys in which the two differ are changed
in the user's settings. All others stay as they are: precision, sequence, seed, data. What was changed is read back; what the settings cannot say
is listed, to be done in the script.

A model too large for one device is shrunk as `verify` shrinks it (`proof.small`), and the plan with it, to at most 8 processes. Its vocabulary stays:
the data's tokens need it.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.describe import catalog
from meshwright.describe.config import Config, load_model
from meshwright.describe.files import read_text, write_text
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError, shown
from meshwright.interop.files import SCRIPTS, parse, recognise, script_flags
from meshwright.interop.keys import INVALID, Framework, Key, Settings, plain
from meshwright.interop.migrate import has_model
from meshwright.interop.migrated_keys import FIELDS, names_model
from meshwright.interop.reading import SettingsReading, merged_settings, raise_first, understand
from meshwright.interop.shapes import ShapeKeys
from meshwright.interop.write import ENDINGS, settings_of, text_of
from meshwright.predict.prediction import predict
from meshwright.proof.small import differences, small_copy

RANKS = 8
MEMORY = 80.0 * 2**30
DEGREES = ("replicate", "shard", "tp", "cp", "pp", "ep")
CLUSTER = "dgx-h100"  # counts bytes; its speed does not matter
ONE_DEVICE = (
    "plan.tp", "plan.sp", "plan.cp", "plan.cp_kind", "plan.pp", "plan.ep", "plan.expert_tp", "plan.replicate", "plan.shard", "plan.zero",
    "plan.reshard", "plan.schedule", "plan.virtual", "plan.layers_per_stage", "plan.microbatch", "plan.overlap", "plan.prefetch", "workload.batch",
)  # fmt: skip
DEEPSPEED_FILE = "deepspeed"  # of Trainer's arguments: it stays, and its numerics with it
STAGE_LAYERS = set(FIELDS["plan.layers_per_stage"].split())
# Facts that say how the ranks share the work.
LAYOUT = {fact for field in ONE_DEVICE for fact in FIELDS[field].split()} | {"overlap_gather", "overlap_p2p"}
LAYOUT -= {"microbatch_tokens", "batch_tokens", "ring_attention"}
# Facts that stay as the user has them, where a framework writes them with another layout in another way.
KEPT_FACTS = {
    fact for field in ("workload.precision", "workload.optimizer", "plan.param_dtype", "plan.master", "plan.grad_dtype", "plan.state_dtype",
                       "plan.recompute", "plan.bucket", "plan.offload", "stack.saves", "model.name") for fact in FIELDS[field].split()
}  # fmt: skip
SHAPE = ("hidden", "layers", "heads", "kv_groups", "ffn", "experts")
KEPT = ("param_dtype", "grad_dtype", "state_dtype", "master", "recompute")
COMMANDS = {  # by framework; for others: train.py with the settings
    "torchtitan": "torchrun --nproc-per-node {world} -m torchtitan.train --job.config_file {file}",
    "deepspeed": "torchrun --nproc-per-node {world} train.py --deepspeed --deepspeed_config {file}",
    "nanotron": "torchrun --nproc-per-node {world} run_train.py --config-file {file}",
    "automodel": "torchrun --nproc-per-node {world} -m nemo_automodel.cli.app {file}",
    "axolotl": "torchrun --nproc-per-node {world} -m axolotl.cli.train {file}",
    "trl": "torchrun --nproc-per-node {world} -m trl.scripts.sft --config {file}",
    "llama-factory": "torchrun --nproc-per-node {world} -m llamafactory.launcher {file}",
    "accelerate": "accelerate launch --config_file {file} train.py",
    "megatron-lm": "torchrun --nproc-per-node {world} pretrain_gpt.py $(cat {file})",
}


@dataclass(frozen=True)
class ComparedRun:
    """Settings of one of the two runs: the reference or, of a shrunk model, the candidate."""

    name: str
    file: str
    text: str
    settings: Settings
    args: bool  # the text is a script
    world: int
    changes: tuple[str, ...]
    by_hand: tuple[str, ...]  # what the settings cannot say
    command: str


@dataclass(frozen=True)
class ReferencePlan:
    """How to compare a training with one device."""

    framework: Framework
    candidate: ComparedRun
    reference: ComparedRun
    notes: tuple[str, ...]

    @property
    def commands(self) -> list[str]:
        record = "meshwright check record --out"
        return [
            f"{record} one --perturbed 2 -- {self.reference.command}",
            f"{record} many -- {self.candidate.command}",
            "meshwright check compare one many",
        ]

    def text(self) -> str:
        lines = [f"{self.framework.title}: {self.candidate.world} devices against one", *self.notes]
        for run in (self.reference, self.candidate):
            for title, rows in (("changes in the settings", run.changes), ("in the script, by hand", run.by_hand)):
                lines += [f"\n{run.name}: {title}", *(f"  {row}" for row in rows)] if rows else []
        return "\n".join([*lines, "", *self.commands])

    def write(self, folder: Path) -> list[Path]:
        """Write the changed settings, and what to do with them."""
        files = {run.file: run.text for run in (self.reference, self.candidate) if run.changes} | {
            "README.txt": self.text() + "\n"
        }
        for name, text in files.items():
            write_text(folder / name, text)
        return [folder / name for name in files]


def reference_of(
    path: str | Path,
    *,
    framework: Framework | None = None,
    gpus: int = 0,
    model: str = "",
    memory: float = MEMORY,
    out: str | Path = "",
) -> ReferencePlan:
    """The settings of a reference for the settings in a file, and of the candidate if the model must be shrunk. `out`: where they will be written."""
    settings, args, script = parse(path)
    framework = recognise(settings, args, path, framework)
    reading = with_model(framework, settings, args, gpus or (script.gpus if script else 0), model)
    raise_first(reading.errors)
    source = SourceSettings(
        Path(path), framework, reading, merged_settings(framework, settings, args), model, Path(out)
    )
    plan = reading.plan
    if plan.world == 1:
        raise MeshwrightError(
            "MW-REF-001", f"'{path}' runs on one device as far as its settings say",
            why="Then it is its own reference", fix="--gpus N, if the launcher says how many there are",
        )  # fmt: skip
    config = Config(
        reading.shape.model,
        catalog.load("clusters", CLUSTER).with_gpus(plan.world),
        plan,
        reading.workload,
        reading.stack,
    )
    notes, candidate = [], config
    if reading.assembled.gpus < 0:
        notes.append(f"the settings do not say how many devices there are: {plan.world} are the fewest, --gpus says it")
    if has_model(reading):
        needed = (predict(on_one_device(config)).memory_gib or 0.0) * 2**30
        notes.append(f"on one device it needs about {needed / 2**30:.0f} GiB")
        if needed > memory:
            candidate, changes = shrunk(config)
            notes += [
                f"more than {memory / 2**30:.0f} GiB, so both runs are shrunk:",
                *(f"  {change}" for change in changes),
            ]
    else:
        notes.append("the settings do not say the model's shape, so its memory is not known: --model NAME")
    if plan.zero == 3 and plan.param_dtype != "fp32" and "zero" not in reading.understood.sources:
        notes.append(
            "FSDP casts parameters, and one device may compute under autocast: a comparison in float32 is sharper"
        )
    return ReferencePlan(
        framework,
        source.run("candidate", config, candidate),
        source.run("reference", config, on_one_device(candidate)),
        tuple(notes),
    )


def with_model(
    framework: Framework, settings: Mapping[str, Any], args: Sequence[str], gpus: int, model: str
) -> SettingsReading:
    """The reading of settings that may leave their model to a script: a name, or a config.json, says it then."""
    reading = understand(framework, settings, args, gpus=gpus, model=model)
    if model and not has_model(reading):
        reading.shape = ShapeKeys(load_model(model), set(Model.model_fields), complete=True, source=model)
    return reading


def on_one_device(config: Config) -> Config:
    """The same training with all degrees 1: micro-batches of the same size, as many as the whole batch has."""
    plan = config.plan
    kept = {
        name: getattr(plan, name)
        for name in (*KEPT, "recompute_every", "recompute_layers", "offload", "offload_layers", "microbatch", "bucket")
    }
    return config.but(plan=Plan(**kept), cluster=config.cluster.with_gpus(1))


def shrunk(config: Config) -> tuple[Config, tuple[str, ...]]:
    """`verify`'s small copy on at most 8 processes in the dtypes of the original, and what differs."""
    try:
        small = small_copy(config, RANKS)
    except MeshwrightError as error:
        raise MeshwrightError(
            "MW-REF-002", "the model is too large for one device, and there is no small copy of it",
            why=f"{error.code}: {error.what}", fix="settings without one of the axes, or --memory SIZE",
        ) from None  # fmt: skip
    plan = small.plan.but(**{name: getattr(config.plan, name) for name in KEPT})
    model = small.model.but(vocab=config.model.vocab, vocab_multiple=config.model.vocab_multiple)
    workload = config.workload.but(batch=small.workload.batch, seq=small.workload.seq)
    copy = replace(config, model=model, plan=plan, workload=workload, cluster=config.cluster.with_gpus(plan.world))
    sizes = [*differences(config.model, model), *differences(config.workload, workload)]
    folded = [f"{axis} {before} → {now}" for axis, (before, now) in small.folded.items()]
    return copy, tuple(", ".join(row) for row in (folded, sizes) if row)


@dataclass(frozen=True)
class SourceSettings:
    """The settings of the user."""

    path: Path
    framework: Framework
    reading: SettingsReading
    settings: Settings
    model: str
    out: Path

    def run(self, name: str, before: Config, after: Config) -> ComparedRun:
        """The settings changed from one configuration to another."""
        is_script = self.path.suffix in SCRIPTS
        text, settings, file = "", self.settings, self.path
        changes: dict[str, tuple[Any, Any]] = {}
        by_hand: tuple[str, ...] = ()
        if after is not before:
            settings = self.changed(before, after)
            changes = {
                k: (self.settings.get(k), settings.get(k))
                for k in {**self.settings, **settings}
                if self.settings.get(k) != settings.get(k)
            }
            text = self.written(settings, changes)
            file, by_hand = self.out / f"{name}{self.path.suffix}", tuple(self.unsaid(settings, before, after))
        world = after.plan.world
        template = (
            "bash {file}"
            if is_script and "torchrun" in read_text(self.path)
            else COMMANDS.get(self.framework.name, "torchrun --nproc-per-node {world} train.py {file}")
        )
        return ComparedRun(
            name, file.name, text, settings, is_script, world, tuple(change_text(k, *v) for k, v in changes.items()), by_hand,
            template.format(world=world, file=shlex.quote(str(file))),
        )  # fmt: skip

    def changed(self, before: Config, after: Config) -> Settings:
        """The user's settings with those keys changed that say the layout, or that are written in another way for the two configurations."""
        if names_model(self.framework):  # its settings cannot say another shape
            after = replace(after, model=before.model, plan=after.plan.but(layers_per_stage=()))
        shape, keys = has_model(self.reading), self.framework.table.keys
        one, other = (settings_of(config, self.framework, has_model=shape).settings for config in (before, after))
        spelled = {key.name: next((n for n in (key.name, *key.was) if n in self.settings), key.name) for key in keys}
        facts: dict[str, set[str]] = {}
        for key in keys:
            facts.setdefault(spelled[key.name], set()).add(key.fact)
        written = {k: (one.get(k), other.get(k)) for k in {**one, **other}}
        differ = {spelled.get(k, k) for k, (was, now) in written.items() if was != now}
        differ = {k for k in differ if not facts.get(k, set()) & KEPT_FACTS} | {k for k in facts if facts[k] & LAYOUT}
        differ -= {DEEPSPEED_FILE}
        wanted = {spelled.get(k, k): v for k, v in other.items() if spelled.get(k, k) in differ}
        if names_model(self.framework):
            wanted = {k: v for k, v in wanted.items() if k in self.settings or not facts.get(k, set()) & STAGE_LAYERS}
        for key in keys:
            name, value = spelled[key.name], self.always(key, after.plan)
            default = None if key.default is None else key.encode(key.default)
            if name in self.settings and value is not None and (word := key.encode(value)) is not INVALID:
                wanted[name] = word
            elif name not in self.settings and default is not None and wanted.get(name) == default:
                wanted.pop(name, None)
            elif name in self.settings and default is not None and plain(self.settings[name]) == default:
                wanted.setdefault(name, default)
        kept = {k: v for k, v in self.settings.items() if k not in differ}
        in_order = {k: wanted.get(k, kept.get(k)) for k in self.settings if k in {**kept, **wanted}}
        merged = in_order | {k: v for k, v in wanted.items() if k not in in_order}
        return {k: self.settings[k] if plain(self.settings.get(k)) == v else v for k, v in merged.items()}

    def always(self, key: Key, plan: Plan) -> Any:
        """What a key of the user says in each case. On one device DeepSpeed accumulates in fp32 under ZeRO-1, and in 16 bits without ZeRO."""
        if plan.world == 1 and key.fact == "zero" and 3 in (key.words or {}):
            return min(self.reading.plan.zero, 1)
        if key.fact == "accumulation" and not key.writable and self.reading.facts.get("accumulation"):
            return self.reading.facts["accumulation"] * self.reading.plan.dp // plan.dp
        if key.fact == "adapter_kind" and self.settings.get(key.name) == "DEEPSPEED":
            return "DEEPSPEED"
        return {"nodes": 1, "gpus_per_node": plan.world, "gpus": plan.world}.get(key.fact)

    def understood(self, settings: Settings, world: int) -> SettingsReading:
        return with_model(self.framework, settings, (), world, self.model)

    def unsaid(self, settings: Settings, before: Config, after: Config) -> Iterator[str]:
        """What is read back with another value, or was in the script before."""
        back, plan = self.understood(settings, after.plan.world), after.plan
        assumed = " ".join(self.reading.assembled.assumed)
        for name in (*DEGREES, "zero"):
            if (value := getattr(back.plan, name)) != getattr(plan, name):
                yield f"{name} {getattr(plan, name)} (the settings give {value})"
        has_batch = {"batch", "accumulation", "batch_tokens"} & {key.fact for key in self.framework.table.keys}
        stated = has_batch and "micro-batch:" not in assumed and "workload.batch" not in self.framework.left_to_script
        if stated or before.model is not after.model:
            if (back.workload.batch, back.plan.microbatch) != (after.workload.batch, plan.microbatch):
                yield f"a global batch of {after.workload.batch} in micro-batches of {plan.microbatch}"
        else:
            times = before.plan.dp // plan.dp
            yield (
                f"{times} times as many accumulated micro-batches, of the same size" if times > 1 else "the same batch"
            )
        if plan.world == 1 and self.settings.get(DEEPSPEED_FILE):
            yield f"in {self.settings[DEEPSPEED_FILE]}: ZeRO stage 1, and the batch as above"
        if "sequence length" in assumed or back.workload.seq != after.workload.seq:
            yield (
                f"sequences of {after.workload.seq} tokens"
                if before.workload.seq != after.workload.seq
                else "the same sequence length"
            )
        if back.workload.precision != after.workload.precision:
            yield f"precision {after.workload.precision}"
        if has_model(self.reading) and (
            sizes := [
                f"{n} {getattr(after.model, n)}"
                for n in SHAPE
                if getattr(back.shape.model, n) != getattr(after.model, n)
            ]
        ):
            yield f"a model with {', '.join(sizes)}"

    def written(self, settings: Settings, changes: Mapping[str, tuple[Any, Any]]) -> str:
        """The text of a file; of a script, the script with its flags changed, if that reads back."""
        if self.path.suffix not in SCRIPTS:
            return text_of(settings, self.framework, ENDINGS.get(self.path.suffix, self.framework.form), {})
        text = edited(read_text(self.path), changes)
        same = merged_settings(self.framework, {}, script_flags(text)) == merged_settings(
            self.framework, {}, words_of(settings)
        )
        return text if same else text_of(settings, self.framework, "args", {})


def words_of(settings: Settings) -> list[str]:
    return [word for key, value in settings.items() for word in flag(key, value).split(" ")]


def flag(name: str, value: Any) -> str:
    return name if value is True else " ".join([name, *map(str, value if isinstance(value, list) else [value])])


def edited(script: str, changes: Mapping[str, tuple[Any, Any]]) -> str:
    """A launch script with other values of its flags; new ones are put before the first that it has."""
    added = " ".join(flag(name, new) for name, (old, new) in changes.items() if old is None and new is not None)
    first = next((name for name, (old, new) in changes.items() if old is not None), "")
    for name, (old, new) in changes.items():
        value = "" if old is True else r"(?:=|\s+)(?:\"[^\"]*\"|'[^']*'|[^\s\\)]+)"
        text = "" if new is None else flag(name, new)
        text = f"{added} {text}" if name == first and added else text
        if old is not None:
            script = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-]){value}", text.replace("\\", r"\\"), script)
    return script


def change_text(name: str, old: Any, new: Any) -> str:
    if old is None:
        return f"add     {name} = {shown(plain(new))}"
    return (
        f"remove  {name} (was {shown(plain(old))})"
        if new is None
        else f"change  {name} = {shown(plain(new))} (was {shown(plain(old))})"
    )
