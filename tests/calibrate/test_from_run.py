"""A stack adjusted to the user's runs: predictions are centred, the file is accepted by every command, bad input is refused."""

import json
import math

import pytest

from meshwright.calibrate.runs.from_run import adjusted, measured_runs
from meshwright.cli import main
from meshwright.cost.band import quantiles as band_quantiles
from meshwright.describe.config import configure
from meshwright.errors import MeshwrightError

PLAN = """
[model]
extends = "gpt3-13b"
[cluster]
extends = "dgx-a100"
gpus = 8
[stack]
extends = "default"
[workload]
batch = 64
seq = 1024
[plan]
replicate = {dp}
tp = {tp}
microbatch = {micro}
"""


def written(folder, name, dp=8, tp=1, micro=4):
    path = folder / name
    path.write_text(PLAN.format(dp=dp, tp=tp, micro=micro))
    return str(path)


def predicted(path, stack=""):
    from meshwright import api

    return api.estimate(plan=path, stack=stack).prediction


def test_runs_that_agree_centre_predictions_and_one_run_moves_them_less(tmp_path):
    a, b = written(tmp_path, "a.toml"), written(tmp_path, "b.toml", dp=4, tp=2, micro=2)
    slow, moves = 1.25, []
    rate = predicted(a).tokens_per_s / slow
    for count in (1, 2, 5):
        result = adjusted(measured_runs([a] * count, [str(rate)] * count, [], ""))
        moves.append(math.log(result.predicted_after[0] / result.predicted_before[0]) / math.log(slow))
    assert 0.1 < moves[0] < moves[1] < moves[2] < 1
    assert moves[2] > 0.7
    stack = tmp_path / "stack.toml"
    stack.write_text(result.to_toml())
    assert predicted(b, str(stack)).step_time_s > 1.03 * predicted(b).step_time_s
    assert predicted(b, str(stack)).step_time_high_s / predicted(b, str(stack)).step_time_s != 1


def test_runs_can_be_added_one_at_a_time(tmp_path):
    """The file keeps the distribution, so the second run starts from what the first one showed."""
    a, b = written(tmp_path, "a.toml"), written(tmp_path, "b.toml", micro=2)
    rates = [str(predicted(path).tokens_per_s / 1.2) for path in (a, b)]
    first = adjusted(measured_runs([a], rates[:1], [], ""))
    file = tmp_path / "first.toml"
    file.write_text(first.to_toml())
    second = adjusted(measured_runs([b], rates[1:], [], str(file)))
    together = adjusted(measured_runs([a, b], rates, [], ""))
    assert second.after.products == pytest.approx(together.after.products, rel=0.02)
    assert second.after.name == first.after.name == "default-calibrated"
    assert second.after.measured_runs == together.after.measured_runs == 2
    assert second.after.source == together.after.source == "default, adjusted to 2 measured runs"


def test_the_band_is_that_of_calibrated_stacks_from_five_runs_on(tmp_path):
    """The band was computed from predictions after five runs: fewer keep the band that the stack had."""
    a, file = written(tmp_path, "a.toml"), tmp_path / "stack.toml"
    rate, stack = str(predicted(a).tokens_per_s / 1.2), ""
    before = predicted(a).step_time_high_s / predicted(a).step_time_s
    for count in (1, 2, 2):
        file.write_text(adjusted(measured_runs([a] * count, [rate] * count, [], stack)).to_toml())
        stack, found = str(file), configure(a, stack=str(file)).stack
        high = predicted(a, stack).step_time_high_s / predicted(a, stack).step_time_s
        assert found.evidence == ("calibrated-typical" if found.measured_runs >= 5 else "typical")
        assert (high > 0.95 * before) is (found.measured_runs < 5)
    assert found.measured_runs == 5


@pytest.mark.parametrize(
    ("name", "evidence"),
    [("megatron-core", "calibrated"), ("torchtitan", "calibrated"), ("default", "calibrated-typical")],
)
def test_the_band_after_five_runs_depends_on_known_switches(tmp_path, name, evidence):
    a = written(tmp_path, "a.toml")
    rate = str(predicted(a, name).tokens_per_s)
    stack = adjusted(measured_runs([a] * 5, [rate] * 5, [], name)).after
    assert stack.evidence == evidence
    assert band_quantiles("calibrated")[1] < band_quantiles("calibrated-typical")[1] < 2 * band_quantiles("typical")[1]


def test_runs_that_the_stack_does_not_explain_do_not_count(tmp_path):
    """Five runs that contradict each other do not make a narrow band."""
    a = written(tmp_path, "a.toml")
    rates = [str(predicted(a).tokens_per_s / slow) for slow in (1.1, 1.1, 1.1, 1.1, 5.0)]
    result = adjusted(measured_runs([a] * 5, rates, [], ""))
    assert result.far_off == ["a.toml"]
    assert (result.after.measured_runs, result.after.evidence) == (4, "typical")


@pytest.mark.parametrize("numbers", [[1.0], [-1.0] * 36, [0.0] * 36])
def test_a_broken_covariance_is_refused(tmp_path, numbers):
    a, file = written(tmp_path, "a.toml"), tmp_path / "stack.toml"
    result = adjusted(measured_runs([a], ["9000"], [], ""))
    file.write_text(
        result.to_toml().replace("covariance = [", f"covariance = {numbers}\nunused = [").split("unused")[0]
    )
    with pytest.raises(MeshwrightError) as error:
        adjusted(measured_runs([a], ["9000"], [], str(file)))
    assert "covariance" in error.value.what


