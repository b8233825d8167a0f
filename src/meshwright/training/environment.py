"""What a run depends on besides its plan: the host, versions of packages, and the state of the user's repository."""

import platform
import socket
import subprocess
import sys
import time
from pathlib import Path

from meshwright.units import Json
from meshwright.version import installed_versions

# Their versions are noted, if installed
PACKAGES = ("meshwright", "torch", "numpy", "safetensors", "tokenizers", "transformers")


def environment() -> Json:
    """Return the facts that a run depends on besides its plan: versions, git state, command line, host, start time."""
    versions = {"python": platform.python_version(), **installed_versions(PACKAGES)}
    place = {"hosts": [socket.gethostname()], "platform": platform.platform()}
    return {"started": time.time(), "command": sys.argv, **place, "versions": versions, "git": git_state()}


def git_state(folder: Path | None = None) -> Json | None:
    """Commit, branch and changed files of the repository in which the run was started; None outside of one, or without git."""

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", *arguments]
        options: Json = {"cwd": folder, "capture_output": True, "text": True, "timeout": 5, "check": True}
        return subprocess.run(command, **options).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no").splitlines()
        about = {"commit": git("rev-parse", "HEAD"), "branch": git("rev-parse", "--abbrev-ref", "HEAD")}
        return {**about, "changed": len(changed)}
    except (OSError, subprocess.SubprocessError):
        return None
