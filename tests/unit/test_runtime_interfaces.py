"""Which of a host's addresses delegates use: those given, those in the environment, that which reaches others."""

from __future__ import annotations

import ast
import fcntl
import socket
from pathlib import Path

import pytest

import penstock
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.interfaces import addresses_for, listen, local_addresses, network_name
from processes import forkserver

EVERYWHERE = ('server(("",', "server(('',", 'bind(("",', "bind(('',", "0.0.0.0")
"""How a script, which may lie in a text, binds to every address."""


@pytest.fixture(autouse=True)
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_INTERFACES", "GLOO_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def test_what_is_given_goes_before_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert local_addresses() == ("127.0.0.1",)
    monkeypatch.setenv("PENSTOCK_INTERFACES", "10.90.1.1,10.90.0.1")
    assert local_addresses() == ("10.90.1.1", "10.90.0.1")
    assert local_addresses(["lo", "127.0.0.2"]) == ("127.0.0.1", "127.0.0.2")


def test_the_address_that_reaches_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_addresses() == ("127.0.0.1",)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert local_addresses() == ("127.0.0.1",)


def test_an_interface_that_is_not_there() -> None:
    with pytest.raises(RuntimeFailure, match=r"interface 'wan7' has no address here; this host has .*lo"):
        local_addresses(["wan7"])


@pytest.mark.parametrize("every", ["0.0.0.0", "::"])
def test_every_address_of_the_host_is_no_interface(every: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeFailure, match=r"is every address of this host.*name an interface or one address"):
        local_addresses([every])
    monkeypatch.setenv("PENSTOCK_INTERFACES", f"127.0.0.1,{every}")
    with pytest.raises(RuntimeFailure, match="is every address"):
        addresses_for([network_name()] * 2)


def test_processes_of_one_network_use_loopback_unless_an_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun gives a host's own name as MASTER_ADDR, which is reached from outside."""
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    here = network_name()
    assert addresses_for([here] * 3) == ("127.0.0.1",)
    assert addresses_for([here, "elsewhere"]) == local_addresses()
    assert addresses_for([here] * 3, ["127.0.0.2"]) == ("127.0.0.2",)
    monkeypatch.setenv("PENSTOCK_INTERFACES", "127.0.0.3")
    assert addresses_for([here] * 3) == ("127.0.0.3",)


def tell_network(path: Path) -> None:
    path.write_text(network_name())


def test_another_process_is_in_the_same_network(tmp_path: Path) -> None:
    process = forkserver().Process(target=tell_network, args=(tmp_path / "told",))
    process.start()
    process.join(60)
    assert (tmp_path / "told").read_text() == network_name()


def test_a_listener_is_on_its_address_alone() -> None:
    with listen(0, "127.0.0.2") as one, listen(one.getsockname()[1], "127.0.0.1") as other:
        assert one.getsockname()[0] == "127.0.0.2"
        assert other.getsockname()[0] == "127.0.0.1"


def test_nothing_in_the_package_listens_on_every_address() -> None:
    """A TCPStore that serves does, unless it is given a socket; so does a socket bound to the empty address."""
    found = []
    for path in Path(penstock.__file__).parent.rglob("*.py"):
        text = path.read_text()
        found += [f"{path}: an address in a script" for word in EVERYWHERE if word in text]
        if "TCPStore" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "TCPStore":
                given = {word.arg: word.value for word in node.keywords}
                serves = given.get("is_master", node.args[3] if len(node.args) > 3 else None)
                is_client = isinstance(serves, ast.Constant) and not serves.value
                if not is_client and "master_listen_fd" not in given:
                    found.append(f"{path}:{node.lineno}")
    assert found == []


@pytest.mark.parametrize("name", ["lo\0x", "enp0s31f6.vlan10", "\ud800"], ids=ascii)
def test_regression_a_name_that_is_too_long_found_the_interface_with_its_beginning(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def address(_: int, request: int, asked_for: bytes) -> bytes:
        return bytes(20) + bytes([10, 0, 0, 1]) + bytes(8)  # the kernel reads 15 bytes of the name, up to a zero

    monkeypatch.setattr(fcntl, "ioctl", address)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "enp0s31f6.vlan1")])
    assert local_addresses(["enp0s31f6.vlan1"]) == ("10.0.0.1",)
    with pytest.raises(RuntimeFailure, match="has no address here"):
        local_addresses([name])
