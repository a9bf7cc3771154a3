"""Environment variables of a rank with what cannot be: errors that name the variable, and no tracebacks of others."""

from __future__ import annotations

import socket

import pytest

from penstock.runtime import RuntimeFailure
from penstock.runtime.launch import init_process

pytestmark = pytest.mark.unit

FINE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def joined(monkeypatch: pytest.MonkeyPatch, changed: dict[str, str]) -> str:
    """What `init_process` says of an environment that is fine but for what is changed."""
    for name, value in {**FINE, **changed}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PENSTOCK_LAUNCH", raising=False)
    if "PENSTOCK_LAUNCH" in changed:
        monkeypatch.setenv("PENSTOCK_LAUNCH", changed["PENSTOCK_LAUNCH"])
    with pytest.raises(RuntimeFailure) as caught:
        init_process(5.0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"RANK": "abc"}, "RANK is 'abc', not a number"),
        ({"RANK": "²"}, "RANK is '²', not a number"),
        ({"WORLD_SIZE": "0"}, "RANK is 0 and WORLD_SIZE is 0"),
        ({"RANK": "2"}, "RANK is 2 and WORLD_SIZE is 2"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT is 'abc', not a number"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT is 99999; a port is"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"PENSTOCK_LAUNCH": "nonsense"}, "PENSTOCK_LAUNCH is 'nonsense'"),
        ({"PENSTOCK_LAUNCH": "3"}, "PENSTOCK_LAUNCH is '3'"),
    ],
)
def test_nonsense_in_the_environment_ended_in_a_traceback(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], said: str
) -> None:
    assert said in joined(monkeypatch, changed)


def test_a_port_that_is_in_use_ended_in_a_traceback_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"can't listen on port {port} (MASTER_PORT)" in joined(monkeypatch, {"MASTER_PORT": port})
