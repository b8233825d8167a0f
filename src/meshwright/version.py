"""The version of Meshwright, which checkpoints name, and the versions of what it runs with, which a bug report needs."""

from __future__ import annotations

from collections.abc import Iterable

VERSION = "0.1.0"
NEEDED = ("numpy", "pydantic", "typer", "rich", "tomli-w")
EXTRAS = {
    "train": ("torch", "safetensors", "tokenizers", "pyarrow"),
    "web": ("starlette", "uvicorn"),
    "interop": ("pyyaml",),
}


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are installed; nothing is imported but their metadata."""
    from importlib import metadata

    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def version_report() -> str:
    """What `meshwright --version` prints: the first line is the version, the others are for a bug report."""
    import platform

    optional = [name for names in EXTRAS.values() for name in names]
    found = installed_versions((*NEEDED, *optional))
    missing = [name for name in (*NEEDED, *optional) if name not in found]
    lines = [
        f"meshwright {VERSION}",
        f"Python {platform.python_version()} ({platform.python_implementation()}), {platform.platform()}",
        ", ".join(f"{name} {version}" for name, version in found.items()),
    ]
    if missing:
        lines.append(f"not installed: {', '.join(missing)}")
    return "\n".join(lines)
