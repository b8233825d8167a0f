"""docs/performance.md: the output of every benchmark, with the machine on which it ran. `make bench` writes it.

Each benchmark has a section. A run of some benchmarks replaces their sections and keeps the others, so a page may show several machines.
"""

from __future__ import annotations

import ast
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

from meshwright.version import VERSION, installed_versions

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "performance.md"
# Hours of unattended runs, a GPU, or measurements that are not in the repository: these have pages or are started by hand.
BY_HAND = (
    "accuracy", "chaos", "chaos_save", "closed_loop", "collectives_published", "context", "publish_rows", "zero_bubble",
)  # fmt: skip
LIMIT_S = 900
INTRODUCTION = """\
# Performance

The output of `make bench`: every benchmark compares with something, in runs next to each other, and says with what. Timings differ
between machines, and no test depends on them. [Accuracy](accuracy.md) has the errors of predictions, [faults](faults.md) and
[closed loop](closed-loop.md) the long unattended runs.
"""


def scripts() -> list[str]:
    """The benchmarks that `make bench` runs."""
    return [path.stem for path in sorted((ROOT / "benchmarks").glob("*.py")) if path.stem not in BY_HAND]


def machine() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch = installed_versions(["torch"]).get("torch", "not installed")
    return (
        f"{cores} cores, {platform.machine()}, Python {platform.python_version()}, torch {torch}, Meshwright {VERSION}"
    )


def purpose(name: str) -> str:
    """The first paragraph of a benchmark's docstring."""
    text = ast.get_docstring(ast.parse((ROOT / "benchmarks" / f"{name}.py").read_text("utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


def run(name: str) -> tuple[int, str]:
    """Run a benchmark and show its output while it runs; its exit code, and the section for the page."""
    print(f"== {name}: {purpose(name)}", flush=True)
    began = time.monotonic()
    lines: list[str] = []
    process = subprocess.Popen(
        [sys.executable, f"benchmarks/{name}.py"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
            if time.monotonic() - began > LIMIT_S:
                process.kill()
                lines.append(f"ended after {LIMIT_S} s")
        code = process.wait(timeout=30)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=30)
    return code, section(name, "\n".join(lines), time.monotonic() - began, code)


def section(name: str, output: str, seconds: float, code: int) -> str:
    failed = f" It ended with exit code {code}." if code else ""
    about = f"{machine()}; {seconds:.0f} s.{failed}"
    return f"## {name}\n\n{purpose(name)}\n\n{about}\n\n```text\n{output.replace('```', '')}\n```\n"


def merged(page: str, fresh: dict[str, str]) -> str:
    """The page with new sections in place of the old ones, in the order of the scripts; those of deleted scripts go."""
    found = {m[1]: m[0] for m in re.finditer(r"^## (\w+)\n.*?(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)}
    sections = {**found, **fresh}
    return "\n".join((INTRODUCTION, *(sections[name].rstrip() + "\n" for name in scripts() if name in sections)))
