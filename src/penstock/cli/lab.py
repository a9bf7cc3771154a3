"""`penstock lab`: several hosts on one machine, for a command or as long as you keep them.

penstock lab run --hosts 2 --link 0:1=latency:30ms -- torchrun --nproc-per-node 1 -m penstock.train --steps 20
penstock lab run --hosts 2            penstock lab exec --host 0 -- hostname
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.app import app
from penstock.cli.failure import INVALID, Misuse
from penstock.cli.options import Json
from penstock.cli.output import plural, print_json

if TYPE_CHECKING:
    from penstock.lab import Lab
    from penstock.lab.process import HostExit

lab = typer.Typer(
    help="Several hosts on one machine: network namespaces, real TCP, links that are slow or dead.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(lab, name="lab")

_TAKES_COMMAND = {"allow_interspersed_args": False}
_COMMAND = "The program to run, and its arguments."


@lab.callback()
def root() -> None:
    """Several hosts on one machine: network namespaces, real TCP, links that are slow or dead."""


@lab.command(short_help="Make a lab, and run a command on every host.", context_settings=_TAKES_COMMAND)
def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND]", help=f"{_COMMAND} [keep the lab, and read changes from the terminal]"),
    ] = None,
    hosts: Annotated[int, typer.Option("--hosts", help="Number of hosts, 1 to 16.")] = 2,
    nics: Annotated[
        int, typer.Option("--nics", help="Network interfaces per host, each on a network of its own.")
    ] = 2,
    link: Annotated[
        list[str] | None,
        typer.Option(
            "--link",
            metavar="A:B[@NETWORK]=CONDITION",
            help="What messages between A and B meet, two hosts: 0:1=latency:30ms, or 0:1@1=loss:1% on network 1; "
            "may be repeated.",
        ),
    ] = None,
    at: Annotated[
        list[str] | None,
        typer.Option(
            "--at",
            metavar="EVENT",
            help="What changes, and when: '5s down 0:1', '8s up 0:1', '9s link 0:1 20ms'; may be repeated.",
        ),
    ] = None,
    stop_after: Annotated[
        float | None,
        typer.Option(
            "--stop-after",
            metavar="SECONDS",
            min=0.1,
            help="Stop the command on all hosts after so many seconds. [never]",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Make a lab, run COMMAND on every host, and remove the lab. There torchrun needs no options for its hosts.

    Without COMMAND the lab stays until Ctrl-C or the end of the input. `penstock lab exec` runs programs on it from
    other terminals. Each line typed here changes it: `down 0:1`, `up 0:1`, or `link 0:1 latency:60ms`.
    """
    from penstock.lab import Lab, Layout
    from penstock.lab.links import read_events
    from penstock.lab.process import run_everywhere

    events = read_events(at or [], Layout("0", hosts, nics))
    if not command and (events or stop_after is not None):
        raise Misuse(f"--{'at' if events else 'stop-after'} is for a command; give one, like -- sleep 12")
    with Lab(hosts, nics, link or []) as made:
        if not command:
            _keep(made, json)
            return
        say = _say_to(json)
        ended = run_everywhere(
            made.layout, command, events=events, apply=lambda each: each.apply(made), timeout=stop_after, say=say
        )
        ways = [way for way in made.ways() if way["num_packets"] or way["condition"] or way["num_refused"]]
        raise typer.Exit(_ended(made.name, command, ended, {"ways": ways}, json))


@lab.command("exec", short_help="Run a command on hosts of a lab.", context_settings=_TAKES_COMMAND)
def execute(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help=_COMMAND)],
    host: Annotated[
        list[int] | None, typer.Option("--host", help="Run it on this host; may be repeated. [all hosts]")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--lab", metavar="NAME", help="Name of the lab; needed where several run.")
    ] = None,
    json: Json = False,
) -> None:
    """Run COMMAND on every host of a lab that another terminal keeps, or on some of them."""
    from penstock.lab.kernel import require
    from penstock.lab.lab import find
    from penstock.lab.process import run_everywhere

    require()
    layout = find(name)
    for each in host or []:
        layout.check(each)
    ended = run_everywhere(layout, command, hosts=host, say=_say_to(json))
    raise typer.Exit(_ended(layout.name, command, ended, {}, json))


def _keep(made: Lab, json: bool) -> None:
    """Keeps a lab until Ctrl-C or the end of the input, and changes it as the lines of the input say."""
    from penstock.cost import CostError
    from penstock.lab import LabError
    from penstock.lab.links import read_events

    layout = made.layout
    addresses = {layout.hostname(host): [layout.address(host, nic) for nic in layout.nics] for host in made.hosts}
    if json:
        print_json({"name": made.name, "hosts": addresses})
    else:
        print(f"lab {made.name}: {plural(len(made.hosts), 'host')}, {plural(len(layout.nics), 'network')}")
        for hostname, each in addresses.items():
            print(f"  {hostname}  {', '.join(each)}")
        print("Run programs on it by penstock lab exec in other terminals. Ctrl-C removes it.")
    sys.stdout.flush()
    try:
        for line in filter(str.strip, sys.stdin):
            try:
                for event in read_events([f"0s {line}"], layout):
                    event.apply(made)
            except (LabError, CostError) as error:
                print(f"penstock: {error}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(file=sys.stderr)


def _say_to(json: bool) -> Callable[[str], None]:
    """Prints the lines that hosts write; with --json to stderr."""
    stream = sys.stderr if json else sys.stdout

    def say(line: str) -> None:
        print(line, file=stream, flush=True)

    return say


def _ended(name: str, command: Sequence[str], ended: Sequence[HostExit], more: dict[str, Any], json: bool) -> int:
    """Tells how the command ended on each host, and returns the exit code."""
    failed = [each for each in ended if each.exit_code != 0]
    if json:
        hosts = [{"host": each.host, "exit_code": each.exit_code, "seconds": each.seconds} for each in ended]
        print_json({"name": name, "command": shlex.join(command), "hosts": hosts, **more})
    for each in failed:
        how = "was stopped" if each.exit_code is None else f"ended with exit code {each.exit_code}"
        print(f"penstock: host {each.host}: {command[0]} {how} after {each.seconds:.1f} s", file=sys.stderr)
    return INVALID if failed else 0
