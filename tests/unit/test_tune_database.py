"""Measurements are kept, found again under their key only, and a damaged file is named."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

import tune_models
from penstock.formats.profile import Profile
from penstock.train.settings import Settings
from penstock.tune import meter as meter_module
from penstock.tune.errors import TuneError
from penstock.tune.meter import Measurements, Meter, NeededProfile, default_folder, prepare_together
from penstock.tune.tuned_model import tuned_model

pytestmark = pytest.mark.unit

SMALL = Settings(preset="nano", depth=2, microbatches=1, ranks=1, threads=1)
NEEDS = [NeededProfile(1, 1, False), NeededProfile(2, 1, False), NeededProfile(2, 2, True)]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> tune_models.Ranks:
    fake = tune_models.Ranks()
    monkeypatch.setattr(meter_module, "run_job", fake)
    return fake


def measured(path: Path, settings: Settings = SMALL) -> Meter:
    meter = Meter(tuned_model(settings), settings, Measurements(path))
    prepare_together([(meter, NEEDS)], [1, 2])
    return meter


def test_what_was_put_is_there_again(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    first, second = tune_models.profile(seed=1), tune_models.profile(seed=2)
    kept = Measurements(folder)
    assert kept.get({"a": 1}, Profile) is None
    kept.put({"b": [1, 2], "a": 1}, first)
    kept.put({"a": 2}, first)
    kept.put({"a": 2}, second)
    again = Measurements(folder)
    assert again.get({"a": 1, "b": [1, 2]}, Profile) == first
    assert again.get({"a": 2}, Profile) == second
    files = [json.loads(path.read_text()) for path in folder.iterdir()]
    assert sorted((file["key"] for file in files), key=str) == [{"a": 2}, {"b": [1, 2], "a": 1}]


def test_the_second_time_nothing_is_measured(tmp_path: Path, ranks: tune_models.Ranks) -> None:
    first = measured(tmp_path / "db")
    assert (first.num_measured, first.num_reused) == (5, 0)
    assert len(ranks.tasks) == 5
    second = measured(tmp_path / "db")
    assert (second.num_measured, second.num_reused) == (0, 5)
    assert len(ranks.tasks) == 5
    assert second.profiles == first.profiles
    assert second.transfers == first.transfers


@pytest.mark.parametrize(
    "changed",
    [
        {"depth": 3}, {"width": 32}, {"context": 16}, {"dropout": 0.1}, {"precision": "bfloat16"},
        {"optimizer": "SGD"}, {"optimizer_options": {"weight_decay": 0.0}}, {"clip": 0.0}, {"threads": 2},
    ],
)  # fmt: skip
def test_what_numbers_depend_on_is_in_the_key(
    tmp_path: Path, ranks: tune_models.Ranks, changed: dict[str, object]
) -> None:
    measured(tmp_path / "db")
    other = measured(tmp_path / "db", dataclasses.replace(SMALL, **changed))  # type: ignore[arg-type]
    assert other.num_measured >= len(NEEDS)


@pytest.mark.parametrize("changed", [{"batch": 8}, {"seed": 5}, {"lr": 0.1}, {"clip": 2.0}, {"microbatches": 4}])
def test_what_they_do_not_depend_on_is_not(
    tmp_path: Path, ranks: tune_models.Ranks, changed: dict[str, object]
) -> None:
    measured(tmp_path / "db")
    assert measured(tmp_path / "db", dataclasses.replace(SMALL, **changed)).num_measured == 0  # type: ignore[arg-type]


def test_another_device_torch_or_version_is_measured(
    tmp_path: Path, ranks: tune_models.Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(tmp_path / "db")
    for name, value in (("device_name", lambda settings: "another"), ("VERSION", 1000)):
        with monkeypatch.context() as patch:
            patch.setattr(meter_module, name, value)
            assert measured(tmp_path / "db").num_measured == 5
    monkeypatch.setattr(meter_module.torch, "__version__", "1.0")
    assert measured(tmp_path / "db").num_measured == 5


def test_what_was_measured_before_an_interrupt_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter_module, "run_job", tune_models.Ranks(interrupt_at=2))
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path / "db")
    again = tune_models.Ranks()
    monkeypatch.setattr(meter_module, "run_job", again)
    assert measured(tmp_path / "db").num_reused == 2
    assert len(again.tasks) == 3


def test_a_busy_machine_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter_module, "run_job", tune_models.Ranks(others=1.25))
    assert measured(tmp_path / "db").notices == [
        "other programs kept up to 1.2 cores busy while nano with depth 2, microbatches of 1, 1 rank and 4 more were "
        f"measured; delete {tmp_path / 'db'} to measure again"
    ]
    assert measured(tmp_path / "db").notices == []


def test_messages_between_cpu_ranks_are_told_where_ops_run_on_gpus(
    tmp_path: Path, ranks: tune_models.Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: `--device cuda` priced messages that were timed between CPU ranks as those between GPUs."""
    monkeypatch.setattr(meter_module, "device_name", lambda settings: "a GPU")
    meter = Meter(tuned_model(SMALL), dataclasses.replace(SMALL, device="cuda"), Measurements(tmp_path / "db"))
    prepare_together([(meter, [])], [1, 2])
    (notice,) = meter.notices
    assert notice.startswith("messages and sums of gradients were timed between CPU ranks")


def test_what_every_op_costs_is_taken_off_the_layers(tmp_path: Path, ranks: tune_models.Ranks) -> None:
    told = measured(tmp_path / "db").profiles[NeededProfile(1, 1, False)]
    assert told.op_overhead == dict.fromkeys(("f", "b", "f_split", "i", "w"), 0.05)
    blocks = (1.4 + 1.6) / 2 - 0.05  # alike, so each has the mean
    assert told.f == pytest.approx((1.2 - 0.05, blocks, blocks, 1.8 - 0.05))
    assert told.update == pytest.approx((1.2, 1.5, 1.5, 1.8))


@pytest.mark.parametrize("damage", ["", "no JSON", "[1]", "{}", '{"value": [1]}', '{"value": {"f": [1]}}'])
def test_a_damaged_file_is_named_with_the_way_out(tmp_path: Path, ranks: tune_models.Ranks, damage: str) -> None:
    measured(tmp_path)
    for path in tmp_path.iterdir():
        path.write_text(damage)
    with pytest.raises(TuneError, match=r"/[0-9a-f]{16}\.json is damaged .*delete it to measure again"):
        measured(tmp_path)
    assert all(path.read_text() == damage for path in tmp_path.iterdir())
    for path in tmp_path.iterdir():
        path.unlink()
    assert measured(tmp_path).num_measured == 5


def test_a_place_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "db", tmp_path / "file"):
        with pytest.raises(TuneError, match=r"can't be kept in .*set XDG_CACHE_HOME to another folder"):
            Measurements(path)


def test_the_default_lies_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "penstock" / "measurements"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == Path.home() / ".cache" / "penstock" / "measurements"


def test_a_user_without_a_home_is_told_where_measurements_may_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it is for a user that the system does not know
    with pytest.raises(TuneError, match=r"no home folder.*XDG_CACHE_HOME"):
        default_folder()
