"""The torch.distributed backend "meshwright": collectives as programs that the cost model chooses. Importing this package registers it.

    import meshwright.comm.backend
    torch.distributed.init_process_group("meshwright")

`meshwright train` and `verify` register it themselves (`--backend meshwright`).
"""

from meshwright.comm.backend.group import register

register()

__all__ = ["register"]
