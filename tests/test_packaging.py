"""Every declared dependency is used: imported by the code, its tests or benchmarks, or run as a tool."""

import ast
import re
import tomllib
from pathlib import Path

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


def imported_packages() -> set[str]:
    found = set()
    for folder in ("src", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Import):
                    found |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    found.add(node.module.split(".")[0])
    return found


def test_every_declared_dependency_is_imported_or_run() -> None:
    imported = imported_packages()
    assert {name for name in DECLARED - set(TOOLS) if name.replace("-", "_") not in imported} == set()
    for name, (file, use) in TOOLS.items():
        assert name not in DECLARED or use in (ROOT / file).read_text("utf-8"), f"{name} is declared and not used"


def test_constraints_name_declared_dependencies_only() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    assert {name_of(line) for line in lines if line and not line.startswith("#")} <= DECLARED
