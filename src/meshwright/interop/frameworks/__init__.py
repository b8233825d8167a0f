"""The frameworks whose settings are read and written, one file each; their tables of keys are in `keys.toml`."""

from collections import ChainMap
from collections.abc import Mapping, Sequence

from meshwright.describe.variants import Registry
from meshwright.errors import unknown
from meshwright.interop.frameworks.automodel import AUTOMODEL
from meshwright.interop.frameworks.axolotl import ACCELERATE, AXOLOTL
from meshwright.interop.frameworks.bridge import BRIDGE
from meshwright.interop.frameworks.deepspeed import DEEPSPEED
from meshwright.interop.frameworks.megatron import MEGATRON
from meshwright.interop.frameworks.nanotron import LEVANTER, NANOTRON, OLMO_CORE
from meshwright.interop.frameworks.read_only import GPT_NEOX, MS_SWIFT, NEMO_1, PICOTRON, TORCHTUNE
from meshwright.interop.frameworks.reinforcement import NEMO_RL, VERL
from meshwright.interop.frameworks.torchtitan import TORCHTITAN
from meshwright.interop.frameworks.torchtitan_python import TORCHTITAN_03
from meshwright.interop.frameworks.trainer import LLAMA_FACTORY, TRL
from meshwright.interop.keys import Framework

FRAMEWORKS: Registry[Framework] = Registry(  # whose settings are read and written
    "framework",
    TORCHTITAN,
    TORCHTITAN_03,
    MEGATRON,
    BRIDGE,
    AUTOMODEL,
    DEEPSPEED,
    NANOTRON,
    AXOLOTL,
    ACCELERATE,
    TRL,
    LLAMA_FACTORY,
)
READ_ONLY: Registry[Framework] = Registry(
    "framework", TORCHTUNE, PICOTRON, GPT_NEOX, NEMO_1, OLMO_CORE, LEVANTER, MS_SWIFT, VERL, NEMO_RL
)
READABLE: Mapping[str, Framework] = ChainMap(READ_ONLY, FRAMEWORKS)  # type: ignore[arg-type]


def framework_named(
    name: str, also: Sequence[str] = (), among: Mapping[str, Framework] = FRAMEWORKS, fix: str = "--for {}"
) -> Framework:
    """The framework of a name, as on the command line or as its makers write it. `also`: names that the caller accepts too."""
    found = find(name)
    if found is None or found.name not in among:
        raise unknown("MW-SET-012", "framework", str(name), [*also, *among], fix)
    return found


def find(name: object) -> Framework | None:
    """The framework of a name; None if there is none."""
    text = str(name).strip().lower()
    for framework in READABLE.values():
        if text in (framework.name, framework.title.lower(), *(n.lower() for n in framework.names)):
            return framework
    inside = [f for f in READABLE.values() if any(f"({n.lower()})" in text for n in (f.title, *f.names))]
    return inside[0] if inside else None
