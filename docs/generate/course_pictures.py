"""The pictures of the course in the documentation: each figure of the page at its defaults, as SVG below docs/pictures/course.

A browser draws them: Chromium with Playwright, as in the tests of the page. `make pictures` writes all of them,
`python -m course_pictures NAME …` some.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from meshwright.view.page.learn import CHAPTERS, chapter

FOLDER = Path(__file__).parents[1] / "pictures" / "course"
WIDTH = 980
BEFORE = {"player": "[aria-label='Next step']"}  # pressed before the picture is taken
# Every drawing of a figure as a file of its own, with its place below the controls.
DRAWN = """async (name) => {
  const { drawn } = await import("meshwright/save.js");
  const box = document.querySelector(`[data-figure="${name}"] .drawing`), from = box.getBoundingClientRect();
  const place = (node) => { const r = node.getBoundingClientRect(); return [r.x - from.x, r.y - from.y]; };
  const text = (li) => li.querySelector("span").getBoundingClientRect().x - from.x;
  const words = [...box.querySelectorAll(".legend li")].map((li) => [text(li), place(li)[1], li.textContent]);
  const tables = [...box.querySelectorAll("table")].map((t) => place(t)[1]);
  return { height: Math.min(from.height, ...tables), words,
    parts: [...box.querySelectorAll("svg")].filter((s) => !s.closest("table")).map((s) => [...place(s), drawn(s)]) };
}"""
DEFAULTS = re.compile(
    r' (?:opacity: 1|stroke-dasharray: none|paint-order: normal|stroke: none|stroke-width: 1px|font-size: 15px|font-family: (?:&quot;|[^;"])+);'
)


def figures() -> dict[str, str]:
    """The chapter of every figure."""
    return {block["name"]: key for key in CHAPTERS for block in chapter(key)["blocks"] if block["kind"] == "figure"}


def composed(found: dict[str, Any]) -> str:
    """One SVG of all drawings of a figure and the words of its legend."""
    body = []
    for x, y, text in found["parts"]:
        text = re.sub(r'style="[^"]*"', lambda m: DEFAULTS.sub("", m[0].replace('style="', 'style=" ')), text)
        text = re.sub(r"(\d+\.\d\d)\d+", r"\1", text).replace('style=" "', "").replace('style=" ', 'style="')
        body.append(text.replace("<svg ", f'<svg x="{x:.0f}" y="{y:.0f}" ', 1))
    for x, y, text in found["words"]:
        body.append(f'<text x="{x:.0f}" y="{y + 15:.0f}" font-size="12">{text}</text>')
    size = f'width="{WIDTH}" height="{found["height"]:.0f}" viewBox="0 0 {WIDTH} {found["height"]:.0f}"'
    font = 'font-family="system-ui, sans-serif"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}><rect width="100%" height="100%" fill="#fff"/>{"".join(body)}</svg>\n'


def pictures(address: str, page: Any, names: list[str]) -> dict[str, str]:
    """The SVG of each figure, from a page of a running server."""
    out, found = {}, figures()
    for name in names:
        page.goto(f"{address}/#view=learn&options.learn.chapter={found[name]}")
        page.reload()
        page.locator(f"[data-figure='{name}'][aria-busy=false] .drawing > *").first.wait_for()
        if name in BEFORE:
            page.locator(f"[data-figure='{name}'] {BEFORE[name]}").click()
        out[name] = composed(page.evaluate(DRAWN, name))
    return out


def main() -> None:
    from playwright.sync_api import sync_playwright

    server = subprocess.Popen(
        [sys.executable, "-m", "meshwright", "web", "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        address = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())[0]  # type: ignore[index]
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--headless", "--no-sandbox"]
            )
            page = browser.new_page(viewport={"width": 1320, "height": 900}, color_scheme="light")
            FOLDER.mkdir(parents=True, exist_ok=True)
            for name, text in pictures(address, page, sys.argv[1:] or list(figures())).items():
                (FOLDER / f"{name}.svg").write_text(text, "utf-8")
            browser.close()
    finally:
        server.terminate()
        server.wait(timeout=20)


if __name__ == "__main__":
    main()
