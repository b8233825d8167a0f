"""Virtual environments of the frameworks, made once and kept in `.frameworks/`.

An environment is a folder of packages over the project's own environment, whose torch it shares. It is made again when its entry in
versions.toml changes. A framework that cannot be installed is skipped with the reason.

As a program, print the interpreter of an environment with another torch: `python environments.py 2.11.0` (`make test-torch`).
"""

import json
import os
import shutil
import site
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = Path(os.environ.get("MESHWRIGHT_FRAMEWORKS", ROOT / ".frameworks"))
VERSIONS: dict[str, dict[str, Any]] = tomllib.loads((HERE / "versions.toml").read_text())


@cache
def python_of(name: str) -> tuple[str, str]:
    """The interpreter of an environment, made if it is not there; and why there is none."""
    return make(name, VERSIONS[name])


def make(name: str, entry: dict[str, Any]) -> tuple[str, str]:
    folder = CACHE / name
    python, stamp = folder / "bin" / "python", folder / "installed.json"
    if stamp.is_file() and json.loads(stamp.read_text()) == entry:
        return str(python), ""
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "project.pth").write_text(
        "".join(f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages())
    )
    dependencies = () if entry.get("dependencies") else ("--no-deps",)
    words = ["install", "--quiet", "--no-compile", *dependencies, *entry.get("pip", ()), *entry["packages"]]
    failure = run(sys.executable, "-m", "pip", "--python", str(python), *words)
    if failure:
        return "", f"pip could not install {' '.join(entry['packages'])}: {failure}"
    stamp.write_text(json.dumps(entry))
    return str(python), ""


def run(*words: str) -> str:
    """Run a command; the last lines of its errors if it failed."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=900)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
    return " ".join(errors[-3:]) or "failed" if done.returncode else ""


def drive(name: str, cases: dict[str, Any], timeout: float = 900) -> dict[str, dict[str, Any]]:
    """What the parser of an environment says of each case; {"": reason} if it cannot be installed or started."""
    python, missing = python_of(name)
    if missing:
        return {"": {"refused": missing}}
    driver = HERE / "drivers" / f"parse_{VERSIONS[name]['parser']}.py"
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTEST_CURRENT_TEST")}
    done = subprocess.run(
        [python, str(driver)], input=json.dumps(cases), capture_output=True, text=True, timeout=timeout, env=environment
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    if not answers:
        return {"": {"refused": f"{driver.name} ended with {done.returncode}: {done.stderr[-800:]}"}}
    parsed: dict[str, dict[str, Any]] = json.loads(answers[-1].removeprefix("ANSWER "))
    return parsed


if __name__ == "__main__":
    release = sys.argv[1]
    python, failure = make(f"torch-{release}", {"packages": [f"torch=={release}"], "dependencies": True})
    if failure:
        sys.exit(failure)
    print(python)
