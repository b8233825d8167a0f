"""The collectives of a rank: their kind, group, bytes, and when they ran.

NCCL   a kernel runs from when this rank arrived until the collective is complete. torch records name, sizes and ranks with it
       (`record_param_comms`), in the kernel's own arguments or in those of the operator that launched it. Older versions only annotate
       the launch ("nccl:all_to_all"), with dims; the kernel of an all-to-all is called SendRecv
gloo   an annotation "gloo:all_reduce" on a thread of the library, with dims but without a group. A reduce-scatter is carried out as an all-reduce:
       the kind is that of the call `c10d::_reduce_scatter_base_`, the n-th call for the n-th annotation. Our trainer annotates the calls with
       their axis and ranks ("collective all_reduce dp 0,2"), so that its groups are told apart
"""

import re
from dataclasses import replace
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from meshwright.explain.kernels import group_of
from meshwright.explain.reader import ranks_in
from meshwright.explain.recognise import RecognisedTrace
from meshwright.explain.trace import KERNEL, NO_DETAIL, RUNTIME, Detail, ListedGroup, TracedCollectives

KINDS = (  # part of a name → kind; the first match decides
    ("reduce_scatter", "reduce_scatter"), ("reducescatter", "reduce_scatter"), ("allreduce", "all_reduce"), ("all_reduce", "all_reduce"),
    ("allgather", "all_gather"), ("all_gather", "all_gather"), ("alltoall", "all_to_all"), ("all_to_all", "all_to_all"),
    ("sendrecv", "send"), ("send", "send"), ("recv", "receive"), ("receive", "receive"), ("broadcast", "broadcast"), ("barrier", "barrier"),
    ("reduce", "reduce"), ("gather", "gather"), ("scatter", "scatter"),
)  # fmt: skip
ELEMENT = {"double": 8, "long": 8, "int64": 8, "float64": 8, "half": 2, "bfloat16": 2, "float16": 2, "bf16": 2, "fp16": 2, "short": 2,
           "byte": 1, "char": 1, "bool": 1, "float8": 1, "int8": 1, "uint8": 1}  # fmt: skip
UNNAMED = "unnamed groups"
COLLECTIVE = "collective "
ANNOTATED = re.compile(COLLECTIVE + r"\S+ \S* [0-9,]*")  # what `annotation_of` writes
MOST_BYTES = 1 << 50  # of a call: no file is trusted with more
AXIS_WORDS = (
    ("tp", "tensor"),
    ("pp", "pipeline"),
    ("cp", "context"),
    ("ep", "expert"),
    ("dp", "data", "fsdp", "shard", "replicate"),
)


def kind_of_collective(name: str) -> str:
    lower = name.lower()
    return next((kind for part, kind in KINDS if part in lower), "")


def element_bytes(dtype: str) -> int:
    lower = dtype.lower()
    return next((size for part, size in ELEMENT.items() if part in lower), 4)


def shapes_in(dims: str) -> list[tuple[int, ...]]:
    """The innermost lists of numbers of "[[8, 4], [4], []]": a shape for each tensor."""
    return [
        tuple(int(n) for n in part.split(",") if n.strip())
        for part in re.findall(r"\[(\d{1,15}(?:, ?\d{1,15})*|)\]", dims)
    ]


def bytes_in(detail: Detail) -> int:
    """Bytes of the largest tensor of a call."""
    if detail.elements:
        return min(detail.elements * element_bytes(detail.dtype), MOST_BYTES)
    sizes = [prod(shape) for shape in shapes_in(detail.dims) if shape]
    return min(max(sizes, default=0) * element_bytes(detail.dtypes.partition(",")[0]), MOST_BYTES)


def traced_collectives(found: RecognisedTrace) -> TracedCollectives:
    return of_nccl(found) if len(found.device) else of_gloo(found)


