"""Packaging: declared dependencies are used, planning needs none of the extras and runs on a Mac. test_install.py installs releases."""

import ast
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
# Tools that are run, not imported: where their use stands.
TOOLS = {
    "ruff": ("Makefile", "/ruff check"),
    "mypy": ("Makefile", "/mypy"),
    "pytest-timeout": ("pyproject.toml", "\ntimeout ="),
    "axe-playwright-python": ("tests/web/test_page_views.py", "axe_playwright_python"),
    "pytest-xdist": ("Makefile", "pytest -n "),
    "pyyaml": ("tests/view/test_launch_files.py", "import yaml"),
    "mkdocs-material": ("mkdocs.yml", "name: material"),
}


def name_of(requirement: str) -> str:
    return re.split(r"[<>=\[]", requirement)[0].strip()


DECLARED = {
    name_of(r) for group in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()) for r in group
}


IMPORT = re.compile(r"^\s*(?:from ([\w.]+) import|import ([\w., ]+))", re.MULTILINE)


def imported_packages() -> set[str]:
    found = set()
    for folder in ("src", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for module, several in IMPORT.findall(path.read_text("utf-8")):
                found |= {name.split()[0].split(".")[0] for name in (module or several).split(",") if name.strip()}
    return found


def test_every_declared_dependency_is_imported_or_run() -> None:
    imported = imported_packages()
    assert {name for name in DECLARED - set(TOOLS) if name.replace("-", "_") not in imported} == set()
    for name, (file, use) in TOOLS.items():
        assert name not in DECLARED or use in (ROOT / file).read_text("utf-8"), f"{name} is declared and not used"


def test_constraints_name_declared_dependencies_only() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    assert {name_of(line) for line in lines if line and not line.startswith("#")} <= DECLARED


ABSENT = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):  # an environment without the extras
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
{platform}
from meshwright.cli import main
codes = []
for words in {commands!r}:
    try:
        main(words)
    except SystemExit as leaving:
        codes.append(leaving.code)
print("codes", codes, file=sys.stderr)
"""
EXTRA_PACKAGES = (
    "torch",
    "safetensors",
    "tokenizers",
    "pyarrow",
    "jinja2",
    "starlette",
    "uvicorn",
    "yaml",
    "transformers",
)
PLANNING = [
    ["estimate", "--plan", "examples/llama3-70b-64xh100.toml"],
    ["plan", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "8", "--batch", "8", "--fix", "tp=2", "--without", "pp"],
    ["simulate", "examples/demo-pp2-shard2.toml"],
    ["show", "1f1b"],
    ["launch", "examples/demo-pp2-shard2.toml", "--ray", "--out", "-"],
    ["doctor"],
    ["verify", "examples/demo-dp2-tp2.toml"],
    ["train", "examples/demo-dp2-tp2.toml"],
    ["bench"],
    ["web"],
]


def without_extras(commands: list[list[str]], platform: str = "") -> tuple[list[int], str]:
    """The exit codes and the errors of commands in a process in which no package of the extras can be imported."""
    code = ABSENT.format(names=EXTRA_PACKAGES, commands=commands, platform=platform)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True, cwd=ROOT
    )
    return ast.literal_eval(done.stderr.rpartition("codes ")[2]), done.stderr


def test_planning_needs_no_extra_and_other_commands_name_theirs() -> None:
    codes, errors = without_extras(PLANNING)
    assert codes == [0] * 6 + [2] * 4
    assert errors.count('Fix: pip install "torch>=2.11"') == 3
    assert 'Fix: pip install "starlette>=0.40"' in errors


BY_NAME = re.compile(
    r"""(?:pip|pipx|uv)3? (?:install|run)\b(?![^\n]*--find-links)[^\n]*[\s"'`]meshwright(?:\[|["'`\s.,)]|$)""",
    re.MULTILINE,
)


def test_no_page_and_no_message_installs_meshwright_by_its_name() -> None:
    """No index has it: pip would find nothing, or something else. docs/install.md has what works, and test_install.py runs that."""
    for bad in (
        'pip install "meshwright[web]"',
        "pip install meshwright.",
        "pip install -U meshwright\n",
        "pipx run meshwright plan",
    ):
        assert BY_NAME.search(bad), bad
    for good in (
        'pip install ".[train]"',
        'pip install "dist/meshwright-0.1.0-py3-none-any.whl[train]"',
        "pip install torch  # then meshwright-web",
    ):
        assert not BY_NAME.search(good), good
    files = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile")]
    for folder in ("docs", "src", "examples", "benchmarks"):
        files += [
            p
            for p in (ROOT / folder).rglob("*")
            if p.suffix in {".md", ".py", ".ipynb", ".toml", ".html", ".js", ".sh", ".yaml"}
        ]
    assert [f"{p.relative_to(ROOT)}: {m[0]}" for p in files for m in BY_NAME.finditer(p.read_text("utf-8"))] == []


MAC = """
import os, platform, sysconfig
sysconfig.get_config_vars()  # the standard library's own file of this platform
sys.platform = "darwin"
platform.system = lambda: "Darwin"
for name in ("sched_getaffinity", "pidfd_open", "pidfd_send_signal", "memfd_create", "setns", "unshare"):
    if hasattr(os, name):
        delattr(os, name)
"""


def test_planning_runs_on_a_mac() -> None:
    """The platform is faked: functions that macOS lacks are gone, and paths of Linux are not looked for."""
    codes, errors = without_extras(
        [PLANNING[0], PLANNING[4], ["doctor"], ["emulate", "up", "--nodes", "2", "--between", "1Gb/s,1ms"]], MAC
    )
    assert codes == [0, 0, 0, 2]
    assert "emulated clusters need Linux" in errors


def test_every_folder_with_python_is_a_package() -> None:
    """A wheel leaves out a folder without `__init__.py`."""
    folders = {path.parent for path in (ROOT / "src" / "meshwright").rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_the_files_of_a_release_agree() -> None:
    version = PROJECT["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text("utf-8")
    for name in ("LICENSE", "CONTRIBUTING.md", "README.md"):
        assert (ROOT / name).stat().st_size > 500


@pytest.mark.slow
def test_the_source_is_valid_for_newer_pythons() -> None:
    """Syntax only: later versions are not tested."""
    assert PROJECT["requires-python"] == ">=3.11"
    for path in (ROOT / "src").rglob("*.py"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # an invalid escape is an error one day
            compile(path.read_text("utf-8"), str(path), "exec", ast.PyCF_ONLY_AST)
