"""A Hugging Face `config.json`, or the folder that holds it, read into a Model with the standard library alone.

    model = read("config.json")

`config` parses the file and checks every value; `parts` reads what families share; `families`, `hybrids` and `decoders` have one
function per family; `router` reads how experts are chosen; `differences` lists what changes the mathematics and is not run by `train`;
`writer` is the inverse, and `compare` decides whether two models are the same.
"""

from meshwright.describe.hf.config import load, parse
from meshwright.describe.hf.families import ALIASES, FAMILIES
from meshwright.describe.hf.reader import MOST_NOTES, different_fields, family_of, interpret, read
from meshwright.describe.hf.writer import write

__all__ = [
    "ALIASES",
    "FAMILIES",
    "MOST_NOTES",
    "different_fields",
    "family_of",
    "interpret",
    "load",
    "parse",
    "read",
    "write",
]
