"""The options of a command that say where it runs, and what is said of the nodes on which it did."""

import click

_NODES = 16  # lines on nodes, at most

RUNNING_FLAGS = {
    "workers": click.option(
        "--workers",
        type=int,
        help="Worker processes; 0: work in this one. Ray: shards at a time.  "
        "[default: one per CPU; Ray: two per CPU of the cluster]",
    ),
    "engine": click.option(
        "--engine", default="local", show_default=True, help="local; or ray: all nodes of a Ray cluster."
    ),
    "address": click.option(
        "--address",
        help="Ray: HOST:PORT, or auto: RAY_ADDRESS, or the cluster of this machine.  [default: auto]",
    ),
}
"""For `precache.console.commandline.gathered`."""


def lines_of_nodes(nodes: dict[str, float]) -> list[str]:
    """A line for each of the slowest nodes, and one for the others."""
    lines = [
        f"{name}: {rate:,.0f} images/s" for name, rate in sorted(nodes.items(), key=lambda node: node[1])
    ]
    if len(lines) > _NODES:
        fast = sorted(nodes.values())[_NODES:]
        lines[_NODES:] = [f"{len(fast):,} other nodes: {fast[0]:,.0f} to {fast[-1]:,.0f} images/s"]
    return lines
