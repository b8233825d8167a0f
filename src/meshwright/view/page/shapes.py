"""The shape of the data of every view, as `view.json_schema` writes shapes: what Python gives, what the OpenAPI document says, and what the script
of the page checks where it cannot draw (`shapes.js`). All of them read `static/shapes.json`.

A key with `?` at its end may be missing; `{"?": shape}` may be null. The tests compare real data of every view with these shapes, key by key.
"""

import json

from meshwright.units import Json
from meshwright.view.page.frame import static_file

SHAPES: Json = json.loads(static_file("shapes.json"))
