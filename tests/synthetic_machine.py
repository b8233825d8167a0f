"""Measurements of a machine whose constants are known: what a calibration must find again."""

from meshwright.calibrate import device_fit
from meshwright.calibrate.machine import AddedTime, MachineMeasurement
from meshwright.calibrate.points import DevicePoint

SIZES = ({"tokens": 4.0, "width": 16.0}, {"tokens": 128.0, "width": 64.0}, {"tokens": 512.0, "width": 256.0})
TRUE = {
    "launch": 10e-6, "byte": 1e-10, "exponential": 4e-9, "product_launch": 50e-6, "flop": 3e-11, "attention_launch": 80e-6,
    "attention_flop": 9e-11, "tile_launch": 7e-6, "update_launch": 8e-6, "update_byte": 5e-11,
}  # fmt: skip


def point(kind: str, shape: dict[str, float], seconds: float = 1.0, dtype: str = "fp32") -> DevicePoint:
    times = {"median_s": seconds, "low_s": seconds, "high_s": seconds, "samples": 1}
    return DevicePoint(kind=kind, dtype=dtype, shape=shape, work=1.0, unit="launch", **times)


def synthetic(factor: float = 1.0, dtype: str = "fp32") -> list[DevicePoint]:
    """Points that follow the model exactly, with the constants of `TRUE`. Updates are those of fp32 masters."""
    shapes = [(part, size) for part in device_fit.PARTS for size in SIZES]
    shapes += [
        ("linear", {"m": m, "n": n, "k": k})
        for m, n, k in ((64.0, 64.0, 64.0), (256.0, 64.0, 192.0), (256.0, 512.0, 512.0))
    ]
    shapes += [
        ("attention", {"batch": 1.0, "heads": h, "seq": s, "width": d})
        for h, s, d in ((1.0, 8.0, 8.0), (4.0, 64.0, 16.0), (4.0, 256.0, 16.0))
    ]
    shapes += [("tile", {"batch": 2.0, "heads": 4.0, "seq": s, "width": 16.0, "operators": 60.0}) for s in (8.0, 32.0)]
    shapes += [("optimizer", {"tensors": 16.0, "elements": n}) for n in (64.0, 16384.0)]
    launches = {
        "linear": "product_launch",
        "attention": "attention_launch",
        "tile": "tile_launch",
        "optimizer": "update_launch",
    }
    out = []
    for kind, shape in shapes:
        updates = kind == "optimizer"
        measured_in = "fp32" if updates else dtype
        f = device_fit.features(point(kind, shape, dtype=measured_in))
        flop = TRUE["attention_flop" if kind == "attention" else "flop"]
        seconds = f.launches * TRUE[launches.get(kind, "launch")]
        seconds += f.other_launches * TRUE["update_launch" if updates else "launch"]
        seconds += f.flops * flop + f.bytes * TRUE["update_byte" if updates else "byte"]
        seconds += f.exponentials * TRUE["exponential"]
        out.append(point(kind, shape, factor * seconds, measured_in))
    return out


def measurement(
    ranks: int = 4, cores: float = 2.0, busy: float = 0.0, wall: float = 1e-3, cpu: float = 3e-4
) -> MachineMeasurement:
    """`wall` and `cpu`: seconds that a short collective of two ranks adds, on the clock and of a rank's threads."""
    sharing = max(1.0, ranks / cores)
    wait = wall - sharing * cpu

    def computed(size: int, n: int) -> float:
        return cpu * size / 2 + n * 3e-10

    added = [
        AddedTime(
            operation=name,
            ranks=size,
            bytes=n,
            wall_s=sharing * computed(size, n) + wait * size / 2,
            cpu_s=computed(size, n),
        )
        for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "point-to-point")
        for size in sorted({2, ranks if name != "point-to-point" else 2})
        for n in (1024, 2**20)
    ]
    return MachineMeasurement(
        made="2026-01-01",
        dtype="fp32",
        ranks=ranks,
        cores=cores,
        busy_cores=busy,
        operations=tuple(synthetic()),
        collectives=tuple(added),
    )
