"""The handmade schedules by name; `registry.SCHEDULES` adds `auto`, which searches for a better one."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.programs.pipelines.looped import (
    gpipe,
    interleaved,
    interleaved_zb,
    looped_bfs,
    naive,
    one_forward_one_backward,
    zb_h1,
    zb_h2,
)
from meshwright.programs.pipelines.program import PipelineProgram
from meshwright.programs.pipelines.vshaped import dualpipev, zbv

Builder = Callable[..., PipelineProgram]

HANDMADE: dict[str, Builder] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "looped-bfs": looped_bfs,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "interleaved-zb": interleaved_zb,
    "zbv": zbv,
    "dualpipev": dualpipev,
}
