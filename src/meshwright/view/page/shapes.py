"""The shape of the data of every view, as `view.json_schema` writes shapes: what Python gives, and what the OpenAPI document says.

A key with `?` at its end may be missing; `{"?": shape}` may be null. The tests compare real data of every view with these shapes, key by key.
"""

import json

from meshwright.units import Json
from meshwright.view.page.frame import static_file

SHAPES: Json = json.loads(static_file("shapes.json"))
