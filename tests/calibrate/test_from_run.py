"""A stack adjusted to the user's runs: predictions are centred, the file is accepted by every command, bad input is refused."""

import json
import math

import pytest

from meshwright.calibrate.runs.from_run import adjusted, measured_runs
from meshwright.cli import main
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
    assert configure(a, stack=str(file)).stack.evidence == "calibrated"


def test_measured_memory_moves_the_slack(tmp_path):
    a = written(tmp_path, "a.toml")
    rate = str(predicted(a).tokens_per_s)
    used = predicted(a).memory_gib
    more, less = (
        adjusted(measured_runs([a], [rate], [f"{used * f}GiB"], "")).after.allocator_slack for f in (1.05, 0.97)
    )
    assert more > less


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
