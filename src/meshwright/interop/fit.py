"""Whether the memory of a reading fits: its peak (`peak`) against that of its hardware, where GPUs, hardware and shape are given.

Where parts of the model are not counted (towers for images, other layers than attention), the peak is a lower bound: it can show that a recipe does
not fit, never that it does. A recipe fits if 5% of the memory stays free, as `plan` demands of its winner.

The number of GPUs may be the smallest that the degrees allow (`Reading.gpus_are_least`), not the number that the recipe was made for. Then more
data-parallel ranks shard the optimizer states further: the recipe does not fit only if it does not fit on 64 times as many GPUs either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from meshwright.describe import catalog
from meshwright.describe.cluster import Cluster
from meshwright.describe.memory_fit import USABLE_MEMORY, fit_words
from meshwright.errors import MeshwrightError
from meshwright.interop.assemble import assemble
from meshwright.interop.names import catalog_cluster
from meshwright.interop.peak import peak_memory
from meshwright.interop.problems import SettingsProblem
from meshwright.interop.reading import SettingsReading

DOUBLINGS = 6  # of the smallest number of GPUs, where a recipe may be meant for more


@dataclass(frozen=True)
class Fit:
    """Whether it fits (None: unknown), the peak memory, and what is to say about it."""

    fits: bool | None = None
    gib: float | None = None
    problems: list[SettingsProblem] = field(default_factory=list)


def fit(reading: SettingsReading) -> Fit:
    """The memory of a reading against that of its hardware."""
    entry = catalog_cluster(reading.hardware)
    if not reading.gpus or not entry or not _is_known(reading):
        return Fit()
    cluster: Cluster = catalog.load("clusters", entry)
    try:
        peak, limit = peak_memory(reading, cluster)
        if peak <= USABLE_MEMORY * limit:
            return Fit(None if reading.shape.partial else True, peak)
        what = f"{peak:.1f} GiB on {cluster.accelerator.name} of {limit:.1f} GiB"
        if reading.gpus_are_least:
            for larger in _with_more_gpus(reading):
                least, limit = peak_memory(larger, cluster)
                if least <= USABLE_MEMORY * limit:
                    return Fit(None, peak, [_needs_more(what, reading.gpus, larger.gpus, least)])
                what = f"{least:.1f} GiB on {cluster.accelerator.name} of {limit:.1f} GiB, on {larger.gpus} GPUs"
                peak = least
    except MeshwrightError as error:
        return Fit(problems=[SettingsProblem(error.code, error.what, error.why, error.fix, "note")])
    why = f"It {fit_words(peak, limit)}: fragments and peaks come on top"
    return Fit(False, peak, [SettingsProblem("MW-LINT-013", what, why=why)])


def _needs_more(what: str, gpus: int, enough: int, peak: float) -> SettingsProblem:
    return SettingsProblem(
        "MW-LINT-013",
        f"{what}, on {gpus} GPUs",
        why=f"{gpus} is the smallest number of GPUs that the degrees allow; on {enough} GPUs, {peak:.1f} GiB fit",
        fix=f"{enough} GPUs",
        severity="note",
    )


def _with_more_gpus(reading: SettingsReading) -> Iterator[SettingsReading]:
    """The same settings on two, four, … times the GPUs, with as many micro-batches on each: only the shards get smaller."""
    shape, batch = reading.shape, reading.facts.get("batch")
    for power in range(1, DOUBLINGS + 1):
        factor = 2**power
        facts = {**reading.facts, **({"batch": batch * factor} if batch else {})}
        made = assemble(facts, reading.framework, reading.gpus * factor, shape.layers, shape.experts)
        yield replace(reading, assembled=made, gpus_are_least=False)


def _is_known(reading: SettingsReading) -> bool:
    """Whether everything that decides the memory is given: shape, sequence, micro-batch and precision, and nothing that is not modelled."""
    facts = reading.facts
    stated = {"seq", "half"} <= set(facts) and ({"microbatch", "local_batch"} & set(facts))
    modelled = reading.assembled.fit_is_known and not facts.get("offload_parameters") and not facts.get("quantised")
    return bool(reading.shape.complete and stated and modelled)
