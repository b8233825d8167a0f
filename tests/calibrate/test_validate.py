"""Reading published runs and scoring predictions, on rows written here, so that a wrong reading fails."""

import csv
import json

import numpy as np
import pytest

from meshwright.calibrate.runs import beside, rows, validate
from meshwright.calibrate.runs.accuracy import runs
from meshwright.calibrate.runs.left_out import half_of, halves, responding
from meshwright.errors import MeshwrightError

BASE = {
    "file": "made", "row_id": "r", "model": "GPT", "layers": "24", "hidden": "2048", "ffn_hidden": "8192", "heads": "16", "kv_heads": "16",
    "vocab": "51200", "seq_len": "1024", "gpu_type": "A100-80GB", "gpus": "16", "gpus_per_node": "8", "tp": "4", "pp": "2", "cp": "1", "dp": "2",
    "sp": "0", "zero": "1", "micro_batch": "2", "global_batch": "64", "recompute_mode": "full", "dtype": "fp16", "flash_attn": "0",
    "schedule": "1f1b", "stack": "megatron-lm", "step_time_s": "1.0", "pair_ratio": "", "vpp": "",
}  # fmt: skip


def predict_row(row):
    return validate.predict_rows([row])[0]


def row(**changes):
    return {**BASE, **changes}


def test_a_complete_row_needs_no_assumption():
    c = rows.case(row())
    assert not c.refused
    assert (c.plan.tp, c.plan.pp, c.plan.shard, c.plan.zero, c.plan.microbatch, c.plan.recompute) == (
        4,
        2,
        2,
        1,
        2,
        "full",
    )
    assert c.plan.microbatches(c.workload) == 16
    assert c.stack.attention == "stored"
    assert not [a for a in c.assumed if not a.startswith("network")]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden": "", "model": "GPT"}, "shape"),
        ({"gpu_type": ""}, "GPU"),
        ({"global_batch": ""}, "batch"),
        ({"tp": ""}, "degrees"),
        ({"tp": "3"}, "does not divide"),
        ({"gpu_type": "abacus"}, "catalog"),
    ],
)
def test_a_row_that_lacks_a_required_value_is_refused_with_the_reason(changes, word):
    c = rows.case(row(**changes))
    assert word in c.refused
    assert predict_row(row(**changes)).prediction is None


def test_assumptions_are_listed():
    c = rows.case(row(heads="", vocab="", micro_batch="", sp="", zero="", recompute_mode=""))
    assert not c.refused
    for word in ("heads", "vocabulary", "micro-batch", "sequence parallel", "ZeRO", "recompute"):
        assert any(a.startswith(word) for a in c.assumed), word


def test_unpublished_recompute_is_the_least_that_fits():
    large = row(
        layers="64", hidden="6144", ffn_hidden="24576", heads="48", kv_heads="48", micro_batch="8", recompute_mode=""
    )
    outcome = predict_row(large)
    assert any(a.startswith("recompute: full of ") and a.endswith("layers per stage") for a in outcome.case.assumed)
    small = predict_row(row(recompute_mode=""))
    assert any(a == "recompute: none" for a in small.case.assumed)


def outcome(predicted, measured, **changes):
    o = predict_row(row(step_time_s=str(measured), **changes))
    scale = predicted / o.prediction.step_time_s
    fields = {k: getattr(o.prediction, k) * scale for k in ("step_time_s", "step_time_low_s", "step_time_high_s")}
    object.__setattr__(o, "prediction", type(o.prediction)(**{**o.prediction.__dict__, **fields}))
    return o


def test_scores_match_their_definitions():
    made = [outcome(1.1, 1.0, tp="4"), outcome(1.8, 2.0, tp="2", pp="4"), outcome(4.0, 4.0, tp="8", pp="1")]
    s = validate.score(made)
    assert s.mape == pytest.approx(0.2 / 3)
    assert s.median == pytest.approx(0.1)
    assert s.bias == pytest.approx(0.0, abs=1e-12)
    assert s.spearman == pytest.approx(1.0)
    assert s.regret == pytest.approx(0.0)


