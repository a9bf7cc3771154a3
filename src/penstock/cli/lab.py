"""`penstock lab`: several hosts on one machine, for a command or until they are removed.

penstock lab run --hosts 2 --link 0:1=latency:30ms -- torchrun --nproc-per-node 1 -m penstock.train --steps 20
penstock lab make --hosts 2        penstock lab link 0:1 latency:60ms        penstock lab down 0:1
"""

from __future__ import annotations

import shlex
import sys
import time
from typing import Annotated, Any

import typer

from penstock.cli.app import app
from penstock.cli.failure import INVALID
from penstock.cli.options import Json
from penstock.cli.output import plural, print_json, table

lab = typer.Typer(
    help="Several hosts on one machine: network namespaces, real TCP, links that are slow or dead.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(lab, name="lab")

Hosts = Annotated[int, typer.Option("--hosts", help="Number of hosts, 1 to 16.")]
Networks = Annotated[int, typer.Option("--nics", help="Network interfaces per host, each on a network of its own.")]
Links = Annotated[
    list[str] | None,
    typer.Option(
        "--link",
        metavar="A:B[@NETWORK]=CONDITION",
        help="What messages between A and B meet, two hosts: 0:1=latency:30ms, or 0:1@1=loss:1% on network 1; may be "
        "repeated.",
    ),
]
Name = Annotated[str | None, typer.Option("--lab", metavar="NAME", help="Name of the lab; needed where several run.")]
Command = Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="The program to run, and its arguments.")]
Seconds = Annotated[
    float | None,
    typer.Option(
        "--stop-after",
        metavar="SECONDS",
        min=0.1,
        help="Stop the command on all hosts after so many seconds. [never]",
    ),
]
Interface = Annotated[
    str, typer.Argument(metavar="HOST:NETWORK", help="A host and one of its networks: 0:1 is host 0's eth1.")
]

_TAKES_COMMAND = {"allow_interspersed_args": False}


@lab.callback()
def root() -> None:
    """Several hosts on one machine: network namespaces, real TCP, links that are slow or dead."""


@lab.command(short_help="Run a command on every host of a new lab.", context_settings=_TAKES_COMMAND)
def run(
    command: Command,
    hosts: Hosts = 2,
    nics: Networks = 2,
    link: Links = None,
    at: Annotated[
        list[str] | None,
        typer.Option(
            "--at",
            metavar="EVENT",
            help="What changes, and when: '5s down 0:1', '8s up 0:1', '9s link 0:1 20ms'; may be repeated.",
        ),
    ] = None,
    stop_after: Seconds = None,
    json: Json = False,
) -> None:
    """Make a lab, run COMMAND on every host, and remove the lab. There torchrun needs no options for its hosts."""
    from penstock.lab import Lab, Layout
    from penstock.lab.events import read_events

    events = read_events(at or [], Layout("0", hosts, nics))
    with Lab(hosts, nics, link or []) as made:
        raise typer.Exit(_run(made, command, made.hosts, events, stop_after, json))


@lab.command("exec", short_help="Run a command on hosts of a lab.", context_settings=_TAKES_COMMAND)
def execute(
    command: Command,
    host: Annotated[
        list[int] | None, typer.Option("--host", help="Run it on this host; may be repeated. [all hosts]")
    ] = None,
    name: Name = None,
    stop_after: Seconds = None,
    json: Json = False,
) -> None:
    """Run COMMAND on every host of a lab that is running, or on some of them."""
    from penstock.lab.running import find

    found = find(name)
    for each in host or []:
        found.layout.check(each)
    raise typer.Exit(_run(found, command, host or found.hosts, [], stop_after, json))


@lab.command(short_help="Make a lab that lasts until it is removed.")
def make(hosts: Hosts = 2, nics: Networks = 2, link: Links = None, json: Json = False) -> None:
    """Make a lab that stays. `penstock lab exec` runs programs on it, and `penstock lab remove` removes it."""
    from penstock.lab.lab import make as make_lab

    made = make_lab(hosts, nics, link or [])
    shown = _shown(made.layout)
    if json:
        print_json({"name": made.name, "hosts": shown})
        return
    print(f"lab {made.name}: {plural(hosts, 'host')}, {plural(nics, 'network')}")
    for each in shown:
        print(f"  {each['name']}  {', '.join(each['addresses'])}  (ip netns exec {each['namespace']} ...)")


@lab.command(short_help="Show the commands that would make a lab.")
def plan(hosts: Hosts = 2, nics: Networks = 2, link: Links = None, json: Json = False) -> None:
    """Show the commands that would make a lab, without running them. PID stands for the number of its process."""
    from penstock.lab import Layout, commands
    from penstock.lab.links import read_links

    layout = Layout("PID", hosts, nics)
    ways = {str(way): str(condition) for way, condition in read_links(link or [], layout).items()}
    making = [str(command) for command in commands.make(layout)]
    removing = [str(command) for command in commands.remove(map(layout.namespace, layout.hosts))]
    if json:
        print_json({"hosts": _shown(layout), "make": making, "remove": removing, "links": ways})
        return
    print("\n".join(["# to make it", *making, "", "# to remove it", *removing]))
    if ways:
        print("\n# what the keeper's process does to packets")
        for way, condition in ways.items():
            print(f"# {way}: {condition}")


