"""`meshwright config`: resolved values and their origins, differences, and the schema."""

import json
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.describe.config import load
from meshwright.interop.files import configure

EXAMPLES = Path(__file__).parents[2] / "examples"
PLAN = str(EXAMPLES / "llama3-70b-64xh100.toml")


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as leaving:
        main(["config", *arguments])
    captured = capsys.readouterr()
    return leaving.value.code, captured.out, captured.err


def lines(text: str) -> dict[str, str]:
    """The rows of the page by their first word, spaces squeezed."""
    return {row.split()[0]: " ".join(row.split()) for row in text.splitlines() if row.split()}


def test_show_prints_values_and_origins(capsys) -> None:
    code, out, _ = run(capsys, "show", PLAN, "--set", "plan.microbatch=2")
    rows = lines(out)
    assert code == 0
    assert rows["microbatch"] == "microbatch 2 --set"
    assert rows["layers"] == "layers 80 models/llama3-70b"
    assert rows["accelerator.memory"] == "accelerator.memory 79.1 GiB accelerators/h100-sxm"
    assert rows["levels.1.link.bandwidth"] == "levels.1.link.bandwidth 50 GB/s links/ib-ndr"
    assert rows["cp"] == "cp 1 default"
    assert rows["tp"].startswith("tp 8 ")


def test_show_all_adds_defaults(capsys) -> None:
    some, everything = run(capsys, "show", PLAN)[1], run(capsys, "show", PLAN, "--all")[1]
    assert "head_dim" not in some
    assert "head_dim" in everything


def test_show_json_has_every_value_and_its_origin(capsys) -> None:
    data = json.loads(run(capsys, "show", PLAN, "--json")[1])
    assert data["plan"]["tp"] == 8
    assert data["cluster"]["levels"][1]["link"]["bandwidth"] == 50e9
    assert data["origins"]["model.layers"] == "models/llama3-70b"
    assert "plan.cp" not in data["origins"]


def test_show_toml_has_the_same_values(capsys, tmp_path) -> None:
    file = tmp_path / "shown.toml"
    file.write_text(run(capsys, "show", PLAN, "--toml", "--set", "plan.microbatch=2")[1])
    assert load(file) == load(PLAN, ["plan.microbatch=2"])


def test_settings_of_a_framework_become_a_plan_file(capsys, tmp_path) -> None:
    settings, file = str(EXAMPLES / "settings" / "torchtitan-llama3-70b.toml"), tmp_path / "plan.toml"
    words = ("--cluster", "dgx-h100", "--gpus", "64")
    file.write_text(run(capsys, "show", settings, *words, "--toml")[1])
    config = configure(settings, "dgx-h100", gpus=64)
    assert load(file).to_toml() == config.to_toml()
    assert "plan." not in run(capsys, "diff", settings, str(file), *words)[1]


def test_show_checks_the_plan(capsys) -> None:
    code, out, err = run(capsys, "show", PLAN, "--set", "cluster.gpus=48")
    assert (code, out) == (2, "")
    assert err.startswith("MW-PLAN-005: shard × tp × pp = 4 × 8 × 2 = 64 ≠ 48 GPUs.")
    fix = err.rpartition("Fix: ")[2].split()[1::2]
    load(PLAN, ["cluster.gpus=48", *fix]).check()  # shard=3 would not divide the 512 samples


def test_the_fix_of_a_smaller_data_parallel_degree_is_fewer_gpus(capsys) -> None:
    """Not the degree that the file has, which the command line has just changed."""
    err = run(capsys, "show", PLAN, "--set", "plan.shard=2")[2]
    assert err.rstrip().endswith("Fix: --set cluster.gpus=32")
    assert run(capsys, "show", PLAN, "--set", "plan.shard=2", "--set", "cluster.gpus=32")[0] == 0
    assert "plan.shard=2" in run(capsys, "show", PLAN, "--set", "plan.tp=16")[2]  # 4 × 16 × 2 > 64


def test_diff(capsys) -> None:
    first, second = str(EXAMPLES / "demo-dp2-tp2.toml"), str(EXAMPLES / "demo-pp2-shard2.toml")
    code, out, _ = run(capsys, "diff", first, second)
    assert code == 0
    assert lines(out)["plan.tp"] == "plan.tp 2 1"
    data = json.loads(run(capsys, "diff", first, second, "--json")[1])
    assert data["plan.zero"] == {"first": 0, "second": 3}
    assert "no difference" in run(capsys, "diff", first, first)[1]


def test_schema(capsys) -> None:
    whole = json.loads(run(capsys, "schema")[1])
    assert "plan" in whole["properties"]
    assert json.loads(run(capsys, "schema", "plan")[1])["properties"]["tp"]["minimum"] == 1
    assert run(capsys, "schema", "plam")[0] == 2


@pytest.mark.parametrize("bad", ["missing.toml", ".", "/dev/zero"])
def test_a_path_that_is_not_a_file_is_refused(capsys, bad) -> None:
    code, out, err = run(capsys, "show", bad)
    assert (code, out) == (2, "")
    assert err.startswith("MW-CONF-004")


def test_a_key_without_its_section_names_the_section(capsys) -> None:
    code, _, error = run(capsys, "show", PLAN, "--set", "tp=8")
    assert code == 2
    assert "It is a key of [plan]. Fix: --set plan.tp=8" in error


def test_a_byte_order_mark_is_skipped(capsys, tmp_path) -> None:
    file = tmp_path / "plan.toml"
    file.write_bytes(b"\xef\xbb\xbf" + Path(PLAN).read_bytes())
    assert run(capsys, "show", str(file))[0] == 0
