"""The shape of the data of every view, as `view.json_schema` writes shapes: what Python gives, and what the OpenAPI document says.

A key with `?` at its end may be missing; `{"?": shape}` may be null. The tests compare real data of every view with these shapes, key by key.
Many views are `parts`: a list of parts, each of one of the kinds that are listed first.
"""

import json

from meshwright.units import Json
from meshwright.view.page.frame import static_file

_READ = json.loads(static_file("shapes.json"))
PARTS = [{"|": _READ.pop("parts")}]
SHAPES: Json = {name: {k: PARTS if v == "parts" else v for k, v in shape.items()} for name, shape in _READ.items()}
