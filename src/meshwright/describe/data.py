"""The section [data] of a run file: which tokens to train on, and how they become sequences.

    [data]
    path = ["web", "code"]      # folders that `meshwright data prepare` wrote, or prefixes of Megatron's .bin and .idx files
    weights = [0.8, 0.2]        # shares of the samples; default: in proportion to the tokens
    document_mask = true        # attention does not cross documents
    validation = 0.01           # share of the documents that is kept for validation
    eval_every = 100            # steps between evaluations

Without `path` a run trains on the source of Python's standard library, as bytes. Relative paths start at the file in which they stand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from meshwright.describe.base import Described, Size, Whole
from meshwright.errors import MeshwrightError


def as_list(value: Any) -> Any:
    """One path as a list of one."""
    return ([value] if value else []) if isinstance(value, str) else value


Paths = Annotated[tuple[str, ...], BeforeValidator(as_list)]
PATHS = ("path", "validation_path", "tokenizer")  # fields that hold paths


class Data(Described):
    """Training data; empty: the source of Python's standard library."""

    path: Paths = Field(default=(), description="token files; empty: the source of Python's standard library")
    weights: tuple[float, ...] = Field(default=(), description="shares of the samples by path; empty: by tokens")
    tokenizer: str = Field(default="", description="the tokenizer that the token files must be made with")
    pack: bool = Field(default=True, description="sequences contain several documents; false: one each, padded")
    document_mask: bool = Field(default=False, description="attention does not cross documents")
    validation: float = Field(default=0.0, ge=0, lt=1, description="share of the documents kept for validation")
    validation_path: Paths = Field(default=(), description="token files for validation, in place of a share")
    eval_every: Whole = Field(default=0, description="steps between evaluations; 0: no evaluation")
    eval_batches: Size = Field(default=8, description="batches of an evaluation, fewer if the data end")
    seed: Whole | None = Field(default=None, description="seed of the order of samples; empty: the seed of the run")

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
            raise MeshwrightError(
                "MW-DATA-008",
                f"data.weights has {len(self.weights)} values for {len(self.path)} paths, the smallest {min(self.weights):g}",
                why="Each path has one weight above 0",
            )
        if self.eval_every and not (self.validation or self.validation_path):
            raise MeshwrightError(
                "MW-DATA-008",
                f"data.eval_every={self.eval_every} without validation data",
                why="An evaluation needs documents that are not trained on",
                fix="--set data.validation=0.01",
            )
        if self.validation and self.validation_path:
            raise MeshwrightError(
                "MW-DATA-008",
                "data.validation and data.validation_path both name validation data",
                fix="give one of them",
            )
        return self

    def with_paths_in(self, folder: Path) -> Self:
        """A copy whose relative paths start at `folder`."""
        return self.but(**{name: value for name, value in paths_in(self.as_dict(), folder).items() if name in PATHS})


def paths_in(table: dict[str, Any], folder: Path, fields: tuple[str, ...] = PATHS) -> dict[str, Any]:
    """The table of a section with the relative paths in `fields` joined to `folder`; other values stay as they are."""

    def joined(value: Any) -> Any:
        return str(folder / value) if isinstance(value, str) and value and value != "bytes" else value

    def all_joined(value: Any) -> Any:
        return [joined(one) for one in value] if isinstance(value, list | tuple) else joined(value)

    return {name: all_joined(value) if name in fields else value for name, value in table.items()}
