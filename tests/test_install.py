"""Releases install clean into an empty environment, without a network: the packages that they need are those that are installed here."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from blocks import blocks_of
from local_wheels import needed, write_empty_wheel, write_wheel
from meshwright.version import WHEEL

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
NEEDED = ("src", "pyproject.toml", "README.md", "LICENSE")  # for building
pytestmark = pytest.mark.slow


def call(*words: str | Path, cwd: Path | None = None, code: int = 0, **variables: str) -> str:
    """What a program prints, in an environment in which neither this source nor settings of pip are found."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    done = subprocess.run(
        [str(word) for word in words],
        env={**clean, "PIP_CONFIG_FILE": os.devnull, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=cwd,
    )
    assert done.returncode == code, f"{words}: {done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> tuple[Path, Path]:
    """The wheel and the source archive, built from a copy of the files that a clone has."""
    copy = tmp_path_factory.mktemp("release")
    for name in NEEDED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, copy / name)
    script = "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"
    call(sys.executable, "-c", script, cwd=copy)
    (wheel,), (source,) = (sorted((copy / "dist").glob(kind)) for kind in ("*.whl", "*.tar.gz"))
    return wheel, source


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Path:
    """A folder with the wheels of all extras that are installed here."""
    folder = tmp_path_factory.mktemp("wheels")
    groups = [PROJECT["dependencies"], *(EXTRAS[name] for name in ("train", "interop", "web")), ["setuptools>=77"]]
    found, missing = needed(requirement for group in groups for requirement in group)
    for package in found.values():
        write_wheel(package, folder)
    for name in missing:
        write_empty_wheel(name, folder)
    return folder


def environment(folder: Path) -> Path:
    """The programs of a new, empty environment."""
    call(sys.executable, "-m", "venv", folder)
    return folder / "bin"


def pip(programs: Path, wheels: Path, *words: str | Path) -> str:
    return call(
        programs / "python",
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--no-index",
        "--find-links",
        wheels,
        *words,
    )


def test_archives_hold_every_file_of_the_package(release) -> None:
    wheel, source = release
    files = [p for p in (ROOT / "src" / "meshwright").rglob("*") if p.is_file() and p.suffix != ".pyc"]
    names = {str(p.relative_to(ROOT / "src")) for p in files}
    chapters = (ROOT / "docs" / "concepts").glob("*.md")  # the package has a link to them
    names |= {f"meshwright/view/page/course/chapters/{p.name}" for p in chapters}
    assert names - set(zipfile.ZipFile(wheel).namelist()) == set()
    with tarfile.open(source) as archive:
        held = {name.partition("/src/")[2] for name in archive.getnames()}
    assert names - held == set()


@pytest.mark.parametrize("kind", ["wheel", "source"])
def test_planning_works_in_an_empty_environment(kind, release, wheels, tmp_path) -> None:
    """No extra, so no torch."""
    programs = environment(tmp_path / "env")
    archive = release[0] if kind == "wheel" else release[1]
    assert "WARNING" not in pip(programs, wheels, archive)
    installed = call(programs / "python", "-m", "pip", "list")
    assert "torch" not in installed
    assert "No broken requirements found" in call(programs / "python", "-m", "pip", "check")
    meshwright = programs / "meshwright"
    found = call(meshwright, "estimate", "llama3-8b", "--cluster", "dgx-h100", "--json", cwd=tmp_path)
    assert json.loads(found)["world"] == 8
    words = (
        "plan",
        "llama3-8b",
        "--cluster",
        "dgx-h100",
        "--gpus",
        "8",
        "--batch",
        "8",
        "--fix",
        "tp=2",
        "--out",
        "best.toml",
    )
    call(meshwright, *words, cwd=tmp_path)
    assert 'pip install "torch>=2.11"' in call(meshwright, "train", "best.toml", cwd=tmp_path, code=2)


@pytest.mark.parametrize(("extra", "module"), [("interop", "yaml"), ("web", "starlette, uvicorn")])
def test_an_extra_installs_what_it_needs(extra, module, release, wheels, tmp_path) -> None:
    programs = environment(tmp_path / "env")
    pip(programs, wheels, f"meshwright[{extra}] @ {release[0].as_uri()}")
    call(programs / "python", "-c", f"import {module}")
    assert "No broken requirements found" in call(programs / "python", "-m", "pip", "check")


def printed_commands() -> list[list[list[str]]]:
    """The commands of docs/install.md, by block, that need no network."""
    blocks = [
        b for b in blocks_of(ROOT / "docs" / "install.md") if b.language == "console" and "network" not in b.label
    ]
    return [[shlex.split(command) for command, _ in block.commands] for block in blocks]


def add_large_packages(programs: Path) -> None:
    """Packages of which the wheels have only the metadata (torch) are those that are installed here."""
    (site,) = (programs.parent / "lib").glob("python*/site-packages")
    for package in needed(EXTRAS["train"])[0].values():
        for top in {
            file.parts[0] for file in package.files or () if not file.parts[0].startswith(".") and file.suffix != ".pyc"
        }:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(package.locate_file(top))))


@pytest.mark.parametrize(
    "block", range(len(printed_commands())), ids=lambda k: " && ".join(c[1] for c in printed_commands()[k])
)
def test_the_commands_of_the_install_page_work_in_an_empty_environment(block, wheels, tmp_path) -> None:
    """In a checkout, with a folder of wheels in place of an index. Then a plan is estimated, and verified where torch was asked for."""
    programs = environment(tmp_path / "env")
    checkout = tmp_path / "checkout"
    for name in (*NEEDED, "constraints.txt", "examples"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        checkout.mkdir(exist_ok=True)
        copy(ROOT / name, checkout / name)
    for program, *words in printed_commands()[block]:
        if program == "meshwright":
            add_large_packages(programs)
        call(programs / program, *words, cwd=checkout, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels))
    call(programs / "meshwright", "estimate", "--plan", checkout / "examples" / "demo-dp2-tp2.toml", cwd=tmp_path)
    assert "No broken requirements found" in call(programs / "python", "-m", "pip", "check")
    add_large_packages(programs)
    proved = call(
        programs / "meshwright", "verify", checkout / "examples" / "demo-dp2-tp2.toml", "--steps", "1", cwd=tmp_path
    )
    assert "trains what one device trains" in proved


def test_the_wheel_has_the_name_that_launch_files_expect(release) -> None:
    assert release[0].name == WHEEL


def test_the_trainer_s_packages_can_be_resolved(release, wheels, tmp_path) -> None:
    """torch is too large to install here: pip only chooses the versions."""
    chosen = pip(environment(tmp_path / "env"), wheels, "--dry-run", f"meshwright[train] @ {release[0].as_uri()}")
    assert "torch-" in chosen.partition("Would install")[2]
