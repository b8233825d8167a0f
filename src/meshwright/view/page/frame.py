"""The frame of the page with its import map: the one difference between the live page and a written file.

Modules import each other by bare names (`import { bars } from "meshwright/draw.js"`). The import map says where a name is: at an address
of the server, or inside the file as a `data:` address. So no build step is needed, and both uses run the same modules.
"""

import base64
import hashlib
import html
import json
from collections.abc import Iterator
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from meshwright.units import Json

STYLESHEET = '<link rel="stylesheet" href="/static/style.css">'
IMPORT_MAP = '<script type="importmap">{"imports": {}}</script>'
MAIN = '<script type="module" src="/static/js/main.js"></script>'
SCRIPTS = "js/"
TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "json": "application/json",
}


@cache
def static_names() -> dict[str, Traversable]:
    """Every file of the page by its path below `static/`."""
    return dict(sorted(_walk(resources.files("meshwright.view.page").joinpath("static"), "")))


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        elif entry.name.rpartition(".")[2] in TYPES:
            yield prefix + entry.name, entry


def static_file(name: str) -> bytes:
    """The content of a file of the page."""
    return static_names()[name].read_bytes()


def scripts() -> dict[str, bytes]:
    """The JavaScript modules by the name that other modules import: meshwright/draw.js, meshwright/views/memory.js, …"""
    return {
        f"meshwright/{name[len(SCRIPTS) :]}": static_file(name) for name in static_names() if name.startswith(SCRIPTS)
    }


def import_map(addresses: dict[str, str]) -> str:
    """The content of the script element that says where each module is."""
    return for_script({"imports": addresses})


def live_page() -> tuple[str, str]:
    """The page as the server sends it, and the hash of its import map for the content-security policy."""
    addresses = {name: f"/static/js/{name.removeprefix('meshwright/')}" for name in scripts()}
    content = import_map(addresses)
    digest = base64.b64encode(hashlib.sha256(content.encode("utf-8")).digest()).decode("ascii")
    frame = static_file("index.html").decode("utf-8")
    ahead = "".join(f'\n<link rel="modulepreload" href="{address}">' for address in addresses.values())  # all at once
    return frame.replace(IMPORT_MAP, f'<script type="importmap">{content}</script>{ahead}'), f"'sha256-{digest}'"


def offline_page(title: str, data: Json) -> str:
    """The page as one file that opens from disk: style, modules and data are inside; it may reach no address."""
    addresses = {
        name: "data:text/javascript;base64," + base64.b64encode(text).decode("ascii")
        for name, text in scripts().items()
    }
    frame = static_file("index.html").decode("utf-8")
    before, _, after = frame.partition("<title>")
    frame = f"{before}<title>{html.escape(title)}</title>{after.partition('</title>')[2]}"
    style = static_file("style.css").decode("utf-8")
    parts = {
        STYLESHEET: f"{POLICY}\n<style>\n{style}</style>",
        IMPORT_MAP: f'<script type="application/json" id="meshwright-data">{for_script(data)}</script>\n'
        f'<script type="importmap">{import_map(addresses)}</script>',
        MAIN: '<script type="module">import "meshwright/main.js";</script>',
    }
    for mark, content in parts.items():
        if mark not in frame:
            raise AssertionError(f"index.html lacks the line {mark}")
        frame = frame.replace(mark, content)
    return frame


# A written file needs its own script and style elements and nothing from any address.
POLICY = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline' data:; "
    "style-src 'unsafe-inline'; img-src data:\">"
)


def for_script(value: Any) -> str:
    """JSON for a script element: `<` is escaped, so that no text in it can end the element; NaN and infinity are refused."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
