"""The version of Meshwright, which checkpoints name, and the versions of what it runs with, which a bug report needs."""

from collections.abc import Iterable

from meshwright.errors import MeshwrightError

VERSION = "0.1.0"
NEEDED = ("numpy", "pydantic", "typer", "rich", "tomli-w")
# By extra, its packages and their lowest versions, as pyproject.toml has them.
EXTRAS = {
    "train": {"torch": "2.11", "safetensors": "0.4", "tokenizers": "0.20", "pyarrow": "16", "jinja2": "3.1.6"},
    "web": {"starlette": "0.40", "uvicorn": "0.30"},
    "interop": {"pyyaml": "6"},
}
WHEEL = f"meshwright-{VERSION}-py3-none-any.whl"


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


def install_command(extra: str) -> str:
    """The command that installs the packages of an extra. It names the packages: no index has Meshwright, so `meshwright[extra]` would fail,
    and where Meshwright itself came from (a checkout, a wheel) does not matter."""
    return "pip install " + " ".join(f'"{name}>={lowest}"' for name, lowest in EXTRAS[extra].items())


def missing_package(name: str, what: str) -> MeshwrightError:
    """The error for something that needs a package of an extra which is not installed."""
    extra = next((extra for extra, packages in EXTRAS.items() if name in packages), "train")
    return MeshwrightError(
        "MW-CLI-007",
        f"the package {name} is not installed",
        why=f"{what} needs the extra [{extra}]; planning does not",
        fix=install_command(extra),
    )


def require_torch(what: str) -> None:
    """Raise if torch is not installed; it is not imported."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise missing_package("torch", what)


def version_report() -> str:
    """Return the output of `meshwright --version`: the first line is the version, the others are for a bug report."""
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
