"""How fast the page answers, in a real browser: Llama 3 70B on 1,024 H100.

    python benchmarks/page.py [ROUNDS]

    first load      bytes that the browser receives, and the time until the first view is drawn          target: under 300 kB
    input change    from a changed input to the repainted panels; then with what to change first         target: under 100 ms
    chips           from a changed input to the chips with their new effects                         target: under 500 ms
    search          from a changed input to the first drawing of each searched view, and to the complete one  target: 1 s, 1.5 × the command
    timeline        frames per second while panning 64 stages × 512 micro-batches                        target: 30

Needs Chromium and Playwright. The command that a search is compared with is `meshwright plan --json`, without the start of Python.
"""

import json
import shutil
import statistics
import subprocess
import sys
import time
from typing import Any

ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
# Differences from the state in which the page opens (`state.js`), as they stand in its address.
START: dict[str, Any] = {
    "model": "llama3-70b",
    "stack": "megatron-core",
    "cluster": {"extends": "dgx-h100", "gpus": 1024},
    "workload": {"batch": 1024, "seq": 8192},
    "plan": {"tp": 8, "sp": True, "pp": 2, "shard": 64, "zero": 1, "recompute": "selective"},
}
LARGE = {"cluster.gpus": 1024, "plan.shard": 64}
DEEP = {
    "model.extends": "llama3-70b", "model.layers": 128, "workload.batch": 512, "workload.seq": 2048,
    "plan.tp": 1, "plan.sp": "false", "plan.pp": 64, "plan.shard": 1, "plan.zero": 0,
}  # fmt: skip
SEARCHED = ("leaders", "heatmap", "pareto", "scaling", "batch", "sensitivity")
READY = "#view[aria-busy=false] .body > *"
# From a change of the state to the frame in which every open panel has new data, and to the one in which all answers are drawn; milliseconds.
CHANGE = """async (address) => {
  const view = document.getElementById("view"), left = new Set(view.querySelectorAll(".body")), start = performance.now();
  const frame = () => new Promise((done) => requestAnimationFrame(() => done(performance.now() - start)));
  const repainted = new Promise((done) => {
    for (const body of left) new MutationObserver(() => left.delete(body) && !left.size && done()).observe(body, { childList: true });
  }).then(frame);
  let busy = false;
  const complete = new Promise((done) => new MutationObserver((_, observer) => {
    const now = view.getAttribute("aria-busy") === "true";
    if (busy && !now) { observer.disconnect(); done(); }
    busy ||= now;
  }).observe(view, { attributes: true, attributeFilter: ["aria-busy"] })).then(frame);
  location.hash = address;
  return [await repainted, await complete];
}"""
# From a change of the state to chips of tensor parallelism with their new effects.
CHIPS = """async (address) => {
  const knob = [...document.querySelectorAll("#inputs fieldset")].find((one) => one.textContent.startsWith("Tensor parallel"));
  const start = performance.now();
  await new Promise((done) => {
    const watch = new MutationObserver(() => { watch.disconnect(); done(); });
    watch.observe(knob.querySelector(".chips"), { childList: true });
    location.hash = address;
  });
  await new Promise((done) => requestAnimationFrame(() => done()));
  return performance.now() - start;
}"""
PAN = """async () => {
  const canvas = document.querySelector("#view canvas[role=application]");
  canvas.scrollIntoView();
  const box = canvas.getBoundingClientRect(), y = box.top + 20;
  const send = (kind, x) => canvas.dispatchEvent(
    new PointerEvent(kind, { clientX: x, clientY: y, bubbles: true, pointerId: 1, isPrimary: true, buttons: 1 }));
  send("pointerdown", box.left + box.width / 2);
  const start = performance.now();
  let frames = 0;
  while (performance.now() - start < 2000) {
    send("pointermove", box.left + box.width / 2 + 80 * Math.sin(frames / 10));
    await new Promise((done) => requestAnimationFrame(done));
    frames += 1;
  }
  send("pointerup", box.left + box.width / 2);
  return frames / ((performance.now() - start) / 1000);
}"""