def test_a_measured_host_time_of_collectives_is_kept(tmp_path):
    """The file of a run on this machine has the time of a collective: it is not replaced by that of two operators."""
    a = written(tmp_path, "a.toml", dp=4, tp=2, micro=2)
    text = (tmp_path / "a.toml").read_text()
    text = text.replace('extends = "default"', 'extends = "default"\nlaunch = "5us"\ncollective_launch = "600us"')
    (tmp_path / "a.toml").write_text(text)
    result = adjusted(measured_runs([a], [str(predicted(a).tokens_per_s)], [], ""))
    assert result.predicted_before[0] == pytest.approx(predicted(a).step_time_s, rel=1e-6)
    assert result.after.collective_launch == pytest.approx(120 * result.after.launch, rel=1e-3)


@pytest.mark.parametrize(
    ("rate", "sizes", "word"),
    [("1e12", [], "times what the devices can do"), ("9000", ["60"], "60 B"), ("9000", ["60TiB"], "60 TiB")],
)
def test_measurements_that_the_devices_cannot_reach_are_refused(tmp_path, rate, sizes, word):
    with pytest.raises(MeshwrightError) as error:
        measured_runs([written(tmp_path, "a.toml")], [rate], sizes, "")
    assert error.value.code == "MW-CALIB-003"
    assert word in error.value.what


def test_a_run_far_from_its_prediction_is_named(tmp_path, capsys):
    a = written(tmp_path, "a.toml")
    with pytest.raises(SystemExit):
        main(["calibrate", "--from-run", a, "--tokens-per-s", f"{predicted(a).tokens_per_s / 8:.0f}"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "a.toml: measured and predicted differ by more than a factor of 2" in shown
    assert "band of a typical stack until 5 runs are measured (so far: 0)" in shown


@pytest.mark.parametrize("option", [["--tokens-per-s", "5"], ["--memory", "5GiB"], ["--stack", "default"]])
def test_options_of_a_run_need_a_run(option, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["calibrate", *option])
    assert leaving.value.code == 2
    assert f"{option[0]} needs --from-run" in capsys.readouterr().err


def test_measured_memory_moves_the_slack(tmp_path):
    a = written(tmp_path, "a.toml", dp=1, tp=8, micro=1)
    rate = str(predicted(a).tokens_per_s)
    used = predicted(a).memory_gib
    more, less = (
        adjusted(measured_runs([a], [rate], [f"{used * f}GiB"], "")).after.allocator_slack for f in (1.05, 0.97)
    )
    assert more > less
    result = adjusted(measured_runs([a], [rate], [f"{used * 1.05}GiB"], "")).as_dict()["runs"][0]
    assert result["before_gib"] == pytest.approx(used)
    assert result["before_gib"] < result["after_gib"] < result["measured_gib"]


def run_folder(folder, device, **measured):
    folder.mkdir()
    written(folder, "plan.toml")
    (folder / "prediction.json").write_text("{}")
    (folder / "run.json").write_text(json.dumps({"version": 1, "device": device}))
    seconds = predicted(str(folder / "plan.toml")).step_time_s
    (folder / "measurement.json").write_text(json.dumps({"step_time_s": seconds, **measured}))
    return str(folder)


def test_memory_of_a_run_folder_is_what_the_allocator_reserved(tmp_path):
    reserved = predicted(written(tmp_path, "a.toml")).memory_as("reserved")
    same, more = (
        adjusted(measured_runs([run_folder(tmp_path / name, "cuda", memory_gib=f * reserved)], [], [], "")).after
        for name, f in (("same", 1.0), ("more", 1.05))
    )
    assert same.allocator_slack == pytest.approx(0.06, rel=1e-3)
    assert more.allocator_slack > same.allocator_slack


def test_a_run_on_cpus_says_nothing_of_a_stack_on_gpus(tmp_path):
    with pytest.raises(MeshwrightError) as error:
        measured_runs([run_folder(tmp_path / "run", "cpu")], [], [], "")
    assert "used CPUs" in error.value.what


def test_a_run_folder_is_read(tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    written(folder, "plan.toml")
    (folder / "prediction.json").write_text("{}")
    (folder / "measurement.json").write_text(
        json.dumps({"step_time_s": 2 * predicted(str(folder / "plan.toml")).step_time_s})
    )
    out = tmp_path / "stack.toml"
    with pytest.raises(SystemExit) as leaving:
        main(["calibrate", "--from-run", str(folder), "--out", str(out), "--json"])
    assert leaving.value.code == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["after_s"] > 0
    assert "calibrated" in out.read_text()


@pytest.mark.parametrize(
    ("rates", "sizes"), [([], []), (["nan"], []), (["-3"], []), (["5", "6"], []), (["5"], ["1GiB", "2GiB"])]
)
def test_missing_or_wrong_measurements_are_refused(tmp_path, rates, sizes):
    with pytest.raises(MeshwrightError) as error:
        measured_runs([written(tmp_path, "a.toml")], rates, sizes, "")
    assert error.value.code == "MW-CALIB-003"


def test_a_folder_without_a_measurement_is_refused(tmp_path):
    with pytest.raises(MeshwrightError) as error:
        measured_runs([str(tmp_path)], [], [], "")
    assert error.value.code == "MW-CALIB-003"


def test_runs_of_different_stacks_are_refused(tmp_path):
    a, b = written(tmp_path, "a.toml"), written(tmp_path, "b.toml")
    text = (tmp_path / "b.toml").read_text().replace('"default"', '"megatron-core"')
    (tmp_path / "b.toml").write_text(text)
    with pytest.raises(MeshwrightError) as error:
        adjusted(measured_runs([a, b], ["1000", "1000"], [], ""))
    assert error.value.code == "MW-CALIB-004"