def test_regret_is_the_slowdown_of_the_predicted_best():
    made = [outcome(2.0, 1.0, tp="4"), outcome(1.0, 3.0, tp="2", pp="4"), outcome(3.0, 2.0, tp="8", pp="1")]
    s = validate.score(made)
    assert s.regret == pytest.approx(2.0)
    assert s.spearman < 0


def test_repeated_runs_of_one_configuration_count_once_whatever_their_last_digit():
    """Three runs of one plan whose predictions differ by rounding are one configuration: nothing to choose, so no regret."""
    same = [validate.Outcome(rows.case(row(step_time_s=str(t)))) for t in (1.0, 2.0, 3.0)]
    assert validate.ranking(same, np.array([1.0, 1.0 + 1e-13, 1.0 - 1e-13])) == (None, None)


def test_only_runs_of_one_problem_are_compared_for_regret():
    """Another number of heads, attention kernel, batch or number of GPUs is no plan: the fastest of three such runs is nothing that a planner
    could choose."""
    plans = [{"tp": "4"}, {"tp": "2", "pp": "4"}, {"tp": "8", "pp": "1"}]
    others = {"heads": "32", "kv_heads": "32"}, {"flash_attn": "1"}, {"global_batch": "128"}, {"gpus": "32", "dp": "4"}
    for other in others:
        made = [outcome(2.0, 1.0, **plans[0]), outcome(1.0, 3.0, **plans[1], **other), outcome(3.0, 2.0, **plans[2])]
        assert validate.score(made).regret is None


def test_runs_that_differ_in_what_their_stack_does_are_costed_separately():
    """fp8 of Megatron-Bridge's recipes scales each tensor by its own maximum, which other runs of the same stack and shape do not."""
    row = {**BASE, "stack": "megatron-core", "dtype": "fp8", "gpu_type": "H100"}
    both = [row, {**row, "file": rows.BRIDGE}]
    together = [o.prediction.step_time_s for o in validate.predict_rows(both)]
    apart = [validate.predict_rows([one])[0].prediction.step_time_s for one in both]
    assert together == pytest.approx(apart)
    assert together[0] < together[1]


def test_times_that_were_added_up_lie_on_a_line_in_the_layers():
    """Three runs that differ in their layers only: 1, 1.5 and 2 s lie on a line; 1.53 s is 2% of itself away from it."""
    layers = {"12": 1.0, "18": 1.5, "24": 2.0}
    made = [validate.Outcome(rows.case(row(layers=n, step_time_s=str(t)))) for n, t in layers.items()]
    assert validate.off_the_line(made) == pytest.approx([0.0], abs=1e-12)
    made[1] = validate.Outcome(rows.case(row(layers="18", step_time_s="1.53")))
    assert validate.off_the_line(made) == pytest.approx([0.03 / 1.53])
    made[2] = validate.Outcome(rows.case(row(layers="24", tp="2", pp="4")))
    assert not len(validate.off_the_line(made))


def test_a_bucket_of_ddp_holds_whole_tensors_in_the_dtype_of_the_gradients():
    """DDP closes a bucket with the tensor that brings it to 25 MiB of 16-bit parameters; the gradients here are fp32. Of 24 layers of hidden size
    2048 a matrix of the FFN has 16.8M elements, query, key and value 12.6M, the output 4.2M (biases add 0.1%). The embedding is one bucket."""
    cases = [rows.case(row(stack="nanotron", pp="1", tp=tp)) for tp in ("1", "4")]
    alone, quarter = (case.plan.bucket for case in cases)
    model = cases[0].model
    assert model.tied
    total = 4 * (24 * 12 * 2048**2 + model.vocab * 2048)
    assert alone == pytest.approx(total / (1 + 24 * 3), rel=0.002)  # down; up; output with query, key and value
    assert quarter == pytest.approx(total / 4 / (1 + 20), rel=0.002)  # four buckets hold five layers, the last one less
    assert rows.case(row(stack="megatron-lm")).plan.bucket == 160e6


