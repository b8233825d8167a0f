"""`meshwright emulate`: several hosts on one Linux machine, with links of a chosen rate and delay."""

from __future__ import annotations

from typing import Annotated

import typer

from meshwright.cli.options import HELP_NAMES, JsonOption, command_group

command = command_group(
    "Emulate a cluster on this machine: network namespaces joined by links of a chosen rate and delay. Needs root."
)

Name = Annotated[str, typer.Option("--name", help="Name of the emulation; several can be up at once.")]


@command.command("up")
def up_command(
    nodes: Annotated[int, typer.Option("--nodes", help="Number of nodes.")],
    between: Annotated[
        str, typer.Option("--between", help="Rate of a node's link in each direction, and delay one way: 200Mb/s,1ms.")
    ],
    ranks_per_node: Annotated[int, typer.Option("--ranks-per-node", help="Ranks that `run` starts on a node.")] = 1,
    oversubscription: Annotated[
        float,
        typer.Option(
            "--oversubscription", help="Rate of a switch's downlinks over that of the uplink its nodes share."
        ),
    ] = 1.0,
    nodes_per_switch: Annotated[
        int,
        typer.Option("--nodes-per-switch", help="Nodes on one switch. Default: all; half of them if oversubscribed."),
    ] = 0,
    name: Name = "default",
    links: Annotated[
        str,
        typer.Option("--links", help="auto, kernel (tbf and netem) or process (a switch process delays the frames)."),
    ] = "auto",
    measured: Annotated[
        bool,
        typer.Option("--measure/--no-measure", help="Measure the links, and refuse what the machine cannot carry."),
    ] = True,
    json: JsonOption = False,
) -> None:
    """Make the nodes and their links, measure them, and print what was asked and what was achieved.

    If it fails or is interrupted, nothing is left behind. Exit code 3 if this machine cannot carry the rate."""
    from meshwright.cli.output import patient
    from meshwright.comm.emulate import page
    from meshwright.comm.emulate.carry import bring_up
    from meshwright.comm.emulate.emulation import Emulation
    from meshwright.comm.emulate.topology import Topology, parse_between
    from meshwright.view.tables import show, show_json

    rate, delay = parse_between(between)
    topology = Topology(nodes, ranks_per_node, rate, delay, oversubscription, nodes_per_switch)
    emulation = Emulation(topology, name, links)
    with patient("making and measuring links", measurable=False):
        found = bring_up(emulation, measured)
    if json:
        show_json(page.as_json(emulation, found))
    else:
        show(page.page(emulation, found))


@command.command("run", context_settings={**HELP_NAMES, "allow_interspersed_args": False})
def run_command(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND...", help="The command, after --: run -- python train.py --steps 10."),
    ],
    placement: Annotated[
        str, typer.Option("--placement", help="blocks (ranks 0, 1, ... fill node 0 first) or round-robin.")
    ] = "blocks",
    per_node: Annotated[
        bool,
        typer.Option("--per-node", help="Start the command once per node, as for torchrun, which starts the ranks."),
    ] = False,
    nodes: Annotated[int, typer.Option("--nodes", help="Use the first nodes only. Default: all.")] = 0,
    ranks_per_node: Annotated[
        int, typer.Option("--ranks-per-node", help="Ranks per node. Default: those of `up`.")
    ] = 0,
    timeout: Annotated[
        float, typer.Option("--timeout", help="End the run after this many seconds; 0: never.", min=0)
    ] = 0,
    name: Name = "default",
) -> None:
    """Run a command once per rank, each on its node, with the variables that torchrun sets.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and so on are set, so that torch.distributed joins with env://. Each line
    of output starts with its rank. When one rank fails, the others are ended and its exit code is returned; 124 after the
    timeout."""
    from meshwright.comm.emulate.emulation import find
    from meshwright.comm.emulate.ranks import RunSettings

    emulation, _ = find(name)
    settings = RunSettings(placement, per_node, nodes, ranks_per_node, timeout or None)
    emulation.run(arguments, settings)


@command.command("status")
def status_command(
    name: Annotated[str, typer.Option("--name", help="Name of the emulation. Default: all.")] = "",
    measured: Annotated[bool, typer.Option("--measure", help="Measure the links now.")] = False,
    json: JsonOption = False,
) -> None:
    """Show the emulated clusters that are up; --measure compares their links with what was asked."""
    from meshwright.cli.output import patient
    from meshwright.comm.emulate import page, state
    from meshwright.comm.emulate.emulation import find
    from meshwright.view.tables import show, show_json

    found = []
    for each in [name] if name else state.names():
        emulation, _ = find(each)
        with patient("measuring links", measurable=False):
            found.append((emulation, emulation.measure() if measured else None))
    if json:
        show_json([page.as_json(*each) for each in found])
    else:
        show(*(page.page(*each) for each in found) if found else ("No emulation is up.",))


@command.command("down")
def down_command(
    name: Name = "default",
    everything: Annotated[bool, typer.Option("--all", help="Remove every emulation of yours.")] = False,
) -> None:
    """Remove an emulated cluster; it is no error if there is none."""
    from meshwright.comm.emulate import state
    from meshwright.comm.emulate.emulation import take_down

    for each in state.names() if everything else [name]:
        print(f"Emulation '{each}' removed." if take_down(each) else f"There is no emulation '{each}'.")
