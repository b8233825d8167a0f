"""The start-up time of `meshwright --help`, compared with its target of 0.3 s and with the imports that it avoids."""

import statistics
import subprocess
import sys
import time

TARGET_S = 0.3
RUNS = 9
CASES = {
    "python alone": [sys.executable, "-c", "pass"],
    "meshwright --help": [sys.executable, "-m", "meshwright", "--help"],
    "meshwright catalog clusters": [sys.executable, "-m", "meshwright", "catalog", "clusters"],
    "import numpy, pydantic": [sys.executable, "-c", "import numpy, pydantic"],
    "import torch": [sys.executable, "-c", "import torch"],
}


def seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return time.perf_counter() - began


def main() -> None:
    for name, command in CASES.items():
        times = sorted(seconds(command) for _ in range(RUNS))
        verdict = f"  target {TARGET_S} s: {'met' if statistics.median(times) < TARGET_S else 'missed'}"
        print(
            f"{name:<28} median {statistics.median(times):.3f} s, best {times[0]:.3f} s"
            + (verdict if name.endswith("--help") else "")
        )


if __name__ == "__main__":
    main()
