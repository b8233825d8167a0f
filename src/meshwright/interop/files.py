"""Settings files: TOML, JSON, YAML, or a script with command-line flags; and which framework wrote them.

YAML needs PyYAML (the extra [interop]), with its safe loader only. A script is evaluated without running anything (`scripts`).
"""

import json
import os
import re
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from meshwright.cost.scaling_laws import CHINCHILLA, DEFAULT
from meshwright.describe import catalog
from meshwright.describe.base import SECTIONS
from meshwright.describe.config import Asked, Config, load_cluster
from meshwright.describe.config import configure as configure_plan_file
from meshwright.describe.files import parse_toml, read_text
from meshwright.describe.own_stack import OURS
from meshwright.describe.plan import Plan
from meshwright.describe.run_folder import PLAN
from meshwright.errors import MeshwrightError
from meshwright.interop.deepspeed_file import deepspeed_settings
from meshwright.interop.frameworks import READABLE, framework_named
from meshwright.interop.frameworks.torchtitan_python import program_settings
from meshwright.interop.keys import Framework, Settings, flags, flattened
from meshwright.interop.reading import SettingsReading, raise_first, understand
from meshwright.interop.shapes import catalog_cluster
from meshwright.interop.shell.scripts import LEAST_KEYS, TORCHRUN, Script, read_script
from meshwright.units import format_count
from meshwright.version import install_command

YAML, SCRIPTS = (".yaml", ".yml"), (".sh", ".args", ".txt", ".slurm", ".sbatch", ".bash")
COMPUTE_OPTIMAL = "chinchilla"  # a word for the number of tokens
COMMON = re.compile(  # keys that inference servers have too
    r"(tp|pp|cp|ep|dp|sp|etp)_size|(max_)?(batch_size|seq_len)|size|dtype|model|bf16|fp16|learning_rate"
)
WRAPPERS = ("MODEL_ARGS.", "ENV_VARS.")
REFERENCE = re.compile(
    r"\$\{(\.*)([A-Za-z_]\w*(?:\.\w+)*)\}"
)  # of OmegaConf: to a key from the top, or with dots from the key's own section
PRODUCT = re.compile(r"\$\{multiply:\s*(\d{1,9})\s*,\s*(\d{1,9})\s*\}")  # of NeMo
LONGEST = 1_000  # letters of a value that a reference stands for
MOST_REFERENCES = 5  # that lead to each other


def is_settings_file(path: object) -> bool:
    """Whether an argument names a settings file of another framework: by its ending, and TOML and JSON by their content."""
    if not isinstance(path, str | Path) or not str(path):
        return False
    place = Path(path)
    if place.suffix in (*YAML, *SCRIPTS) or (not place.suffix and is_script(place)):
        return True
    if place.suffix not in (".toml", ".json") or not place.is_file():
        return False
    try:
        document = parse(place).settings
    except MeshwrightError:
        return False
    if place.suffix == ".toml" and {name.partition(".")[0] for name in document} <= {*SECTIONS, "extends"}:
        return False
    return not {"model_type", "architectures"} & set(document) and detect(document) is not None


class Parsed(NamedTuple):
    """The flat settings and the flags of a file; of a script also its launcher."""

    settings: dict[str, Any]
    args: list[str]
    script: Script | None = None


def is_script(path: Path) -> bool:
    """Whether the first line of a file names a shell."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return bool(re.match(rb"#!.*\b(ba|z|k)?sh\b", file.read(200)))


def parse(path: str | Path, text: str | None = None) -> Parsed:
    """The content of a settings file; `text` is its text where it is known already."""
    place = Path(path)
    folder = place.parent if text is None else None  # a text from elsewhere has no files beside it
    text = read_text(place) if text is None else text
    if place.suffix == ".toml":
        return Parsed(flattened(parse_toml(text, str(path))), [])
    if place.suffix == ".json":
        return Parsed(flattened(_table(_json(text, path), path)), [])
    if place.suffix == ".py":
        return Parsed(_python(text, path), [])
    if place.suffix in YAML:
        found = interpolated(flattened(_table(_yaml(text, path), path)))
        for prefix in WRAPPERS:
            found = {name.removeprefix(prefix): value for name, value in found.items()}
        return Parsed(found, [])
    script = script_of(text, path, folder)
    return Parsed(script.settings | deepspeed_settings(script, folder), script.args, script)


def interpolated(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a YAML file with references to other keys, such as `${.hidden_size}`, and products replaced by their values."""
    for _ in range(MOST_REFERENCES):
        settings = {
            name: PRODUCT.sub(
                lambda found: str(int(found[1]) * int(found[2])),
                REFERENCE.sub(partial(referred, settings, name), value),
            )
            if isinstance(value, str) and "${" in value
            else value
            for name, value in settings.items()
        }
    return settings


