"""Output files are checked before the work starts; a progress bar is shown on a terminal and never in a pipe."""

import os
import subprocess
import sys

import pytest

from meshwright.cli.output import patient, writable
from meshwright.errors import MeshwrightError

DEMO = "examples/demo-pp2-shard2.toml"


def test_an_empty_path_is_ignored_and_an_existing_file_is_unchanged(tmp_path):
    kept = tmp_path / "kept.txt"
    kept.write_text("as it was")
    writable("", None, kept, tmp_path / "new.txt")
    assert kept.read_text() == "as it was"
    assert not (tmp_path / "new.txt").exists()
    writable(tmp_path / "made" / "new.txt", make=True)
    assert (tmp_path / "made").is_dir()


@pytest.mark.parametrize("path", ["no/such/folder/x.json", "."])
def test_a_folder_and_a_missing_folder_are_refused(path):
    with pytest.raises(MeshwrightError, match="MW-CLI-004"):
        writable(path)


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", DEMO, "--trace", "no/such/x.json"],
        ["validate", "--headline", "--html", "no/such/x.html"],
        ["show", "all-reduce", "--html", "no/such/x.html"],
        ["verify", DEMO, "--out", "pyproject.toml/x.json"],
        ["train", DEMO, "--out", "pyproject.toml/run"],
    ],
)
def test_commands_check_their_outputs_before_they_start(arguments, capsys):
    from meshwright.cli import main

    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    assert leaving.value.code
    assert "MW-CLI-004" in capsys.readouterr().err


@pytest.mark.parametrize(("setting", "code"), [("plan.pp=16", "MW-PLAN-005"), ("workload.batch=7", "MW-PLAN-011")])
def test_an_illegal_plan_is_never_proved(setting, code, capsys, monkeypatch):
    """Its small copy would be legal: sixteen stages of four layers fold to two."""
    from meshwright.cli import main

    monkeypatch.setattr("meshwright.proof.prove.prove", lambda *_, **__: pytest.fail("it was tried"))
    with pytest.raises(SystemExit) as leaving:
        main(["verify", DEMO, "--set", setting])
    assert leaving.value.code == 2
    assert code in capsys.readouterr().err


def test_a_progress_bar_goes_to_a_terminal_and_never_into_the_output(capsys, monkeypatch):
    with patient("proving", measurable=False):
        pass
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    with patient("proving", measurable=False):
        pass
    out, err = capsys.readouterr()
    assert out == ""
    assert "proving" in err
    with patient("searching") as set_share:
        set_share(0.5)
    assert "searching" not in capsys.readouterr().err  # not before two seconds have passed


@pytest.mark.parametrize("stdout", ["closed pipe", "/dev/full"])
def test_an_error_as_json_on_a_stream_that_fails_is_no_traceback(stdout: str) -> None:
    if stdout == "/dev/full":
        out = os.open(stdout, os.O_WRONLY)
    else:
        read_end, out = os.pipe()
        os.close(read_end)
    command = [sys.executable, "-m", "meshwright", "plan", "no-such-model", "--cluster", "dgx-h100", "--json"]
    done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=200, check=False)
    os.close(out)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert ("MW-CAT-002" in done.stderr) == (stdout == "/dev/full")
