"""docs/performance.md: the output of every benchmark, with the machine on which it ran.

`make bench` (`python -m performance [NAME …]`) writes it; a name is that of a script, or of one of its parts: `planner`, `"planner speed"`.

Each benchmark has a section. A run of some benchmarks replaces their sections and keeps the others, so a page may show several machines.
"""

import ast
import contextlib
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from meshwright.version import VERSION, installed_versions

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"
# Hours of unattended runs, a GPU, or measurements that are not in the repository: these have pages or are started by hand.
BY_HAND = ("chaos", "chaos_save", "closed_loop", "collectives_published", "publish_rows")
# Benchmarks of several minutes, in parts that run and are shown one by one.
PARTS = {"planner": ("speed", "growth", "ranking")}
# Arguments of benchmarks whose default needs hardware that `make bench` does not assume.
ARGUMENTS = {"multi_gpu": ("--device", "cpu", "--ranks", "2", "--reduced", "--out", os.devnull)}
LIMIT_S = 900
INTRODUCTION = """\
# Performance

The output of `make bench`: every benchmark compares with something, in runs next to each other, and says with what. Timings differ
between machines, and no test depends on them. [Accuracy](accuracy.md) has the errors of predictions,
[measured by us](measured.md) the long unattended runs.
"""


def scripts() -> list[str]:
    """The benchmarks that `make bench` runs: the name of a script, and of its part where it has parts."""
    found = [path.stem for path in sorted((ROOT / "benchmarks").glob("*.py")) if path.stem not in BY_HAND]
    return [f"{name} {part}".strip() for name in found for part in PARTS.get(name, ("",))]


def machine() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch = installed_versions(["torch"]).get("torch", "not installed")
    return (
        f"{cores} cores, {platform.machine()}, Python {platform.python_version()}, torch {torch}, Meshwright {VERSION}"
    )


def purpose(name: str) -> str:
    """The first paragraph of a benchmark's docstring."""
    script = ROOT / "benchmarks" / f"{name.split()[0]}.py"
    text = ast.get_docstring(ast.parse(script.read_text("utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


def run(name: str) -> tuple[int, str]:
    """Run a benchmark and show its output while it runs; its exit code, and the section for the page.

    After `LIMIT_S` the benchmark and the ranks that it started are ended, also if it prints nothing."""
    print(f"== {name}: {purpose(name)}", flush=True)
    began = time.monotonic()
    lines: list[str] = []
    script, *part = name.split()
    process = subprocess.Popen(
        [sys.executable, "-u", f"benchmarks/{script}.py", *part, *ARGUMENTS.get(script, ())],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    clock = threading.Timer(LIMIT_S, end, (process,))
    clock.start()
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
        code = process.wait(timeout=30)
    finally:
        clock.cancel()
        end(process)
        process.wait(timeout=30)
    if time.monotonic() - began > LIMIT_S:
        lines.append(f"ended after {LIMIT_S} s")
    return code, section(name, "\n".join(lines), time.monotonic() - began, code)


def end(process: subprocess.Popen[str]) -> None:
    """End a benchmark and the processes that it started, which share its session."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def section(name: str, output: str, seconds: float, code: int) -> str:
    failed = f" It ended with exit code {code}." if code else ""
    arguments = f" With `{' '.join(ARGUMENTS[name])}`." if name in ARGUMENTS else ""
    about = f"{machine()}; {seconds:.0f} s.{arguments}{failed}"
    return f"## {name}\n\n{purpose(name)}\n\n{about}\n\n```text\n{output.replace('```', '')}\n```\n"


def merged(page: str, fresh: dict[str, str]) -> str:
    """The page with new sections in place of the old ones, in the order of the scripts; those of deleted scripts go."""
    found = {m[1]: m[0] for m in re.finditer(r"^## ([\w ]+)\n.*?(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)}
    sections = {**found, **fresh}
    return "\n".join((INTRODUCTION, *(sections[name].rstrip() + "\n" for name in scripts() if name in sections)))


def main(names: list[str]) -> int | str:
    """Run the named benchmarks, all by default, and write their sections of the page. Returns the exit code, or a message."""
    known = scripts()
    if unknown := [name for name in names if not any(name in (script, script.split()[0]) for script in known)]:
        return f"no such benchmark: {', '.join(unknown)}; there are {', '.join(known)}"
    failed = []
    for name in [s for wanted in names for s in known if wanted in (s, s.split()[0])] or known:
        code, text = run(name)
        if code:  # the page keeps the section of the last run that ended well
            failed.append(name)
        else:
            PAGE.write_text(merged(PAGE.read_text("utf-8"), {name: text}), "utf-8")
    return f"failed: {', '.join(failed)}" if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