def referred(settings: dict[str, Any], name: str, found: re.Match[str]) -> str:
    """The value that a reference in the value of a key stands for; the reference itself where that is no value of the file."""
    sections = name.split(".")
    value = settings.get(".".join([*sections[: len(sections) - len(found[1])], found[2]] if found[1] else [found[2]]))
    return str(value) if isinstance(value, str | int | float) and len(str(value)) < LONGEST else found[0]


def detect(settings: dict[str, Any], args: list[str] | None = None) -> Framework | None:
    """The framework that has the most of these keys; None if no framework has two of them, or if programs of all kinds have those."""
    hits = keys_by_framework(settings, args)
    best = max(hits, key=lambda name: len(hits[name]))
    return READABLE[best] if len(hits[best]) >= LEAST_KEYS and not all(map(COMMON.fullmatch, hits[best])) else None


def known_keys_of(settings: dict[str, Any], args: list[str] | None = None) -> dict[str, int]:
    """The number of these keys that each framework has."""
    return {name: len(keys) for name, keys in keys_by_framework(settings, args).items()}


def keys_by_framework(settings: dict[str, Any], args: list[str] | None = None) -> dict[str, set[str]]:
    """Those of these keys that each framework has."""
    given = (set(settings) | set(flags(args or []))) - set(TORCHRUN)
    bare = {name.removeprefix("--").replace("-", "_") for name in flags(args or []) if "." in name}
    return {f.name: set(f.table.names & (given | bare)) for f in READABLE.values()}


def recognise(settings: dict[str, Any], args: list[str], path: str | Path, named: Framework | None = None) -> Framework:
    """The framework of a file; raises if it has none, or if it is another than the one that was named."""
    framework = detect(settings, args)
    if framework is None and {name.partition(".")[0] for name in settings} & set(SECTIONS) >= {"plan"}:
        raise MeshwrightError(
            "MW-SET-010",
            f"'{path}' is a plan file of Meshwright, not settings of a framework",
            why="Settings of a framework are written from a plan by `launch`",
            fix=f"meshwright launch {shlex.quote(str(path))} --torchrun --for FRAMEWORK",
        )
    if framework is None:
        raise MeshwrightError(
            "MW-SET-010",
            f"'{path}' has no settings that are known",
            why="Fewer than two of its keys belong to one framework, or only keys that other programs have too, such as tp_size",
            valid=[f.title for f in READABLE.values()],
            fix=named_file(args),
        )
    hits = known_keys_of(settings, args)
    if named is None or 2 * hits[named.name] >= hits[framework.name]:
        return named or framework
    raise MeshwrightError(
        "MW-SET-010",
        f"'{path}' looks like settings of {framework.title}, not of {named.title}",
        why=f"{hits[framework.name]} of its keys belong to {framework.title}, {hits[named.name]} to {named.title}",
        fix=f"name {framework.name} as its framework",
    )


def named_file(args: Sequence[str]) -> str:
    """What to give instead of a script whose program reads its settings from a file."""
    files = [word for word in args if Path(word).suffix in (".toml", ".json", *YAML) and not word.startswith("--")]
    return f"give the file that its program reads: {files[0]}" if files else ""


def refuse_other_program(reading: SettingsReading, path: str | Path, known: int) -> None:
    """Raise if a script has some flags of a framework, but more that could matter and that the framework does not have."""
    unknown = [key for key in reading.understood.unknown if " = " not in key]
    if len(unknown) > known:
        raise MeshwrightError(
            "MW-SET-010",
            f"'{path}' starts a program that is not known",
            why=f"{known} of its flags belong to {reading.framework.title}, but {len(unknown)} others could matter: {', '.join(unknown[:6])}",
            fix="write the run as a plan file (docs/tutorial.md)",
        )


