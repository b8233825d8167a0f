"""`meshwright bench`: measure collectives, links and devices."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from meshwright.cli.options import described
from meshwright.cli.output import patient, writable
from meshwright.describe.files import write_text
from meshwright.errors import MeshwrightError
from meshwright.units import parse_seconds
from meshwright.view.tables import show


@described
def command(
    ranks: int = 0,
    backends: str = "",
    operations: str = "",
    smallest: str = "1KiB",
    largest: str = "1GiB",
    budget: str = "60s",
    device: str = "auto",
    timeout: str = "60s",
    json_file: str = "",
    html: str = "",
    read: str = "",
) -> None:
    """Measure all collectives, transfers between pairs of ranks, and the device, within a time budget.

    Alone it starts local processes; under torchrun or srun it joins their ranks, and rank 0 prints the result.
    An interrupted bench keeps what was measured, marked as interrupted."""
    from meshwright.training.launch.rank import placement

    wait, limit = max(parse_seconds(timeout), 1.0), parse_seconds(budget)
    writable(json_file, html)
    if read:
        from meshwright.calibrate.nccl_tests import read_result

        return finish(read_result(read), json_file, html)
    place = None if ranks else placement(os.environ)
    chief = place is None or place.rank == 0
    with patient("starting the ranks", at_once=True, visible=chief) as set_share:
        # It imports torch, which takes longer than a user waits for a bar.
        from meshwright.comm.bench.run import sweep_of

        sweep = sweep_of(backends, operations, smallest, largest, budget)
        result, failure = measured(
            place, ranks, sweep, device, wait, lambda left, doing: set_share(1.0 - min(left / limit, 1.0), doing)
        )
    if chief and not failure and not (result.points or result.device):
        why = "; ".join(result.skipped[:3])
        raise MeshwrightError("MW-BENCH-006", "nothing was measured", why=why, fix="meshwright bench --backends gloo")
    if chief and (result.points or result.device or not failure):
        finish(result, json_file, html)
    elif chief and not isinstance(failure, MeshwrightError):
        print("stopped before anything was measured: nothing is written", file=sys.stderr)
    if failure:
        raise failure
    return None


def measured(
    place: Any, ranks: int, sweep: Any, device: str, wait: float, show: Callable[[float, str], None]
) -> tuple[Any, BaseException | None]:
    """The result, and what interrupted it: Ctrl-C, a signal, or a rank that failed."""
    from meshwright.comm.bench.run import Collector, bench_rank
    from meshwright.training.launch.join import connection_failed, joined
    from meshwright.training.launch.local import run as launch
    from meshwright.training.launch.rank import lost_connection
    from meshwright.training.machine import available_memory, gpu_count

    sweep = replace(sweep, memory_bytes=available_memory() / 2)
    collector = Collector(show)
    try:
        if place:
            with joined(place, device, "gloo", wait, wait) as context:
                bench_rank(replace(context, send=collector), sweep)
        else:
            launch(
                "meshwright.comm.bench.run:bench_rank",
                ranks or gpu_count() or 4,
                sweep,
                group_timeout=wait,
                silence=wait + sweep.budget_s,
                listen=lambda rank, message: collector(message),
                device=device,
            )
    except (KeyboardInterrupt, SystemExit, MeshwrightError, RuntimeError) as found:
        if isinstance(found, RuntimeError) and not lost_connection(str(found)):
            raise
        failure = connection_failed(found) if isinstance(found, RuntimeError) else found
        what = str(failure).splitlines()[0][:300] if isinstance(failure, MeshwrightError) else "stopped by a signal"
        return collector.result(what), failure
    return collector.result(), None


def finish(result: Any, json_file: str, html: str) -> None:
    """Write the files and print the tables."""
    from meshwright.view import bench as view

    if json_file:
        result.write(json_file)
    if html:
        write_text(html, view.html(result))
    show(view.page(result))
    for what, where in (("result", json_file), ("page", html)):
        if where:
            print(f"{what} written to {where}")
