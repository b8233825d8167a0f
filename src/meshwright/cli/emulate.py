"""`meshwright emulate`: several hosts on one Linux machine, with links of a chosen rate and delay."""

from meshwright.cli.options import HELP_NAMES, command_group, described
from meshwright.cli.output import patient
from meshwright.comm.emulate import page, state
from meshwright.comm.emulate.emulation import Emulation, find, take_down
from meshwright.comm.emulate.page import bring_up
from meshwright.comm.emulate.ranks import RunSettings
from meshwright.comm.emulate.topology import Topology, parse_between
from meshwright.view.tables import present, show, show_json

command = command_group(
    "Emulate a cluster on this machine: network namespaces joined by links of a chosen rate and delay. Needs root."
)


@command.command("up")
@described
def up_command(
    nodes: int,
    between: str,
    ranks_per_node: int = 1,
    oversubscription: float = 1.0,
    nodes_per_switch: int = 0,
    name: str = "default",
    links: str = "auto",
    measured: bool = True,
    json: bool = False,
) -> None:
    """Make the nodes and their links, measure them, and print what was asked and what was achieved.

    If it fails or is interrupted, nothing is left behind. Exit code 3 if this machine cannot carry the rate."""
    rate, delay = parse_between(between)
    topology = Topology(nodes, ranks_per_node, rate, delay, oversubscription, nodes_per_switch)
    emulation = Emulation(topology, name, links)
    with patient("making and measuring links", measurable=False):
        rows = bring_up(emulation, measured)
    present(page.page(emulation, rows), page.as_json(emulation, rows), json)


@command.command("run", context_settings={**HELP_NAMES, "allow_interspersed_args": False})
@described
def run_command(
    arguments: list[str],
    placement: str = "blocks",
    per_node: bool = False,
    nodes: int = 0,
    ranks_per_node: int = 0,
    timeout: float = 0,
    name: str = "default",
) -> None:
    """Run a command once per rank, each on its node, with the variables that torchrun sets.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and so on are set, so that torch.distributed joins with env://. Each line
    of output starts with its rank. When one rank fails, the others are ended and its exit code is returned; 124 after the
    timeout."""
    emulation, _ = find(name)
    settings = RunSettings(placement, per_node, nodes, ranks_per_node, timeout or None)
    emulation.run(arguments, settings)


@command.command("status")
@described
def status_command(
    name: str = "",
    measured: bool = False,
    json: bool = False,
) -> None:
    """Show the emulated clusters that are up; --measure compares their links with what was asked."""
    states = []
    for each in [name] if name else state.names():
        emulation, _ = find(each)
        with patient("measuring links", measurable=False):
            states.append((emulation, emulation.measure() if measured else None))
    if json:
        show_json([page.as_json(*each) for each in states])
    else:
        show(*(page.page(*each) for each in states) if states else ("No emulation is up.",))


@command.command("down")
@described
def down_command(
    name: str = "default",
    everything: bool = False,
) -> None:
    """Remove an emulated cluster; it is no error if there is none."""
    for each in state.names() if everything else [name]:
        print(f"Emulation '{each}' removed." if take_down(each) else f"There is no emulation '{each}'.")
