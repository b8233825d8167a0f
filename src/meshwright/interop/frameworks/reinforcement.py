"""verl and NeMo-RL: reinforcement learning; read for what they refuse, not written.

Their memory holds generation engines and reference models beside training, so it is not judged, and their keys are not checked for misspellings.
"""

from meshwright.interop.key_file import KeyTable
from meshwright.interop.keys import Facts, Framework, Table


def _derive(facts: Facts) -> None:
    facts.setdefault("sharding", "parameters")
    facts["sp"] = bool(facts.get("sp")) and facts.get("tp", 1) > 1


VERL = Framework(
    name="verl",
    title="verl",
    stack="accelerate",
    form="yaml",
    table=Table(
        keys=KeyTable("verl"),
        not_modelled=(r".",),
        derive=_derive,
    ),
)  # fmt: skip
NEMO_RL = Framework(
    name="nemo-rl",
    title="NeMo-RL",
    stack="automodel",
    form="yaml",
    table=Table(
        keys=KeyTable("nemo-rl"),
        not_modelled=(r".",),
        derive=_derive,
    ),
    names=("NeMo RL", "NeMo-Reinforcer"),
)  # fmt: skip
