"""Models without a sequence are counted in samples, in every command."""

import json

import pytest

from meshwright import api
from meshwright.cli import main
from meshwright.describe.config import Config
from meshwright.training.machine import with_precision
from meshwright.view.page.choices import choices as page_choices


@pytest.mark.parametrize("model", ["resnet-50", "lecture-mlp"])
@pytest.mark.parametrize("command", ["estimate", "plan"])
def test_a_batch_of_samples(model, command, capsys, tmp_path):
    file = tmp_path / "plan.toml"
    options = ["--out", str(file)] if command == "plan" else []
    with pytest.raises(SystemExit) as ended:
        main([command, model, "--cluster", "dgx-h100", *options])
    assert not ended.value.code
    text = capsys.readouterr().out
    assert "samples, bf16" in text
    assert "samples/s" in text
    assert "tokens/s" not in text
    assert "4096" not in text
    assert "4,096" not in text
    if options:
        assert "sequence" not in file.read_text()


def test_json_says_what_its_rate_counts(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["estimate", "resnet-50", "--cluster", "dgx-h100", "--json"])
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    assert any("counts samples" in line for line in found["assumed"])
    assert found["tokens_per_s"] * found["step_time_s"] == pytest.approx(1024)


def test_recompute_of_blocks_costs_time_and_saves_memory():
    def predicted(**plan):
        workload = {"batch": 1024}
        return api.estimate(
            Config.from_parts(
                "resnet-50", "dgx-h100", workload=workload, plan={"replicate": 8, "microbatch": 128, **plan}
            )
        ).prediction

    plain, again = predicted(), predicted(recompute="full")
    assert again.step_time_s > plain.step_time_s
    assert again.memory_gib < plain.memory_gib - 1


@pytest.mark.parametrize(
    ("workload", "plan", "expected"),
    [
        ({}, {}, "fp32"),
        ({"precision": "bf16"}, {}, "bf16"),
        ({}, {"param_dtype": "bf16"}, "bf16"),
        ({"precision": "fp32"}, {}, "fp32"),
    ],
)
def test_a_precision_is_chosen_by_the_device_only_where_none_is_named(workload, plan, expected):
    config = Config.from_parts("tiny", "laptop", workload={"batch": 8, **workload}, plan={"replicate": 2, **plan})
    chosen, note = with_precision(config, on_cpu=True)
    assert chosen.workload.precision == expected
    assert bool(note) == (not workload and not plan)
    assert with_precision(chosen, on_cpu=True) == (chosen, note)
    assert with_precision(config, on_cpu=False) == (config, "")


def test_the_page_has_no_sequence_for_a_residual_network_and_mends_the_plan_it_had():
    plan = {"shard": 4, "zero": 1, "tp": 8, "sp": True, "pp": 2, "recompute": "selective"}
    document = {"model": "resnet-50", "cluster": {"extends": "dgx-h100", "gpus": 64}, "workload": {"batch": 512}}
    offered = page_choices({**document, "plan": plan})
    assert "workload.seq" not in offered["sizes"]
    assert offered["problem"]["code"] == "MW-PLAN-009"
    assert offered["mend"] == {"plan.tp": 1, "plan.sp": False, "plan.pp": 1, "plan.shard": 64, "plan.recompute": "none"}
    mended = plan | {path.removeprefix("plan."): value for path, value in offered["mend"].items()}
    assert page_choices({**document, "plan": mended})["problem"] is None
    assert "workload.seq" in page_choices({**document, "model": "llama3-8b", "plan": plan})["sizes"]
