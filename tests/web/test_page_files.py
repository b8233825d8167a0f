"""Files that a user brings: a Hugging Face config.json, a cluster.toml, and run folders, one of them while it grows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.describe.config import load
from meshwright.describe.run_folder import STEPS, json_line
from meshwright.explain.beside import beside_plan
from meshwright.explain.explanation import explain_traces
from meshwright.explain.folder import read_traces
from meshwright.training.folder import RunFolder
from meshwright.training.hooks import StepRecord
from meshwright.view.page.subject import Subject
from meshwright.view.page.traced import document
from meshwright.view.report import page as report
from web.browser import fragment, shows, until

Open = Callable[..., Any]
SMALL = fragment(model="tiny", cluster={"extends": "dgx-h100", "gpus": 8}, workload__batch=64, workload__seq=1024,
                 plan={"tp": 2, "pp": 2, "shard": 2, "zero": 1})  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip


def test_a_dropped_model_and_a_calibrated_cluster_become_inputs(server: str, open_page: Open, tmp_path: Path) -> None:
    page = open_page(server + "/" + SMALL, refused=True)
    model, cluster = tmp_path / "my-llama.json", tmp_path / "cluster.toml"
    model.write_text(json.dumps(LLAMA), "utf-8")
    cluster.write_text('[cluster]\nextends = "dgx-a100"\ngpus = 16\nprice = 2.5\n', "utf-8")
    page.locator("input[type=file]").nth(0).set_input_files(model)
    shows(page, "my-llama")
    page.locator("input[type=file]").nth(1).set_input_files(cluster)
    shows(page, "on 16 × a100")
    cluster.write_text("[cluster]\nprice = \n", "utf-8")
    page.locator("input[type=file]").nth(1).set_input_files(cluster)
    shows(page, "MW-CONF-006", "#inputs")


def test_a_run_grows_on_the_page(server: str, open_page: Open, run_folders: Path) -> None:
    folder = run_folders / "watched"
    folder.mkdir()
    config = load("examples/demo-dp2-tp2.toml")
    prediction = Subject(config).estimate.prediction.as_dict()
    (folder / "plan.toml").write_text(config.to_toml(), "utf-8")
    (folder / "prediction.json").write_text(json.dumps(prediction), "utf-8")
    rows = [
        StepRecord(0, 5.5, 7.0, 1024, 0.4),
        StepRecord(1, 5.25, 6.0, 1024, 0.3),
        StepRecord(2, 4.125, 5.0, 1024, 0.3),
    ]
    lines = [json_line(record.row()) for record in rows]
    (folder / STEPS).write_bytes(b"".join(lines[:2]))
    page = open_page(server + "/#view=runs&options.runs=" + json.dumps({"run": "watched"}))
    shows(page, "running", "#view .stats")
    shows(page, "5.25", "#view .stats")
    with (folder / STEPS).open("ab") as file:
        file.write(lines[2])
    shows(page, "4.125", "#view .stats")
    measured = prediction | {"step_time_s": 0.3, "step_time_low_s": 0.28, "step_time_high_s": 0.4}
    span = {
        "rank": 0,
        "stream": "schedule",
        "name": "0F0",
        "start_s": 0.0,
        "duration_s": 0.1,
        "category": "F",
        "args": {},
    }
    parts = {
        "version": 1,
        "steps": 3,
        "busiest_rank": 0,
        "exposed_s": {"tp": 0.1},
        "hidden_s": {},
        "predicted_exposed_s": {"tp": 0.2},
        "ranks": [],
    }
    (folder / "timeline.json").write_text(
        json.dumps({"version": 1, "step": 2, "measured": [span], "simulated": [span]}), "utf-8"
    )
    (folder / "communication.json").write_text(json.dumps(parts), "utf-8")
    (folder / "difference.json").write_text(
        json.dumps([{"what": "step time", "unit": "s", "predicted": 0.26, "measured": 0.3, "error": -0.13}]), "utf-8"
    )
    (folder / "measurement.json").write_text(json.dumps(measured), "utf-8")
    shows(page, "done", "#view .stats")
    shows(page, "A measured step above the simulated one", "#view")
    shows(page, "tp, predicted", "#view")


def test_a_report_opens_from_disk_and_compares_runs(open_page: Open, tmp_path: Path) -> None:
    config = load("examples/demo-dp2-tp2.toml")
    for name, seconds in (("first", 0.3), ("second", 0.2)):
        folder = RunFolder.create(tmp_path / name, config, Subject(config).estimate.prediction, steps=9, device="cpu")
        folder.begin_attempt(world=4, plan=config.plan.title())
        for step in range(4):
            measured = {"mfu": 0.1, "exposed_s": {"tp": 0.1}, "validation_loss": 4.5 if step == 2 else None}
            folder.add(StepRecord(step, 5.0 - step, 1.0, 1024, seconds, **measured))
        folder.event("fault", 3, "rank 2 was killed by signal 9")
        folder.end_attempt("rank 2 was killed by signal 9" if name == "first" else "")
        folder.close()
    file = tmp_path / "report.html"
    file.write_text(report([tmp_path / "first", tmp_path / "second"]), "utf-8")
    page = open_page(f"file://{file}")
    shows(page, "failed", "#view .stats")
    for title in ("Loss", "Step time", "Throughput", "MFU", "Exposed communication", "Attempts", "Events"):
        shows(page, title, "#view")
    assert page.locator("#inputs").is_hidden()
    page.get_by_label("Compare with second").check()
    shows(page, "second", "#view .legend")
    page.get_by_role("button", name="second").click()
    shows(page, "done", "#view .stats")


TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
global_batch_size = 64
seq_len = 8192
[parallelism]
tensor_parallel_degree = 4
[metrics]
log_freq = 10
"""


def test_a_dropped_settings_file_sets_the_inputs_and_settings_are_copied(
    server: str, open_page: Open, tmp_path: Path
) -> None:
    page = open_page(server + "/" + SMALL, refused=True)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    settings = tmp_path / "llama.toml"
    settings.write_text(TITAN, "utf-8")
    page.locator("input[type=file]").nth(2).set_input_files(settings)
    shows(page, "llama3-8b")
    until(page, "location.hash.includes('torchtitan')")
    page.select_option("#copy-settings", "megatron-lm")
    until(page, "navigator.clipboard.readText().then((text) => text.includes('--tensor-model-parallel-size 4'))")
    settings.write_text(TITAN.replace("tensor_parallel_degree = 4", "tensor_parallel_degree = 3"), "utf-8")
    page.locator("input[type=file]").nth(2).set_input_files(settings)
    shows(page, "MW-SET-001", "#inputs")


def test_traced_steps_are_strips_above_their_prediction(open_page: Open, tmp_path: Path) -> None:
    traces = Path(__file__).parents[1] / "explain" / "traces"
    for run, ranks in (("gpu-odd-shape", 1), ("ddp-slow-rank", 2)):
        e = explain_traces(read_traces(sorted(traces.glob(f"{run}-rank-[0-9].json.gz"))))
        file = tmp_path / f"{run}.html"
        file.write_text(document(e, beside_plan(e)), "utf-8")
        page = open_page(f"file://{file}")
        shows(page, e.causes[0].cause, "#view")
        lanes = page.locator("#view svg[aria-label*='rank 0:']").get_attribute("aria-label")
        assert lanes.count("rank ") == ranks
        assert ("predicted" in lanes) == (run == "gpu-odd-shape")
        shows(page, "From the predicted" if run == "gpu-odd-shape" else "No prediction beside it", "#view")
