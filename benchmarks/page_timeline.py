"""Frames per second of the page's timeline while it is panned: 64 stages × 512 micro-batches, in a real Chromium without a GPU.

    python benchmarks/page_timeline.py            # starts `meshwright web`; needs Debian's chromium and Playwright

The goal is 30 frames per second, for the whole step and zoomed in. Each frame paints all lanes anew.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys

PLAN = "plan.tp=1&plan.sp=false&plan.pp=64&plan.shard=1&plan.zero=0"
PAN = """async (zooms) => {
  const canvas = document.querySelector("#view canvas");
  canvas.setPointerCapture = () => {};
  for (let i = 0; i < zooms; i++) canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "+", bubbles: true }));
  const fire = (type, x) => canvas.dispatchEvent(new PointerEvent(type, { clientX: x, clientY: 400, pointerId: 1, bubbles: true }));
  fire("pointerdown", 600);
  let frames = 0;
  const start = performance.now();
  await new Promise((done) => {
    const next = () => {
      fire("pointermove", 600 - 3 * ++frames);
      performance.now() - start < 3000 ? requestAnimationFrame(next) : done();
    };
    requestAnimationFrame(next);
  });
  fire("pointerup", 0);
  return (1000 * frames) / (performance.now() - start);
}"""


def main() -> None:
    from playwright.sync_api import sync_playwright

    server = subprocess.Popen(
        [sys.executable, "-m", "meshwright", "web", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert server.stdout is not None
    try:
        address = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())
        assert address, "the server did not start"
        with sync_playwright() as playwright:
            path = shutil.which("chromium")
            browser = playwright.chromium.launch(
                executable_path=path, args=["--headless", "--no-sandbox", "--disable-gpu"]
            )
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(f"{address[0]}/#view=timeline&{PLAN}")
            page.wait_for_selector("#view[aria-busy=false] canvas", timeout=60_000)
            for zooms, what in ((0, "whole step"), (4, "zoomed in 4 times"), (8, "zoomed in 8 times")):
                print(f"{what:<20} {page.evaluate(PAN, zooms):5.1f} frames/s (goal: 30)")
            browser.close()
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=20)


if __name__ == "__main__":
    main()
