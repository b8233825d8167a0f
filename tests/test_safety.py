"""Nothing is unpickled, no shell reads a string, and commands do not touch the network unless they are asked to."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "meshwright"
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "pty"}
CALLS = {
    "torch.load", "numpy.load", "np.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen", "os.execvp",
    "eval", "exec", "compile", "input",
}  # fmt: skip
OBJECTS = re.compile(
    r"(?:gather|broadcast|scatter|send|recv|all_gather)_object(?:_list)?$"
)  # torch unpickles what arrives
SUSPICIOUS = re.compile(
    r"pickle|dill|joblib|shelve|marshal|\bpty\b|\.load\(|_load\(|system\(|popen|execvp|\beval\(|\bexec\(|compile\(|input\(|_object|shell"
)


def name_of(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def dangers(text: str) -> list[str]:
    """What in a source file could run data as code."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            name = name_of(node.func)
            if name in CALLS or OBJECTS.search(name):
                found.append(f"{name}(…) in line {node.lineno}")
            if any(k.arg == "allow_pickle" for k in node.keywords):
                found.append(f"allow_pickle=… in line {node.lineno}")
            if any(
                k.arg == "shell" and not (isinstance(k.value, ast.Constant) and k.value.value is False)
                for k in node.keywords
            ):
                found.append(f"shell=… in line {node.lineno}")
    return found


@pytest.mark.parametrize(
    ("code", "number"),
    [
        ("import pickle", 1),
        ("from dill import loads", 1),
        ("torch.load('x')", 1),
        ("distributed.all_gather_object(a, b)", 1),
        ("read(path, allow_pickle=True)", 1),
        ("subprocess.run('x', shell=True)", 1),
        ("subprocess.run(['x'], shell=False)", 0),
        ("json.load(file); re.compile('x'); module.eval()", 0),
    ],
)
def test_dangers_are_found(code: str, number: int) -> None:
    assert len(dangers(code)) == number


def test_nothing_is_unpickled_and_no_shell_reads_a_string() -> None:
    texts = {path: path.read_text("utf-8") for path in sorted(SOURCE.rglob("*.py"))}
    suspicious = {path: text for path, text in texts.items() if SUSPICIOUS.search(text)}  # most files need no parser
    found = [f"{path.relative_to(SOURCE)}: {danger}" for path, text in suspicious.items() for danger in dangers(text)]
    assert found == []
    assert len(suspicious) > 5


# A file `sitecustomize.py` on PYTHONPATH: every Python process of a command, ranks included, refuses connections to other machines and
# look-ups of names but its own, and notes them and the warnings of our code.
WATCH = """
import os, sys, warnings

def note(text):
    with open(os.environ["NETWORK_LOG"], "a") as file:
        file.write(text + "\\n")

def refuse(text):
    note(text)
    raise OSError("the network is blocked")

def watch(event, arguments):
    if event in ("socket.connect", "socket.sendto"):
        address = arguments[1]
        local = isinstance(address, (str, bytes)) or str(address[0]) in ("127.0.0.1", "::1", "localhost", "")
        if not local:
            refuse(f"{event} {address!r}")
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        names = (None, "", "127.0.0.1", "::1", "localhost", b"127.0.0.1", b"localhost", os.uname().nodename)
        if arguments[0] not in names:
            refuse(f"{event} {arguments[0]!r}")
    elif event in ("urllib.Request", "http.client.connect", "ftplib.connect", "smtplib.connect"):
        refuse(f"{event} {arguments!r}")

sys.addaudithook(watch)
show = warnings.showwarning
def warned(message, category, filename, *more):
    if os.sep + "meshwright" + os.sep in filename:
        note(f"warning {category.__name__} in {filename}: {message}")
warnings.showwarning = warned
warnings.simplefilter("always")
"""
QUIET_RUN = """
from meshwright.cli import main
for words in {commands!r}:
    try:
        main(words)
    except SystemExit as leaving:
        assert leaving.code in (0, 1), (words, leaving.code)
"""
PLAN = "examples/demo-pp2-shard2.toml"
COMMANDS = [
    ["estimate", PLAN],
    ["plan", "nano", "--cluster", "laptop", "--gpus", "4", "--batch", "16", "--seq", "64", "--without", "pp"],
    ["simulate", PLAN],
    ["lint", PLAN],
    ["show", "all-reduce", "--values"],
    ["catalog"],
    ["config", "show", PLAN],
    ["launch", PLAN, "--slurm", "--out", "-"],
]


def noted(tmp_path: Path, commands: list[list[str]]) -> str:
    """Connections to other machines, look-ups of names, and warnings of our code, of all processes of some commands."""
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    log = tmp_path / "log"
    log.touch()
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "PYTHONPATH": path, "NETWORK_LOG": str(log), "OMP_NUM_THREADS": "1"}
    code = QUIET_RUN.format(commands=commands)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return log.read_text()


def test_planning_touches_no_network_and_warns_of_nothing(tmp_path: Path) -> None:
    assert noted(tmp_path, COMMANDS) == ""


@pytest.mark.slow
def test_proofs_and_runs_touch_only_this_machine(tmp_path: Path) -> None:
    words = ["--set", "plan.tp=1"]
    demo = "examples/demo-dp2-tp2.toml"
    runs = [
        ["verify", demo, "--steps", "1", *words],
        ["train", demo, "--steps", "2", "--no-calibrate", "--out", str(tmp_path / "run"), *words],
    ]
    found = noted(
        tmp_path,
        [
            *runs,
            ["doctor"],
            ["completion", "bash"],
            ["report", str(tmp_path / "run"), "--html", str(tmp_path / "report.html")],
        ],
    )
    host = re.escape(os.uname().nodename)  # ranks of one machine may look up its name
    assert [
        line for line in found.splitlines() if not re.search(rf"(?:getaddrinfo|gethostbyname) b?'{host}'", line)
    ] == []


def test_a_connection_would_be_noted(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    code = "import socket\ntry: socket.create_connection(('192.0.2.1', 9), timeout=0.01)\nexcept OSError: pass"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NETWORK_LOG": str(tmp_path / "log")}
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=200, check=True)
    assert "192.0.2.1" in (tmp_path / "log").read_text()
