"""A Hugging Face `config.json`, or the folder that holds it, read into a Model with the standard library alone.

    model = read("config.json")

`config` parses the file and checks every value; `parts` reads what families share; `families` has one function per family;
`router` reads how experts are chosen; `differences` lists what changes the mathematics and is not run by `train`.
"""

from meshwright.describe.hf.config import parse
from meshwright.describe.hf.families import FAMILIES
from meshwright.describe.hf.reader import MOST_NOTES, interpret, read

__all__ = ["FAMILIES", "MOST_NOTES", "interpret", "parse", "read"]