def read_settings(path: str | Path, *, gpus: int = 0, model: str = "", text: str | None = None) -> SettingsReading:
    """The reading of a settings file."""
    parsed = parse(path, text)
    framework = recognise(parsed.settings, parsed.args, path)
    reading = understand(framework, parsed.settings, parsed.args, gpus=gpus, model=model, script=parsed.script)
    if parsed.script:
        refuse_other_program(reading, path, known_keys_of(parsed.settings, parsed.args)[framework.name])
    return reading


def target_framework(name: str, file: str) -> Framework | None:
    """The framework that is named, else that of the settings file; None for our own trainer."""
    if name.strip().lower() == OURS:
        return None
    if name:
        return framework_named(name, also=(OURS,))
    return read_settings(file).framework if is_settings_file(file) else None


def script_flags(text: str) -> list[str]:
    """The flags of a shell script or of a file of arguments."""
    return script_of(text).args


def script_of(text: str, path: object = "the script", folder: Path | None = None) -> Script:
    """The training command of a shell script or of a file of arguments; `folder` is where the script lies."""
    keys_of = lambda settings, args: max(known_keys_of(dict(settings), args).values())  # noqa: E731
    try:
        return read_script(text, keys_of, os.environ, folder)
    except RecursionError:
        raise MeshwrightError("MW-SET-010", f"'{path}' is nested too deeply to be read") from None


def _json(text: str, path: object) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MeshwrightError("MW-SET-010", f"'{path}' is not valid JSON", why=str(error)[:200]) from None