def test_nanotron_gives_the_stage_with_the_head_fewer_layers():
    """Layers of 12·2048² parameters and a head of 51200·2048: 2.08 layers. A stage ends with the layer that passes its share of 26.08 layers; the
    stage with the head has a layer even where the head alone passes it."""
    four, two = (rows.case(row(stack="nanotron", tp="1", pp=pp)).plan for pp in ("4", "2"))
    assert four.layers_per_stage == (7, 7, 6, 4)
    assert two.layers_per_stage == (14, 10)
    large = rows.case(row(stack="nanotron", tp="1", pp="4", vocab="409600")).plan
    assert large.layers_per_stage == (11, 10, 2, 1)
    assert rows.case(row(tp="1", pp="4")).plan.layers_per_stage == ()


def test_lora_is_read_as_adapters_and_fitted_to_nothing():
    c = rows.case(row(task="lora"))
    assert (c.model.adapter, c.refused) == (rows.ADAPTER, "")
    assert any(words.startswith("adapter: rank 16") for words in c.assumed)
    assert not responding([row()])(c)
    assert "latent" in rows.case(row(task="latent")).refused


def test_recipes_for_fine_tuning_pack_short_documents():
    assert rows.case(row(task="lora")).workload.lengths == ()
    for task, lengths in (("lora", (190,)), ("sft", (190,)), ("pretrain", ())):
        c = rows.case(row(task=task, file="megatron_bridge_perf_summary"))
        assert c.workload.lengths == lengths
        assert any(words == "documents: packed, 190 tokens each" for words in c.assumed) == bool(lengths)


def test_published_runs_with_adapters_are_predicted():
    """Nine runs of NeMo and Megatron-Bridge with their sequence lengths, and four whose tokens/s and step times tell it."""
    scored = [o for o in validate.predict_rows(r for r in runs() if r["task"] == "lora") if not o.refused]
    score = validate.score(scored)
    assert score.rows == 13
    assert (score.median, score.p90) < (0.10, 0.15)
    # The band promises nine of ten: of 13 runs fewer than ten are then inside with a chance of 3%.
    assert score.inside_band >= 10 / 13


def test_the_sequence_length_of_a_rate():
    run = {"seq_len": "", "step_time_s": "9.118", "global_batch": "32", "gpus": "8"}
    c = rows.case(row(**run, tokens_per_s_per_gpu="1796.875"))
    assert c.workload.seq == 4096
    assert "sequence length: 4096, tokens/s × step time / batch" in c.assumed
    assert "sequence length" in rows.case(row(**run, tokens_per_s_per_gpu="1820")).refused
    assert "sequence length" in rows.case(row(**run)).refused


def test_runs_that_may_have_stalled_need_no_response():
    """In a source with repetitions, a run without one is not scored; in another source it is."""
    needed = responding([row(file="sweep", pair_ratio="1.01"), row(file="single")])
    expected = {("sweep", "1.01"): True, ("sweep", ""): False, ("sweep", "2.0"): False, ("single", ""): True}
    for (source, ratio), answer in expected.items():
        assert needed(rows.case(row(file=source, pair_ratio=ratio))) is answer


def test_rows_whose_repetition_disagrees_or_is_missing_are_not_scored():
    made = [outcome(1.0, 1.0, pair_ratio="1.1"), outcome(9.0, 1.0, pair_ratio="4.0"), outcome(9.0, 1.0)]
    s = validate.score(made)
    assert s.not_scored == 2
    assert s.median == pytest.approx(0.0, abs=1e-12)


def test_rows_without_a_step_time_or_for_memory_only_are_not_scored():
    """A group of --by may have runs of a source whose times are not meant to be fast."""
    untimed = outcome(9.0, 1.0)
    untimed.case.row["step_time_s"] = ""
    s = validate.score([outcome(1.0, 1.0), untimed, outcome(9.0, 1.0, file="megatron_lm_golden_values")])
    assert (s.rows, s.not_scored) == (3, 2)
    assert s.median == pytest.approx(0.0, abs=1e-12)
    assert validate.score([untimed]).median is None


