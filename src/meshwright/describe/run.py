"""The sections of a run file that say what it reads, how it starts and what it saves: [data], [run] and [checkpoint]."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from meshwright.describe.base import Described, Seconds, Size, Whole
from meshwright.errors import MeshwrightError
from meshwright.units import Json

# --- The section [data] of a run file: which tokens to train on, and how they become sequences.
#
#     [data]
#     path = ["web", "code"]      # folders that `meshwright data prepare` wrote, or prefixes of Megatron's .bin and .idx files
#     weights = [0.8, 0.2]        # shares of the samples; default: in proportion to the tokens
#     document_mask = true        # attention does not cross documents
#     validation = 0.01           # share of the documents that is kept for validation
#     eval_every = 100            # steps between evaluations
#
# Without `path` a run trains on the source of Python's standard library, as bytes. Relative paths start at the file in which they stand.


def as_list(value: Any) -> Any:
    """One path as a list of one."""
    return ([value] if value else []) if isinstance(value, str) else value


Paths = Annotated[tuple[str, ...], BeforeValidator(as_list)]
DATA_PATHS = ("path", "validation_path", "tokenizer")  # fields that hold paths


class Data(Described):
    """Training data; empty: the source of Python's standard library."""

    path: Paths = ()
    """token files; empty: the source of Python's standard library"""
    weights: tuple[float, ...] = ()
    """shares of the samples by path; empty: by tokens"""
    tokenizer: str = ""
    """the tokenizer that the token files must be made with"""
    pack: bool = True
    """sequences contain several documents; false: one each, padded"""
    document_mask: bool = False
    """attention does not cross documents"""
    validation: float = Field(default=0.0, ge=0, lt=1)
    """share of the documents kept for validation"""
    validation_path: Paths = ()
    """token files for validation, in place of a share"""
    eval_every: Whole = 0
    """steps between evaluations; 0: no evaluation"""
    eval_batches: Size = 8
    """batches of an evaluation, fewer if the data end"""
    seed: Whole | None = None
    """seed of the order of samples; empty: the seed of the run"""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if not self.path:
            changed = sorted(self.as_dict())
            if changed:
                raise MeshwrightError(
                    "MW-DATA-008",
                    f"data.{changed[0]} has no effect without data.path",
                    why="The default corpus is one text: it has no documents, weights or validation part",
                    fix="meshwright data prepare SOURCES --tokenizer bytes --out DIR, then --set data.path=DIR",
                )
        if self.weights and (len(self.weights) != len(self.path) or min(self.weights) <= 0):
            what = f"data.weights has {len(self.weights)} values for {len(self.path)} paths, the smallest {min(self.weights):g}"
            raise MeshwrightError("MW-DATA-008", what, why="Each path has one weight above 0")
        if self.eval_every and not (self.validation or self.validation_path):
            what = f"data.eval_every={self.eval_every} without validation data"
            why = "An evaluation needs documents that are not trained on"
            raise MeshwrightError("MW-DATA-008", what, why=why, fix="--set data.validation=0.01")
        if self.validation and self.validation_path:
            what = "data.validation and data.validation_path both name validation data"
            raise MeshwrightError("MW-DATA-008", what, fix="give one of them")
        return self

    def with_paths_in(self, folder: Path) -> Self:
        """A copy whose relative paths start at `folder`."""
        return self.but(
            **{name: value for name, value in paths_in(self.as_dict(), folder).items() if name in DATA_PATHS}
        )


def paths_in(table: Json, folder: Path, fields: tuple[str, ...] = DATA_PATHS) -> Json:
    """The table of a section with the relative paths in `fields` joined to `folder`; other values stay as they are."""

    def joined(value: Any) -> Any:
        return str(folder / value) if isinstance(value, str) and value and value != "bytes" else value

    def all_joined(value: Any) -> Any:
        return [joined(one) for one in value] if isinstance(value, list | tuple) else joined(value)

    return {name: all_joined(value) if name in fields else value for name, value in table.items()}


# --- The section [run] of a run file: how many steps, from which seed, and what happens around them.
#
# [run]
# steps = 100_000
# seed = 1
# start_from = "Qwen3-8B"     # a folder of Transformers with the initial weights; without [model], also the model
# compile = "blocks"          # torch.compile, layer by layer: the default on GPUs
# restarts = 3                # after the failure of a rank, from the last good checkpoint
# loggers = ["tensorboard"]   # besides the rows in the run folder, which are always written

PORT = 29_500  # where the ranks of a job meet: torchrun's default
RUN_PATHS = ("start_from",)  # fields that hold paths
Logger = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class Run(Described):
    """One training run: options of the command line replace these values."""

    steps: Size = 100
    """training steps in all, those before a resume included"""
    seed: Whole = 0
    """of the initial weights, of dropout and of the order of the samples"""
    start_from: str = ""
    """a Transformers folder with the initial weights; empty: they are drawn from the seed"""
    deterministic: bool = False
    """only kernels that give the same bits in every run; slower on GPUs"""
    compile: Literal["auto", "off", "blocks", "whole"] = "auto"
    """torch.compile for each layer (blocks) or for a whole stage (whole); auto: blocks on GPUs, off on CPUs"""
    graphs: Literal["off", "step"] = "off"
    """step: replays forward and backward from one CUDA graph, on one GPU; faster where kernels are short"""
    restarts: Whole = 3
    """restarts from the last good checkpoint after a failure"""
    hang_s: Seconds = Field(default=0.0, ge=0)
    """silence of a rank after which it counts as hung; 0: from its step times"""
    spike: float = Field(default=0.0, ge=0)
    """loss over the running median that counts as a spike; 0: spikes are not looked for"""
    loggers: tuple[Logger, ...] = ()
    """packages that also receive every logged step"""
    log_every: Size = 1
    """steps between the rows that loggers receive"""
    profile_steps: Whole = 0
    """steps of which torch traces are written; 0: none"""

    @property
    def compiled(self) -> bool:
        """Whether layers are compiled on GPUs."""
        return self.compile != "off"

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if 0 < self.spike <= 1:
            what = f"run.spike = {self.spike:g} is not valid"
            why = "It is a factor over the running median of the loss, so every step would be a spike"
            raise MeshwrightError("MW-CONF-003", what, why=why, valid=["0", "above 1"], fix="--set run.spike=3")
        return self

    def with_paths_in(self, folder: Path) -> Self:
        """A copy whose relative paths start at `folder`."""
        return self.but(**paths_in(self.as_dict(), folder, RUN_PATHS))


# --- The section [checkpoint] of a run file: when a run saves its state, and how many of its checkpoints are kept.
#
# [checkpoint]
# every = 1000                # steps; 0: only at the end of the run
# keep = 3                    # the last good checkpoints; 0: the run writes none


class Checkpoint(Described):
    """Intervals and limits of saving a run's state to its folder."""

    every: Whole = 0
    """steps between checkpoints; 0: only at the end of the run"""
    keep: Whole = 2
    """how many of the last good checkpoints are kept; 0: the run writes none"""
    asynchronous: bool = True
    """training continues while a checkpoint is written; false: it waits"""
    on_signal: bool = True
    """SIGTERM or SIGUSR1 saves a checkpoint and ends the run; false: ends it at once"""