def of_nccl(found: RecognisedTrace) -> TracedCollectives:
    e = found.events
    is_collective = np.array([group_of(name) == "comm" for name in e.names], bool)
    chosen = np.flatnonzero(is_collective[e.name[found.device]] & (e.category[found.device] == KERNEL))
    details = [e.details[d] for d in e.detail[found.device[chosen]].tolist()]
    missing = [i for i, detail in enumerate(details) if not detail.collective]
    if missing:
        recorded = recorded_calls(found)
        for i in missing:
            details[i] = recorded.get(int(e.external[found.launches[chosen[i]]]), details[i])
        unnamed = np.array([i for i in missing if not details[i].collective], np.int64)
        for i, detail in zip(unnamed.tolist(), annotated_calls(found, found.launches[chosen[unnamed]]), strict=True):
            details[i] = detail
    names = [d.collective or e.names[n] for d, n in zip(details, e.name[found.device[chosen]].tolist(), strict=True)]
    return table(found, found.device[chosen], [kind_of_collective(name) for name in names], details)


def recorded_calls(found: RecognisedTrace) -> dict[int, Detail]:
    """What `record_param_comms` wrote, by the number that joins it with launches."""
    e = found.events
    at = np.flatnonzero(found.names_with("record_param_comms"))
    return {int(e.external[i]): e.details[e.detail[i]] for i in at.tolist()}


def annotated_calls(found: RecognisedTrace, launches: NDArray[np.int64]) -> list[Detail]:
    """What the annotation "nccl:…" around each launch says; nothing for a launch without one."""
    e, out = found.events, [NO_DETAIL] * len(launches)
    spans = np.flatnonzero(found.names_with("nccl:") & found.on_host)
    for thread in np.unique(e.thread[spans]).tolist():
        mine = spans[e.thread[spans] == thread]
        at = np.searchsorted(e.start[mine], e.start[launches], side="right") - 1
        around = (launches >= 0) & (e.thread[launches] == thread) & (at >= 0) & (e.end[mine[at]] >= e.end[launches])
        for i in np.flatnonzero(around).tolist():
            span = mine[at[i]]
            out[i] = e.details[e.detail[span]]._replace(collective=e.names[e.name[span]].removeprefix("nccl:"))
    return out


def of_gloo(found: RecognisedTrace) -> TracedCollectives:
    e = found.events
    at = np.flatnonzero(found.names_with("gloo:"))
    kinds = [kind_of_collective(e.names[n]) for n in e.name[at].tolist()]
    details = [e.details[d] for d in e.detail[at].tolist()]
    by_library = [by_gloo(kind) for kind in kinds]
    for calls, named in ((calls_of_torch(found), False), (annotations_of_trainer(found), True)):
        called = [kind_of_collective(e.names[n].split()[1] if named else e.names[n]) for n in e.name[calls].tolist()]
        for kind in set(by_library):
            mine = [i for i, k in enumerate(by_library) if k == kind]
            theirs = [i for i, k in enumerate(called) if by_gloo(k) == kind]
            for i, j in zip(mine, theirs, strict=True) if len(mine) == len(theirs) else ():
                kinds[i], detail = called[j], e.details[e.detail[calls[j]]]
                details[i] = (
                    with_group(details[i], e.names[e.name[calls[j]]]) if named else replaced_dims(details[i], detail)
                )
    return table(found, at, kinds, details)


def by_gloo(kind: str) -> str:
    """What gloo carries a collective out as."""
    return "all_reduce" if kind == "reduce_scatter" else kind


def calls_of_torch(found: RecognisedTrace) -> NDArray[np.int64]:
    """The operators that issue collectives."""
    e = found.events
    calls = np.flatnonzero(found.names_with("c10d::", "_c10d_functional::") & (e.category != RUNTIME))
    return np.array([i for i in calls.tolist() if kind_of_collective(e.names[e.name[i]])], np.int64)


