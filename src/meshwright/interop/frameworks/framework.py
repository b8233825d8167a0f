"""What the commands need to know of a framework: its names, its table of keys, its training stack and the form of its files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from meshwright.interop.keys import Table

Form = Literal["toml", "yaml", "json", "args"]


@dataclass(frozen=True)
class Framework:
    """One framework. `stack` is the entry of the catalog with its behaviour and its abilities."""

    name: str  # as on the command line
    title: str  # as its makers write it
    stack: str
    form: Form
    table: Table
    names: tuple[str, ...] = ()  # further names in collections of recipes
    flag_prefix: str = (
        "--"  # flags name keys with this prefix removed; "": the keys of the table have the prefix themselves
    )
    splits_evenly: bool = False  # every stage has the same number of layers unless the settings name them
    layout_in_code: bool = False  # settings are a program, which may set the pipeline's layout without a key
    ends_are_layers: bool = False  # the embedding and the head may fill a pipeline stage alone
    expert_tp: Literal["tp", "one"] = "one"  # inside experts where it is not set
    trains_mtp: bool = (
        False  # multi-token prediction is trained where the model has it, unless the settings switch it off
    )
    torch_pipeline: bool = (
        False  # the pipeline is torch.distributed.pipelining, which keeps buffers for all micro-batches
    )
    least_gpus: str = (
        ""  # pattern of the paths of recipes whose number of GPUs is the smallest that their degrees allow
    )
    comment: str = ""  # the first line of a written file

    def names_least_gpus(self, path: str) -> bool:
        """Whether the number of GPUs of a recipe at this path of the framework's repository is the smallest that its degrees allow."""
        return bool(self.least_gpus and re.search(self.least_gpus, path))


OPTIMIZERS = (("muon", "muon"), ("adamw", "adamw"), ("adam|optimizers|lamb|lion", "adamw"), ("sgd", "sgd"))
PRECISIONS = (("nvfp4|fp4", "fp4"), ("mxfp8|fp8_mx|fp8mx", "mxfp8"), ("fp8|float8", "fp8"))  # in names of recipes
