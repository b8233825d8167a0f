"""Write the table of key names that frameworks know: `python benchmarks/framework_keys.py FOLDER RECIPES.jsonl`.

FOLDER has the unpacked packages, each in a folder NAME-VERSION… (a wheel unzipped, or a repository). The names are read from the
syntax trees, nothing is imported: fields of classes, arguments of `__init__` and of builder functions, flags of `add_argument`, and
constants that name keys. Keys of published recipes are added: a framework took them at some commit. Only the last part of a key is
kept: `ddp.bucket_size` is `bucket_size`.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from meshwright.interop.frameworks import find
from meshwright.interop.keys import last_part

TABLE = Path(__file__).parents[1] / "src/meshwright/interop/frameworks/known_keys.json"
MEGATRON = (
    "megatron_core:megatron/training/**/*.py",
    "megatron_core:megatron/core/**/*config*.py",
    "megatron_core:megatron/core/*parallel*.py",
)
TRAINER = ("transformers:transformers/training_args.py",)
# Framework: packages and the files in them that define settings.
SOURCES = {
    "torchtitan": ("torchtitan:torchtitan/**/*.py",),
    "megatron-lm": MEGATRON,
    "megatron-bridge": (*MEGATRON, "megatron_bridge:megatron/bridge/**/*.py"),
    "automodel": ("nemo_automodel:nemo_automodel/**/*.py",),
    "deepspeed": ("deepspeed:deepspeed/**/*config*.py", "deepspeed:deepspeed/**/constants.py", "megatron_deepspeed:megatron/arguments.py",
                  "deepspeed_examples:**/*.py"),
    "nanotron": ("nanotron:nanotron/config/*.py",),
    "axolotl": ("axolotl:axolotl/utils/schemas/**/*.py", "axolotl:axolotl/integrations/*/args.py", "deepspeed:deepspeed/**/*config*.py"),
    "accelerate": ("accelerate:accelerate/commands/**/*.py", "accelerate:accelerate/utils/dataclasses.py",
                   "accelerate:accelerate/parallelism_config.py"),
    "trl": ("trl:trl/**/*config*.py", *TRAINER),
    "llama-factory": ("llamafactory:llamafactory/hparams/*.py", "llamafactory:llamafactory/v1/**/*.py", *TRAINER),
    "ms-swift": ("ms_swift:swift/arguments/**/*.py", "ms_swift:swift/megatron/arguments/**/*.py", "ms_swift:swift/rlhf_trainers/**/*arg*.py",
                 *TRAINER),
    "olmo-core": ("ai2_olmo_core:olmo_core/**/*.py",),
    "levanter": ("levanter:levanter/**/*.py",),
    "torchtune": ("torchtune:**/*.py",),
    "gpt-neox": ("gpt_neox:megatron/neox_arguments/*.py", "deepspeed:deepspeed/**/*config*.py"),
}  # fmt: skip
FIELDS = {
    "torchtitan",
    "megatron-lm",
    "nanotron",
    "axolotl",
    "trl",
    "llama-factory",
    "ms-swift",
    "gpt-neox",
    "accelerate",
}  # no arguments of functions


def names_in(tree: ast.AST, with_arguments: bool) -> Iterator[str]:
    """Names of settings that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    yield each.target.id
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            yield from (
                a.value.lstrip("-") for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)
            )
        elif (
            isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ):
            yield node.value.value
        elif (with_arguments and isinstance(node, ast.FunctionDef) and not node.name.startswith("_")) or _is_init(node):
            arguments = node.args  # type: ignore[attr-defined]
            yield from (a.arg for a in (*arguments.args, *arguments.kwonlyargs))


def _is_init(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "__init__"


def known(folder: Path, framework: str) -> tuple[set[str], set[str]]:
    """The packages that were read, and the names of a framework's keys, in lower case with underscores."""
    packages: set[str] = set()
    names: set[str] = set()
    for source in SOURCES[framework]:
        package, _, pattern = source.partition(":")
        for root in sorted(folder.glob(f"{package}-*")):
            packages.add("-".join(root.name.split("-")[:2]))
            for path in root.glob(pattern):
                if "test" not in path.name:
                    names.update(names_in(ast.parse(path.read_text("utf-8")), framework not in FIELDS))
    return packages, names


def published(path: Path) -> Iterator[tuple[str, str]]:
    """Framework and last part of each key of published recipes."""
    for recipe in map(json.loads, path.read_text("utf-8").splitlines()):
        framework = find(recipe["framework"])
        for key in (
            *recipe.get("settings", ()),
            *(a.partition("=")[0] for a in recipe.get("args", ()) if a.startswith("--")),
        ):
            yield framework.name if framework else "", last_part(key)


def main(folder: str, recipes: str) -> None:
    table, seen = {}, list(published(Path(recipes)))
    for framework in SOURCES:
        packages, defined = known(Path(folder), framework)
        spelled = {last_part(name) for name in defined} | {key for name, key in seen if name == framework}
        names = {name for name in spelled if name.isidentifier() and len(name) > 2 and name != "self"}
        table[framework] = {"from": sorted(packages), "keys": " ".join(sorted(names))}
        print(framework, len(names), *sorted(packages))
    TABLE.write_text(json.dumps(table, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:3])
