"""Environment variables of a rank with what cannot be: errors that name the variable, and no tracebacks of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli.run import main
from penstock.rank_environment import RankEnvironment, RankEnvironmentError
from penstock.runtime.launch import init_process
from penstock.train.command import run_command

pytestmark = pytest.mark.unit

FINE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def joined(monkeypatch: pytest.MonkeyPatch, changed: dict[str, str]) -> str:
    """What `init_process` says of an environment that is fine but for what is changed."""
    for name, value in {**FINE, **changed}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankEnvironmentError) as caught:
        init_process(5.0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"RANK": "abc"}, "RANK is 'abc', not a number"),
        ({"RANK": "²"}, "RANK is '²', not a number"),
        ({"WORLD_SIZE": "0"}, "RANK is 0 and WORLD_SIZE is 0"),
        ({"RANK": "2"}, "RANK is 2 and WORLD_SIZE is 2"),
        ({"LOCAL_RANK": "first"}, "LOCAL_RANK is 'first', not a number"),
        ({"LOCAL_WORLD_SIZE": "-2"}, "LOCAL_WORLD_SIZE is '-2', not a number"),
    ],
)
def test_nonsense_in_the_environment_ended_in_a_traceback(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], said: str
) -> None:
    assert said in joined(monkeypatch, changed)


OWN = """
import torch
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))


def data(replica, num_replicas):
    while True:
        yield torch.ones(4, 4), torch.ones(4, 4)
"""


@pytest.mark.parametrize("command", [main, run_command])
@pytest.mark.parametrize("model", ["--preset nano", "--model net.py:Net --data net.py:data"])
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_nonsense_in_the_environment_was_a_bug_of_ours_where_data_is_read(
    command: Callable[[list[str]], int],
    model: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And what is wrong with where the ranks meet was said after the data was read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("penstock.train.command.LET_SPEAK", 0.0)
    Path("net.py").write_text(OWN)
    for variable, value in {**FINE, name: "abc"}.items():
        monkeypatch.setenv(variable, value)
    words = ["train"] if command is main else []
    assert command([*words, *model.split(), "--ranks", "2", "--steps", "1"]) == 1
    assert capsys.readouterr().err.startswith(
        f"penstock: environment variable {name} is 'abc', not a number from 0 on; start with `penstock train`"
    )
    assert not Path("runs").exists()


def test_a_variable_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankEnvironmentError, match=r"WORLD_SIZE is '', not a number from 0 on; start with"):
        RankEnvironment.of({"RANK": "0"})
    assert RankEnvironment.of({"WORLD_SIZE": "abc"}) is None, "no launcher has started this process"
