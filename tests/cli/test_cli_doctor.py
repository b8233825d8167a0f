"""`meshwright doctor`, `--version` and `completion`: on this machine, and on one that lacks everything."""

import json
import subprocess
import sys

import pytest

from meshwright import doctor, version
from meshwright.cli import COMMANDS, main
from meshwright.cli.completion import bash_script, fish_script, vocabulary


def run(capsys, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    return leaving.value.code, capsys.readouterr().out


def test_the_version_has_what_a_bug_report_needs(capsys) -> None:
    code, out = run(capsys, "--version")
    lines = out.splitlines()
    assert (code, lines[0]) == (0, f"meshwright {version.VERSION}")
    assert lines[1].startswith(f"Python {sys.version_info.major}.{sys.version_info.minor}.")
    assert "numpy " in lines[2]
    assert "pydantic " in lines[2]


def test_the_declared_packages_are_those_of_the_project() -> None:
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    bounds = {key: dict(r.split(">=") for r in found) for key, found in project["optional-dependencies"].items()}
    assert tuple(r.split(">")[0] for r in project["dependencies"]) == version.NEEDED
    assert {key: bounds[key] for key in version.EXTRAS} == version.EXTRAS
    assert project["version"] == version.VERSION


def test_doctor_names_every_group_of_commands(capsys) -> None:
    code, out = run(capsys, "doctor", "--json")
    assert code == 0
    checks = json.loads(out)["checks"]
    assert list(checks) == ["versions", "devices", "network", "rights", "commands"]
    states = {check["what"]: check["state"] for check in checks["commands"]}
    assert states["plan, estimate, simulate, show, lint, validate, launch"] == doctor.OK
    assert states["verify, train, bench on CPU processes"] == doctor.OK  # the tests have torch
    for found in checks.values():
        assert all(check["found"] and check["state"] in (doctor.OK, doctor.LIMITED, doctor.FAILS) for check in found)
        assert all(check["fix"] for check in found if check["state"] == doctor.FAILS)


def test_doctor_on_a_machine_that_lacks_everything(monkeypatch, capsys) -> None:
    monkeypatch.setattr(doctor, "installed_versions", lambda names: {})
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr(doctor, "SHARED_MEMORY", doctor.NETWORK / "none")
    monkeypatch.setattr("socket.if_nameindex", lambda: (_ for _ in ()).throw(OSError("not here")))
    code, out = run(capsys, "doctor")
    assert code == 1  # numpy is missing
    found = doctor.examine().sections
    states = {check.what: check for checks in found.values() for check in checks}
    assert states["torch"].state == doctor.LIMITED
    assert states["emulate"].state == states["web"].state == doctor.FAILS
    assert "needs Linux" in states["emulate"].found or "need Linux" in states["emulate"].found
    assert states["interfaces"].found == "OSError: not here"
    assert 'pip install "torch>=2.11" "safetensors>=0.4"' in out


def test_a_broken_torch_is_reported(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    torch, gpus = doctor.torch_checks()
    assert (torch.state, gpus.state) == (doctor.FAILS, doctor.FAILS)
    assert "the import fails" in torch.found


@pytest.fixture(scope="module")
def words() -> dict[str, list[str]]:
    return vocabulary()


def complete(script: str, *typed: str) -> set[str]:
    """The completions of bash for these words."""
    line = " ".join(f"'{word}'" for word in typed)
    code = (
        f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(typed) - 1}; _meshwright; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=200, check=True)
    return set(done.stdout.split())


def test_bash_completes_commands_options_and_names(words) -> None:
    script = bash_script(words)
    assert complete(script, "meshwright", "") >= set(COMMANDS)
    assert complete(script, "meshwright", "est") == {"estimate"}
    assert complete(script, "meshwright", "plan", "--clu") == {"--cluster"}
    assert "dgx-h100" in complete(script, "meshwright", "plan", "llama3-8b", "--cluster", "dgx-h")
    assert complete(script, "meshwright", "config", "sh") == {"show"}
    assert complete(script, "meshwright", "config", "show", "--to") == {"--toml"}
    assert complete(script, "meshwright", "launch", "x.toml", "--sl") == {"--slurm"}
    assert complete(script, "meshwright", "show", "cross") == {"crossover"}
    assert complete(script, "meshwright", "show", "crossover", "--") == {
        "--alpha",
        "--bandwidth",
        "--size",
        "--json",
        "--help",
    }


def test_the_other_shells_get_the_same_words(words, capsys) -> None:
    assert "bashcompinit" in bash_script(words, zsh=True)
    fish = fish_script(words)
    assert "-n '__fish_seen_subcommand_from config ; and __fish_seen_subcommand_from show' -l toml" in fish
    assert run(capsys, "completion", "powershell")[0] == 2
    assert run(capsys, "completion", "fish")[1].startswith("# meshwright completion fish > ")
