"""Wheels of the packages that are installed here, so that installing can be tested without an index of packages.

An installed package has the files of its wheel, so the wheel can be put together again. Only what installing needs is kept: launchers in `bin`
are written anew by pip, and of packages above `LARGEST` (torch) only the metadata are kept, which suffices for `pip install --dry-run`.
"""

import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

LARGEST = 60_000_000
SKIPPED = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")


def needed(requirements: Iterable[str]) -> tuple[dict[str, Distribution], list[str]]:
    """The installed packages that requirements need, with those that they need, and the names of packages that are missing here."""
    found: dict[str, Distribution] = {}
    missing: list[str] = []
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        extras = requirement.extras or {""}
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        name = requirement.name.lower().replace("_", "-")
        if name in found or name in missing:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            missing.append(name)
            continue
        for text in found[name].requires or ():
            inner = Requirement(text)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(inner)
    return found, missing


def write_wheel(package: Distribution, folder: Path) -> bool:
    """Write the wheel of an installed package; False if only its metadata are in it."""
    files = [f for f in package.files or () if ".." not in f.parts and f.suffix != ".pyc" and f.name not in SKIPPED]
    metadata = next(f for f in files if f.name == "WHEEL").parent
    is_whole = sum(f.size or 0 for f in files) <= LARGEST
    if not is_whole:
        files = [f for f in files if f.parts[0] == metadata.name]
    tags = [line[5:] for line in (package.read_text("WHEEL") or "").splitlines() if line.startswith("Tag: ")]
    name = metadata.name.removesuffix(".dist-info")
    with zipfile.ZipFile(folder / f"{name}-{tags[-1]}.whl", "w", zipfile.ZIP_STORED) as wheel:
        for file in files:
            wheel.write(str(file.locate()), str(file))
        record = f"{metadata}/RECORD"
        wheel.writestr(record, "".join(f"{file},,\n" for file in [*files, record]))
    return is_whole


def write_empty_wheel(name: str, folder: Path) -> None:
    """A wheel without content for a package that is not installed here, of a version that satisfies any lower bound."""
    stem = f"{name.replace('-', '_')}-999.0"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 999.0\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