def _python(text: str, path: object) -> Settings:
    try:
        return program_settings(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MeshwrightError("MW-SET-010", f"'{path}' is not valid Python", why=str(error)[:200]) from None


def _yaml(text: str, path: object) -> Any:
    try:
        import yaml
    except ImportError:
        raise MeshwrightError(
            "MW-SET-011",
            "YAML settings need PyYAML",
            why="It is an optional dependency",
            fix=install_command("interop"),
        ) from None
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise MeshwrightError(
            "MW-SET-010", f"'{path}' is not valid YAML", why=str(error).replace("\n", " ")[:200]
        ) from None


def _table(value: Any, path: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MeshwrightError("MW-SET-010", f"'{path}' has no keys and values at its top")
    return {str(name): inner for name, inner in value.items()}


# --- A configuration of the arguments of a command, where a settings file of another framework may stand for a plan file.


def configure(model: Any = "", cluster: Any = "", **asked: Unpack[Asked]) -> Config:
    """As `describe.config.configure`; `model` or `plan` may be a settings file too, whose keys then give model, plan, workload and stack. With
    tokens = "chinchilla" the token budget is the compute-optimal one of the model."""
    if str(asked.get("tokens") or "").strip().lower() == COMPUTE_OPTIMAL:
        asked["tokens"] = ""
        return with_optimal_tokens(configure(model, cluster, **asked))
    source: Any = next((file for file in (asked.get("plan"), model) if is_settings_file(file)), None)
    if source is None:
        refuse_folder(model)
        return configure_plan_file(model, cluster, **asked)
    named = "" if model is source else model
    gpus, nodes, workload = asked.get("gpus", 0), asked.get("nodes", 0), asked.get("workload")
    reading = read_settings(source, gpus=gpus or nodes * _node(cluster) or _gpus_of(cluster))
    raise_first(reading.blocking(asked.get("set", ())))
    cluster = cluster or catalog_cluster(reading.hardware)
    if reading.gpus and not nodes and not gpus and cluster and not _gpus_of(cluster):
        asked["gpus"] = reading.gpus
    asked["plan"], asked["stack"] = reading.assembled.plan, asked.get("stack") or reading.stack_section
    asked["workload"] = reading.assembled.workload | (workload if isinstance(workload, dict) else {})
    return configure_plan_file(named or model_part(reading, source, asked.get("set", ())), cluster, **asked)


def with_optimal_tokens(config: Config) -> Config:
    """Give the training its compute-optimal tokens; what is assumed says the predicted loss and the source of the law."""
    model = config.model
    if model.kind != "transformer" or model.unit != "tokens":
        what = f"--tokens {COMPUTE_OPTIMAL} has no law for {model.name}"
        raise MeshwrightError("MW-LAW-001", what, why="The law was fitted to language models", fix="--tokens 300B")
    tokens = float(round(CHINCHILLA[DEFAULT].optimal_tokens(model.active)))
    origins = {**config.origins, "workload.tokens": COMPUTE_OPTIMAL}
    config = config.but(workload=config.workload.but(tokens=tokens), origins=origins)
    return config.but(assumed=(*config.assumed, *optimal_tokens_words(config)))


def optimal_tokens_words(config: Config) -> list[str]:
    """The predicted loss and the source of the law, if the token budget of a configuration is the compute-optimal one."""
    if config.origin("workload.tokens") != COMPUTE_OPTIMAL:
        return []
    law, n, tokens = CHINCHILLA[DEFAULT], config.model.active, config.workload.tokens
    size = f"{format_count(n)} {'active ' * bool(config.model.experts)}parameters"
    loss = f"predicted loss {law.loss(n, tokens):.3f} nats per token of the law's data"
    dense = "; it was fitted to dense models" if config.model.experts else ""
    return [f"tokens: {format_count(tokens)}, compute-optimal for {size}; {loss} ({law.source}{dense})"]


def refuse_folder(model: object) -> None:
    """Raise if the argument `model` is a folder, for example that of a run or of Transformers; the error names the file in it to give."""
    if not isinstance(model, str | Path) or not os.path.isdir(model) or str(model) in catalog.names("models"):
        return
    files = [name for name in (PLAN, "config.json") if (Path(model) / name).is_file()]
    raise MeshwrightError(
        "MW-CONF-004",
        f"'{model}' is a folder",
        why="A plan file, a config.json or a name of the catalog is needed",
        fix=str(Path(model) / files[0]) if files else "",
    )


def sections(reading: SettingsReading) -> dict[str, Any]:
    """The sections of a plan file that settings describe; without [model] where they do not give its shape."""
    raise_first(reading.errors)
    found: dict[str, Any] = {
        "stack": reading.stack_section,
        "workload": reading.workload.as_dict(),
        "plan": reading.plan.as_dict(),
    }
    if not reading.shape.complete:
        return found
    model = model_part(reading, "the file")
    adapter = model.pop("adapter", {}) if isinstance(model, dict) else {}
    return found | {"model": model} | ({"adapter": adapter} if adapter else {})


def load_user_plan(path: str | Path, gpus: int) -> Plan:
    """The plan of a settings file, for a number of GPUs."""
    reading = read_settings(path, gpus=gpus)
    raise_first(reading.errors)
    return reading.plan


def model_part(reading: SettingsReading, source: object, overrides: Sequence[str] = ()) -> str | dict[str, Any]:
    """The model of settings as a plan file has it. `overrides` may state what the settings do not."""
    shape = reading.shape
    if shape.refused:
        return dict(shape.numbers)
    given = {word.partition("=")[0].strip() for word in overrides}
    missing = [f"model.{name}" for name in shape.missing if f"model.{name}" not in given]
    if missing:
        sizes = " ".join(f"--set {name}=N" for name in missing)
        named = f"meshwright estimate MODEL --plan {source}, or lint {source} --model MODEL"
        raise MeshwrightError(
            "MW-SET-013",
            f"'{source}' does not give the shape of its model: {', '.join(missing)}",
            why=f"{reading.facts.get('model') or 'The model'} is not in the catalog, and the settings do not state all of its shape",
            fix=f"{sizes}, or with a catalog name or a config.json as MODEL: {named}",
        )
    entry, adapter = shape.source.removeprefix("catalog "), shape.model.adapter
    if not (shape.source.startswith("catalog ") and shape.model.name == entry and not shape.changed):
        return shape.model.as_dict()
    return {"extends": entry, "adapter": adapter.as_dict()} if adapter.on else entry


def _node(cluster: Any) -> int:
    return int(getattr(_loaded(cluster), "node_size", 0) or 0)


def _gpus_of(cluster: Any) -> int:
    return int(getattr(_loaded(cluster), "gpus", 0) or 0)


def _loaded(cluster: Any) -> Any:
    return load_cluster(cluster) if isinstance(cluster, str | Path) and cluster else cluster
