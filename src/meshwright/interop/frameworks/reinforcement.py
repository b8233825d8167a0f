"""verl and NeMo-RL: reinforcement learning; read for what they refuse, not written.

Their memory holds generation engines and reference models beside training, so it is not judged, and their keys are not checked for misspellings.
"""

from meshwright.interop.keys import Facts
from meshwright.interop.tables import framework


def _derive(facts: Facts) -> None:
    facts.setdefault("sharding", "parameters")
    facts["sp"] = bool(facts.get("sp")) and facts.get("tp", 1) > 1


VERL = framework("verl", not_modelled=(r".",), derive=_derive)
NEMO_RL = framework("nemo-rl", not_modelled=(r".",), derive=_derive)