def annotations_of_trainer(found: RecognisedTrace) -> NDArray[np.int64]:
    """The annotations that `annotation_of` named; another program may use the word for its own."""
    ours = np.array([bool(ANNOTATED.fullmatch(name)) for name in found.events.names], bool)
    return np.flatnonzero(ours[found.events.name])


def annotation_of(kind: str, axis: str, ranks: tuple[int, ...]) -> str:
    """The name of the annotation that our trainer puts around a call while it is profiled."""
    return f"{COLLECTIVE}{kind} {axis} {','.join(map(str, ranks))}"


def with_group(detail: Detail, annotation: str) -> Detail:
    """A collective with the group that `annotation_of` wrote."""
    _, axis, ranks = annotation.removeprefix(COLLECTIVE).split(" ")
    return detail._replace(group=axis, ranks=ranks_in(f"[{ranks}]"))


def replaced_dims(of_library: Detail, of_call: Detail) -> Detail:
    """The call's tensors where they are larger: an all-gather's annotation has the dims of one rank's part."""
    return (
        of_call._replace(dtypes=of_library.dtypes or of_call.dtypes)
        if bytes_in(of_call) > bytes_in(of_library)
        else of_library
    )


def table(found: RecognisedTrace, at: NDArray[np.int64], kinds: list[str], details: list[Detail]) -> TracedCollectives:
    groups, listed = [], found.trace.groups
    several = {group.ranks for group in listed.values() if len(group.ranks) > 1}
    only = UNNAMED if len(several) > 1 else next((name for name, group in listed.items() if len(group.ranks) > 1), "")
    for detail in details:
        named = detail.group or only
        group = listed.get(named, ListedGroup())
        groups.append((f"{named} {group.description}", detail.ranks or group.ranks))
    sizes = np.array([bytes_in(detail) for detail in details], np.int64)
    e = found.events
    return TracedCollectives(
        tuple(kinds),
        tuple(name for name, _ in groups),
        tuple(ranks for _, ranks in groups),
        sizes,
        e.start[at],
        e.end[at],
    )


def axis_of(kind: str, description: str) -> str:
    """The axis of a group: from the words of its description, else from what it is used for. Of several groups that the trace does not tell apart
    (gloo records none with a collective) only the use is known."""
    if UNNAMED in description:
        return {"send": "pp", "receive": "pp", "all_to_all": "ep"}.get(kind, UNNAMED)
    return axis_in_words(description) or {"send": "pp", "receive": "pp", "all_to_all": "ep"}.get(kind, "dp")


@lru_cache(maxsize=4096)  # a training has few groups and millions of calls
def axis_in_words(description: str) -> str:
    """The axis that the words of a description name; empty if they name none."""
    words = re.split(r"[^a-z]+", description.lower())
    for axis, *parts in AXIS_WORDS:
        if axis in words or any(word.startswith(part) for word in words for part in parts):
            return axis
    return ""


def groups_by_axis(found: RecognisedTrace, collectives: TracedCollectives) -> dict[str, tuple[int, ...]]:
    """The largest group of each axis that a rank used. A message names its two ends only, so the listed groups of its axis count too."""
    c, out = collectives, dict[str, tuple[int, ...]]()
    used = [(axis_of(kind, group), ranks) for kind, group, ranks in zip(c.kind, c.group, c.ranks, strict=True)]
    axes = {axis for axis, _ in used}
    listed = [(axis_in_words(group.description), group.ranks) for group in found.trace.groups.values()]
    for axis, ranks in used + [(axis, ranks) for axis, ranks in listed if axis in axes]:
        if found.trace.rank in ranks and len(ranks) > len(out.get(axis, ())):
            out[axis] = ranks
    return out


def moved(collectives: TracedCollectives, nanoseconds: int) -> TracedCollectives:
    """The collectives on another clock."""
    return replace(collectives, start=collectives.start + nanoseconds, end=collectives.end + nanoseconds)
