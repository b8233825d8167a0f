"""Files that a user brings to Plan: a Hugging Face config.json, a cluster.toml, settings of another framework."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.describe.config import load
from web.browser import fragment, settled, shows, until

Open = Callable[..., Any]
SMALL = fragment(model="tiny", cluster={"extends": "dgx-h100", "gpus": 8}, workload__batch=64, workload__seq=1024,
                 plan={"tp": 2, "pp": 2, "shard": 2, "zero": 1})  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip


def opened(page: Any, file: Path, text: str) -> None:
    """Open a file with the one button for files."""
    file.write_text(text, "utf-8")
    page.locator("#inputs input[type=file]").set_input_files(file)


def test_opened_files_become_inputs_and_can_be_undone(server: str, open_page: Open, tmp_path: Path) -> None:
    page = open_page(server + "/" + SMALL, refused=True)
    opened(page, tmp_path / "my-llama.json", json.dumps(LLAMA))
    shows(page, "my-llama")
    shows(page, "Hugging Face model. Changed: model", "#files .notice")
    page.get_by_role("button", name="Undo").click()
    shows(page, "tiny")
    opened(page, tmp_path / "cluster.toml", '[cluster]\nextends = "dgx-a100"\ngpus = 16\nprice = 2.5\n')
    shows(page, "on 16 × a100")
    opened(page, tmp_path / "plan.toml", load("examples/demo-dp2-tp2.toml").to_toml() + "\n[run]\nsteps = 3\n")
    shows(page, "Not read: 1 entry", "#files .notice")
    shows(page, "tp 2")
    flags = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 100 --seq-length 8 --sequence-parallel"
    )
    opened(
        page, tmp_path / "train.sh", f"source env.sh\ntorchrun --nnodes 1 --nproc_per_node 2 pretrain_gpt.py {flags}"
    )
    shows(page, "MW-SET-009 sequence parallelism with tensor parallelism 1", "#files .notice")
    page.locator("#files .notice summary").click()
    shows(page, "env.sh (not read)", "#files .notice")


DROP = """(files) => {
  const dataTransfer = new DataTransfer();
  for (const [name, text] of files) dataTransfer.items.add(new File([text], name));
  document.querySelector("main").dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
}"""


def test_several_dropped_files_are_opened_together(server: str, open_page: Open) -> None:
    """Anywhere on the page, here in Learn: each file says what it is, the others why they were not opened, and one click undoes all of them."""
    page = open_page(server + "/" + SMALL + "&view=learn", refused=True)
    page.wait_for_load_state("networkidle")
    large = '{"large": "' + "x" * (1 << 20) + '"}'
    page.evaluate(DROP, [["words.txt", "words"], ["my-llama.json", json.dumps(LLAMA)], ["large.json", large],
                         ["cluster.toml", '[cluster]\nextends = "dgx-a100"\ngpus = 16\n']])  # fmt: skip
    shows(page, "Changed: model, cluster", "#files .notice")
    shows(page, "my-llama on 16 × a100")
    said = page.locator("#files .notice").inner_text()
    assert "my-llama.json: Hugging Face model. cluster.toml: cluster." in said
    assert "Not opened: words.txt." in said
    assert "Not opened: large.json. 'large.json' has 1.05 MB" in said
    page.get_by_role("button", name="Undo").click()
    until(page, "location.hash.includes('view=learn')")
    page.get_by_role("link", name="Plan").click()
    shows(page, "tiny on 8 ")


def test_the_inputs_come_back_when_the_catalog_could_not_be_read(server: str, open_page: Open) -> None:
    page = open_page(server + "/static/style.css", ready="", offline=True)
    page.route("**/api/catalog", lambda route: route.abort(), times=1)
    page.goto(server + "/" + SMALL)
    page.get_by_role("button", name="Try again").click()
    page.get_by_role("group", name="Tensor parallel, tp").wait_for()


def test_a_file_that_is_not_known_changes_nothing(server: str, open_page: Open, tmp_path: Path) -> None:
    page = open_page(server + "/" + SMALL, refused=True)
    before = page.url
    wrong = {"cluster.toml": "[cluster]\nprice = \n",
             "words.txt": "some words", "other.json": '{"a": 1}', "scenarios.json": '{"scenarios": [{"name": 3}]}',
             "run.toml": "[run]\nsteps = 3\n", "model.toml": '[model]\nname = "none"\nlayers = -3\n',
             "deep.json": "[" * 9000 + "]" * 9000}  # fmt: skip
    for name, text in wrong.items():
        opened(page, tmp_path / name, text)
        page.locator("#files .notice.error").wait_for()
        assert "RangeError" not in page.locator("#files").inner_text()
        assert page.url == before, name
        page.evaluate("document.querySelectorAll('#files .notice').forEach((node) => node.remove())")


def test_plan_settings_launch_files_charts_and_tables_are_saved(server: str, open_page: Open) -> None:
    page = open_page(server + "/" + SMALL + "&view=leaders")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    settled(page)
    menu = page.locator("details.menu")

    def saved(action: Callable[[], Any]) -> tuple[str, str]:
        menu.evaluate("(menu) => { menu.open = true; }")
        with page.expect_download() as download:
            action()
        return download.value.suggested_filename, Path(download.value.path()).read_text("utf-8", "replace")

    name, text = saved(menu.get_by_role("button", name="Plan file").click)
    assert name == "plan.toml"
    assert "tp = 2" in text
    name, text = saved(lambda: menu.get_by_label("Settings of a framework").select_option("megatron-lm"))
    assert "--tensor-model-parallel-size 2" in text
    name, text = saved(lambda: menu.get_by_label("Launch file").select_option("slurm"))
    assert name.endswith(".sbatch")
    assert "#SBATCH" in text
    name, text = saved(menu.get_by_role("button", name="Trace of the step").click)
    assert json.loads(text)["traceEvents"]
    name, text = saved(menu.get_by_role("button", name="Scenarios").click)
    assert json.loads(text)["scenarios"][0]["config"]["plan"]["tp"] == 2
    leaders = page.locator(".view[data-name=leaders]")
    name, text = saved(leaders.get_by_role("button", name="Save as CSV").first.click)
    assert text.splitlines()[0].startswith("plan,step,")
    figure = page.locator(".view[data-name=heatmap]")
    name, text = saved(figure.get_by_role("button", name="Save as SVG").first.click)
    assert text.startswith("<svg")
    assert "var(--" not in text.replace("font", "")
    name, _ = saved(figure.get_by_role("button", name="Save as PNG").first.click)
    assert name == "heatmap.png"
    menu.evaluate("(menu) => { menu.open = true; }")
    menu.get_by_role("button", name="Copy the link").click()
    until(page, "navigator.clipboard.readText().then((text) => text === location.href)")


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


def test_an_opened_settings_file_sets_the_inputs(server: str, open_page: Open, tmp_path: Path) -> None:
    page = open_page(server + "/" + SMALL, refused=True)
    opened(page, tmp_path / "llama.toml", TITAN)
    shows(page, "llama3-8b")
    until(page, "location.hash.includes('torchtitan')")
    shows(page, "settings of torchtitan", "#files .notice")
    opened(page, tmp_path / "llama.toml", TITAN.replace("tensor_parallel_degree = 4", "tensor_parallel_degree = 3"))
    shows(page, "MW-SET-001", "#files")