def test_macro_average_counts_sources_not_rows():
    scores = {
        "a": validate.Score(median=0.1),
        "b": validate.Score(median=0.3),
        "megatron_lm_golden_values": validate.Score(median=0.9),
    }
    assert validate.macro(scores)["median"] == pytest.approx(0.2)


def test_the_halves_of_the_sources_stay_as_they_are():
    """A source that changes its half would turn errors that choices looked at into errors of unseen sources."""
    building = ["h200_single_gpu", "llm_foundry", "megatron_bridge_perf_summary", "vtrain_ground_truth"]
    testing = ["bigscience_bloom", "nvidia_dgxc_benchmarking", "papers_misc", "ultrascale_playbook", "zero_bubble"]
    assert {half_of(name) for name in building} == {"building"}
    assert {half_of(name) for name in testing} == {"testing"}
    assert halves({"zero_bubble": 1, "llm_foundry": 2}) == {
        "building": {"llm_foundry": 2},
        "testing": {"zero_bubble": 1},
    }


def test_memory_is_compared_as_its_source_measured_it():
    outside = predict_row(row(memory_gib="20", notes="nvidia-smi snapshot"))
    inside = predict_row(row(memory_gib="20", notes="torch peak"))
    assert outside.memory_error > inside.memory_error


def test_all_well_known_runs_can_be_read():
    from importlib.resources import files

    famous = list(rows.read(str(files("meshwright.calibrate.runs").joinpath("headline.csv"))))
    assert len(famous) == 12
    found = validate.predict_rows(famous)
    assert not [o.refused for o in found if o.refused]
    assert np.median([abs(o.error) for o in found]) < 0.5


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2\n", b"\xff\xfe\x00bad", b"row_id,file\n1,2\n"])
def test_bad_files_are_clear_errors(tmp_path, content):
    path = tmp_path / "bad.csv"
    path.write_bytes(content)
    with pytest.raises(MeshwrightError) as error:
        list(rows.read(path))
    assert error.value.code.startswith("MW-VAL")


def test_odd_cells_never_raise(tmp_path):
    path = tmp_path / "odd.csv"
    odd = [
        row(layers="-3"),
        row(hidden="nan"),
        row(gpus="1e30"),
        row(tp="0"),
        row(global_batch="4M tokens"),
        row(heads="7"),
        row(vpp="x"),
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(BASE))
        writer.writeheader()
        writer.writerows(odd)
    assert len(validate.predict_rows(rows.read(path))) == len(odd)


def test_the_page_of_well_known_runs_has_a_row_for_each(tmp_path, capsys):
    """A regression: this table was empty, because only the runs of a CSV file were scored by source."""
    from meshwright.cli import main

    path = tmp_path / "page.html"
    with pytest.raises(SystemExit) as leaving:
        main(["validate", "--headline", "--html", str(path)])
    assert leaving.value.code == 0
    text = path.read_text("utf-8")
    parts = json.loads(text.partition('id="meshwright-data">')[2].partition("</script>")[0])["views"]["sheet"]["data"][
        "parts"
    ]
    chart, sources, runs = (part for part in parts if part["kind"] in ("curves", "table"))
    assert [len(series["points"]) for series in chart["series"]] == [
        12,
        2,
    ]  # one source, and the line of perfect predictions
    first, second = (row["cells"] for row in sources["rows"])
    assert (first[0], second[0]) == ("headline", "macro average")
    assert first[5] == second[5] != "–"  # the median error
    assert len(runs["rows"]) == 12
    assert "gpt3-175b-1536-a100" in [row["cells"][0] for row in runs["rows"]]


def exit_code(arguments):
    from meshwright.cli import main

    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    return leaving.value.code


