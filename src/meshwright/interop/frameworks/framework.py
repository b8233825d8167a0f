"""What the commands need to know of a framework: its names, its table of keys, its training stack and the form of its files.

The part `program`, the command that starts it, is joined by name in `view.launch_files.frameworks`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

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
    package: str = ""  # what pip installs; "": its name
    left_to_script: tuple[str, ...] = ()  # fields of a plan that its settings leave to the training script
    program: Callable[..., Any] | None = (
        None  # of a plan, the paths of plan file and run folder, and the steps between checkpoints (`view.launch_files`)
    )

    def names_least_gpus(self, path: str) -> bool:
        """Whether the number of GPUs of a recipe at this path of the framework's repository is the smallest that its degrees allow."""
        return bool(self.least_gpus and re.search(self.least_gpus, path))


OPTIMIZERS = (("muon", "muon"), ("adamw", "adamw"), ("adam|optimizers|lamb|lion", "adamw"), ("sgd", "sgd"))
PRECISIONS = (("nvfp4|fp4", "fp4"), ("mxfp8|fp8_mx|fp8mx", "mxfp8"), ("fp8|float8", "fp8"))  # in names of recipes