@lab.command("link", short_help="Change a link of a lab that runs.")
def change_link(
    place: Annotated[
        str, typer.Argument(metavar="HOST:HOST[@NETWORK]", help="Two hosts: 0:1, or 0:1@1 on network 1 alone.")
    ],
    condition: Annotated[
        str,
        typer.Argument(
            metavar="CONDITION", help="What their packets meet from now on: latency:60ms+loss:1%, down, or up."
        ),
    ],
    one_way: Annotated[
        bool, typer.Option("--one-way", help="Change only the way from the first host to the second.")
    ] = False,
    name: Name = None,
    json: Json = False,
) -> None:
    """Change what the packets between two hosts meet. `down` cuts the link, and `up` joins it as it was."""
    from penstock.lab.links import read_place
    from penstock.lab.running import find

    source, target, nic = read_place(place)
    found = find(name)
    found.link(source, target, condition, nic=nic, both=not one_way)
    what = {"name": found.name, "link": place, "condition": condition, "one_way": one_way}
    _done(json, f"lab {found.name}: link {place} {condition}{', one way' if one_way else ''}", what)


@lab.command(short_help="Take a network interface of a host down.")
def down(interface: Interface, name: Name = None, json: Json = False) -> None:
    """Take a network interface of a host down, as if it had died."""
    from penstock.lab.links import read_interface
    from penstock.lab.running import find

    found = find(name)
    found.interface_down(*read_interface(interface))
    what = {"name": found.name, "interface": interface, "up": False}
    _done(json, f"lab {found.name}: interface {interface} down", what)


@lab.command(short_help="Bring a network interface of a host up again.")
def up(interface: Interface, name: Name = None, json: Json = False) -> None:
    """Bring a network interface of a host up again."""
    from penstock.lab.links import read_interface
    from penstock.lab.running import find

    found = find(name)
    found.interface_up(*read_interface(interface))
    what = {"name": found.name, "interface": interface, "up": True}
    _done(json, f"lab {found.name}: interface {interface} up", what)


@lab.command("list", short_help="Show labs, their links, and leftovers.")
def show(json: Json = False) -> None:
    """Show every lab of this machine and what its links did, and what labs of dead processes left behind."""
    from penstock.lab.running import listed

    labs = listed()
    if json:
        print_json({"labs": labs})
        return
    for each in labs:
        if not each["alive"]:
            print(f"lab {each['name']}: left behind; penstock lab clean takes it away")
            continue
        age = time.time() - each["since"]
        until = "until it is removed" if each["owner"] is None else f"as long as process {each['owner']}"
        print(
            f"lab {each['name']}: {plural(each['num_hosts'], 'host')}, {plural(each['num_nics'], 'network')}, "
            f"for {age:.0f} s, {until}"
        )
        rows = [_way_row(way) for way in each["ways"]]
        if rows:
            print(table(["way", "network", "condition", "MB", "packets", "lost", "refused"], rows))
    if not labs:
        print("no labs")


@lab.command(short_help="Remove a lab.")
def remove(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Name of the lab; needed where several run.")
    ] = None,
    json: Json = False,
) -> None:
    """End what runs on a lab's hosts, and remove the lab."""
    from penstock.lab.lab import end
    from penstock.lab.running import find

    name = find(None).name if name is None else name
    end(name)
    _done(json, f"removed {name}", {"removed": [name]})


@lab.command(short_help="Remove what labs of dead processes left behind.")
def clean(json: Json = False) -> None:
    """Remove what is left of labs whose process was killed. Labs that run stay."""
    from penstock.lab.permitted import require
    from penstock.lab.removal import clean as clean_all
    from penstock.lab.removal import leftovers

    if leftovers():
        require()
    removed = clean_all()
    said = f"removed {', '.join(removed)}" if removed else "nothing was left behind"
    _done(json, said, {"removed": removed})


def _run(made: Any, command: list[str], hosts: Any, events: list[Any], timeout: float | None, json: bool) -> int:
    """Runs the command and tells how it ended on each host; with --json what it writes goes to stderr."""
    from penstock.lab.everywhere import run_everywhere

    stream = sys.stderr if json else sys.stdout

    def say(line: str) -> None:
        print(line, file=stream, flush=True)

    ended = run_everywhere(made, command, hosts=list(hosts), events=events, timeout=timeout, say=say)
    failed = [each for each in ended if each.exit_code != 0]
    if json:
        print_json(
            {
                "name": made.name,
                "command": shlex.join(command),
                "hosts": [
                    {"host": each.host, "exit_code": each.exit_code, "seconds": each.seconds} for each in ended
                ],
                "ways": [way for way in made.ways() if way["num_packets"] or way["condition"] or way["num_refused"]],
            }
        )
    for each in failed:
        how = "was stopped" if each.exit_code is None else f"ended with exit code {each.exit_code}"
        print(f"penstock: host {each.host}: {command[0]} {how} after {each.seconds:.1f} s", file=sys.stderr)
    return INVALID if failed else 0


def _shown(layout: Any) -> list[dict[str, Any]]:
    return [
        {
            "host": host,
            "name": layout.hostname(host),
            "namespace": layout.namespace(host),
            "addresses": [layout.address(host, nic) for nic in layout.nics],
        }
        for host in layout.hosts
    ]


def _way_row(way: dict[str, Any]) -> list[str]:
    condition = " ".join(filter(None, ["cut" if way["cut"] else "", way["condition"] or ""])) or "-"
    counts = [way[name] for name in ("num_packets", "num_lost", "num_refused")]
    size = f"{way['num_bytes'] / 1e6:.1f}"
    return [f"{way['source']} to {way['target']}", str(way["nic"]), condition, size, *map(str, counts)]


def _done(json: bool, said: str, what: dict[str, Any]) -> None:
    if json:
        print_json(what)
    else:
        print(said)