def fragment(view: str, changes: dict[str, Any]) -> str:
    """The part of the address that holds a state."""
    return "&".join(f"{key}={value}" for key, value in {"view": view, **changes}.items())


def varied(number: int) -> dict[str, Any]:
    """Another batch: a state that the server has not answered before."""
    return {**LARGE, "workload.batch": 1024 + 128 * (number + 1)}


def start_server() -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-u", "-m", "meshwright", "web", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, next(word for word in line.split() if word.startswith("http://"))


def command_seconds(batch: int) -> float:
    """Seconds of the planner and of its JSON in this process, with everything imported."""
    from meshwright import api
    from meshwright.describe.config import Config

    config = Config.from_document({**START, "workload": {"batch": batch, "seq": 8192}})
    start = time.perf_counter()
    json.dumps(api.plan(config).as_dict())
    return time.perf_counter() - start


def measure(browser: Any, address: str, rounds: int) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    received: list[int] = []
    page.on("requestfinished", lambda asked: received.append(asked.sizes()["responseBodySize"]))
    start = time.perf_counter()
    page.goto(f"{address}/#{fragment('memory', LARGE)}")
    page.wait_for_selector(READY, timeout=60_000)
    print(
        f"first load      {sum(received) / 1000:8.0f} kB   {1000 * (time.perf_counter() - start):8.0f} ms to the first view"
    )
    for place, view in enumerate(("memory", "waterfall", "roofline")):
        page.goto(f"{address}/#{fragment(view, LARGE)}")
        page.wait_for_selector(READY, timeout=60_000)
        page.wait_for_load_state("networkidle")
        found = []
        for n in range(rounds):
            found.append(page.evaluate(CHANGE, fragment(view, varied(300 + 20 * place + n))))
            page.wait_for_load_state("networkidle")  # its chips
        report(f"change: {view}", [repainted for repainted, _ in found])
        report("        complete", [complete for _, complete in found])
    page.goto(f"{address}/#{fragment('overview', LARGE)}")
    page.wait_for_selector("#inputs .chips small")
    page.wait_for_load_state("networkidle")

    def chips(n: int) -> float:
        found = float(page.evaluate(CHIPS, fragment("overview", varied(200 + n))))
        page.wait_for_load_state("networkidle")
        return found

    report("chips", [chips(n) for n in range(rounds)])
    command_seconds(1024)  # imports
    for place, view in enumerate(SEARCHED):
        page.goto(f"{address}/#{fragment(view, LARGE)}")
        page.wait_for_selector(READY, timeout=120_000)
        asked = [varied(50 + 10 * place + n) for n in range(min(rounds, 3))]
        found = [page.evaluate(CHANGE, fragment(view, one)) for one in asked]
        page.wait_for_load_state("networkidle")
        command = statistics.median(command_seconds(one["workload.batch"]) for one in asked)
        first, complete = (statistics.median(times) / 1000 for times in zip(*found, strict=True))
        print(
            f"search: {view:<12}{first:6.2f} s first {complete:8.2f} s complete ({complete / command:.2f} × the command, {command:.2f} s)"
        )
    page.goto(f"{address}/#{fragment('timeline', DEEP)}")
    page.wait_for_selector("#view canvas[role=application]", timeout=120_000)
    print(f"timeline        {page.evaluate(PAN):8.0f} frames per second while panning 64 stages × 512 micro-batches")


def report(name: str, times: list[float]) -> None:
    print(f"{name:<18}{statistics.median(times):6.0f} ms median   {max(times):6.0f} ms at most, of {len(times)}")


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        print("no Chromium: apt-get install chromium")
        return
    from playwright.sync_api import sync_playwright

    process, address = start_server()
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
            measure(browser, address, rounds)
            browser.close()
    finally:
        process.terminate()
        process.wait(20)


if __name__ == "__main__":
    main()