def table_of(path, table):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, BASE)
        writer.writeheader()
        writer.writerows(table)
    return str(path)


def test_few_runs_of_two_sources_are_scored_without_bands(tmp_path, capsys):
    ignored = [row(file="b", tp=""), row(file="b", step_time_s=""), row(file="b", step_time_s="")]
    file = table_of(tmp_path / "runs.csv", [row(file="a"), row(file="b", stack=""), *ignored])
    assert exit_code(["validate", file, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["left_out"]["sources"]) == {"a", "b"}
    assert set(found["left_out"]["bands"]) == {
        "typical"
    }  # no other source has runs of the stack, and none has five others
    page = tmp_path / "page.md"
    assert exit_code(["validate", file, "--markdown", str(page)]) == 0
    text = page.read_text("utf-8")
    assert "| a | testing | 1 |" in text
    assert "1 are refused" in text
    assert "the step times of 2 are not scored" in text
    low = min(found["left_out"]["bands"]["typical"]["by_source"].items(), key=lambda item: item[1][0])
    assert f"| {100 * low[1][0]:.1f}% ({low[0]}) |" in text


def test_one_source_cannot_be_left_out(tmp_path, capsys):
    file, page = table_of(tmp_path / "runs.csv", [row(), row(micro_batch="1")]), tmp_path / "page.md"
    assert exit_code(["validate", file, "--markdown", str(page)]) == 2
    assert exit_code(["calibrate", "--runs", file]) == 2
    shown = capsys.readouterr().err
    assert "MW-VAL-003" in shown
    assert "MW-CALIB-005" in shown
    assert not page.exists()


def test_a_fit_without_the_bands_of_all_levels_is_not_written(tmp_path, capsys):
    file = table_of(tmp_path / "runs.csv", [row(file="a"), row(file="b", stack="")])
    assert exit_code(["calibrate", "--runs", file, "--out", str(tmp_path / "fit.toml")]) == 2
    assert "published or calibrated" in capsys.readouterr().err
    assert not (tmp_path / "fit.toml").exists()


def test_reasons_that_are_not_shown_are_counted():
    from rich.console import Console

    from meshwright.view.validate import MOST_REASONS, refusals

    found = [outcome(1.0, 1.0) for _ in range(MOST_REASONS + 2)]
    for k, o in enumerate(found):
        o.refused = f"reason {k}"
    console = Console(width=100)
    with console.capture() as shown:
        console.print(refusals(found))
    assert shown.get().splitlines()[-1].strip() == "refused 2 for 2 other reasons: see --json"


def test_another_tool_is_scored_on_the_runs_that_both_predict(tmp_path):
    file, predictions = tmp_path / "runs.csv", tmp_path / "tool.csv"
    with file.open("w", newline="") as out:
        table = csv.DictWriter(out, [*BASE])
        table.writeheader()
        table.writerows(row(row_id=name, step_time_s="2.0") for name in ("x", "y", "z"))
    predictions.write_text("row_id,tool,step_time_s\nx,other,1.0\ny,other,2.5\nnobody,other,1\n")
    outcomes = validate.predict_rows(list(rows.read(file)))
    (score,) = beside.peer_scores(outcomes, None, beside.read(str(predictions)))
    assert (score.source, score.tool, score.runs) == ("made", "other", 2)
    assert (score.mean, score.median) == (pytest.approx(0.375), pytest.approx(0.375))
    assert score.our_mean == pytest.approx(abs(outcomes[0].prediction.step_time_s / 2 - 1))
    predictions.write_text("row_id,step_time_s\nx,1.0\n")
    with pytest.raises(MeshwrightError, match="tool"):
        beside.read(str(predictions))


def test_zero_shards_over_context_parallel_ranks_too():
    c = rows.case(row(cp="2", dp="1", tp="4", gpus="16", zero="3", flash_attn="1", stack="torchtitan"))
    assert (c.plan.zero, c.plan.shard, c.plan.cp) == (3, 1, 2)
