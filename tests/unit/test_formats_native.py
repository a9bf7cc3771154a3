"""Native JSON: round trips, refusals of everything else, and files never half-written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.formats import from_json, to_json
from penstock.formats.files import require_place

pytestmark = pytest.mark.unit


def value() -> dict[str, Any]:
    return json.loads(to_json(ps.build("1f1b", 2, 2)))


def test_the_form_is_fixed() -> None:
    rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    assert value() == {
        "format": "penstock-schedule", "version": 1, "name": "1f1b", "placement": [[0, 1]],
        "microbatch_pipeline": [0, 0], "memory_limit": None, "order": rows,
    }  # fmt: skip


def refusal(text: str) -> str:
    with pytest.raises(ps.ScheduleError) as caught:
        from_json(text)
    return str(caught.value)


@pytest.mark.parametrize("name", ps.library.SCHEDULES)
@pytest.mark.parametrize("ending", [".json", ".txt"])
def test_files_give_back_what_was_saved(name: str, ending: str, tmp_path: Path) -> None:
    schedule = ps.build(name, 4, 8)
    path = tmp_path / f"s{ending}"
    ps.save(schedule, path)
    assert ps.load(path) == schedule
    assert os.listdir(tmp_path) == [path.name]


WRONG = {
    "format": ("other", 'not a schedule: a JSON object with "format": "penstock-schedule" is needed'),
    "version": (10, "version is 10: this Penstock reads and writes version 1; upgrade Penstock"),
    "version ": (True, "version is True: this Penstock reads"),
    "name": (5, "field 'name': expected a string, got 5"),
    "name ": ("a b", "schedule name 'a b': use letters, digits and ._+- only"),
    "placement": ([0, 1], "field 'placement[0]': expected lists of ranks, one a pipeline, got 0"),
    "placement ": ([], "a placement needs at least one pipeline with one stage"),
    "placement  ": ([[0, 1.5]], "field 'placement[0][1]': expected lists of ranks, one a pipeline, got 1.5"),
    "microbatch_pipeline": ([True], "field 'microbatch_pipeline[0]': expected a list of pipelines, got true"),
    "memory_limit": ("4", "field 'memory_limit': expected a number above 0, or null, got \"4\""),
    "memory_limit ": (0, "field 'memory_limit': expected a number above 0, or null, got 0"),
    "memory_limit  ": (10**400, "field 'memory_limit': expected a number above 0, or null, got 1000"),
    "order": ([["0F0", 1]], "field 'order[0][1]': expected lists of ops, one per rank, got 1"),
    "order ": ([["0F0", "F1"]], "order, rank 0, step 1: 'F1' names no stage"),
    "order  ": ([["0F0"], ["2F0junk"]], "order, rank 1, step 0: '2F0junk' is not an op"),
    "colour": ("red", "field 'colour' is unknown; the fields are name, placement"),
    "shared": ([[0, ["1"]]], "field 'shared[0][1][0]': expected lists of a stage and its ranks"),
    "stage_graph": ({"edges": []}, "field 'stage_graph.num_microbatches' is missing; the fields are edges"),
}
"""By field (blanks set apart those of one field): a wrong value, and what is said of it."""


def test_what_is_wrong_is_named_with_its_place_and_value() -> None:
    for field, (wrong, message) in WRONG.items():
        assert refusal(json.dumps(value() | {field.strip(): wrong})).startswith(message)
    without = {key: each for key, each in value().items() if key != "order"}
    assert refusal(json.dumps(without)).startswith("field 'order' is missing; the fields are name, placement")


def test_what_is_no_schedule_at_all() -> None:
    for text, message in {
        "": "not JSON: Expecting value",
        "null": "not a schedule",
        "[" * 100_000: "not JSON:",
        "9" * 5000: "not JSON:",
        '{"format": NaN}': "not JSON: NaN is not a JSON number",
        '{"format": "penstock-schedule", "name": "a", "name": "b"}': "not JSON: field 'name' is given twice",
    }.items():
        assert refusal(text).startswith(message)


def test_load_and_save_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    for name, content, message in [
        ("s.json", b"{", "s.json: not JSON"),
        ("s.json", b"\xff\xfe", "s.json: not text"),
        ("s.txt", b"rank zero | F0", "s.txt: line 1, column 1: expected 'schedule NAME"),
        ("s.yaml", b"", "s.yaml: schedules are read from .json, .txt or .csv, not '.yaml'"),
        ("none.json", None, "none.json: No such file or directory"),
        ("folder.json", None, "folder.json: Is a directory"),
    ]:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ps.ScheduleError) as caught:
            ps.load(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path}/{message}")
    for name, message in {
        "s.yaml": "schedules are written as",
        "no/s.json": "No such file",
        "folder.json": "Is a dir",
    }.items():
        with pytest.raises(ps.ScheduleError, match=message):
            ps.save(ps.build("1f1b", 2, 2), tmp_path / name)


def test_a_failed_save_leaves_the_old_file_and_nothing_beside(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "s.json"
    ps.save(ps.build("1f1b", 2, 2), path)
    before = path.read_bytes()

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ps.ScheduleError, match="No space left on device"):
        ps.save(ps.build("gpipe", 2, 2), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["s.json"]


def test_a_result_took_the_place_of_a_device_or_of_a_link(tmp_path: Path) -> None:
    """`--out /dev/null`, given by root, left a file in place of the device."""
    schedule, target, link, pipe = ps.build("1f1b", 2, 2), tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "c.txt"
    link.symlink_to(target)
    ps.save(schedule, link)
    assert link.is_symlink()
    assert ps.load(target) == schedule
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        ps.save(schedule, pipe)
        assert ps.parse(os.read(reader, 10_000).decode()) == schedule
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert {each.name for each in tmp_path.iterdir()} == {"a.txt", "b.txt", "c.txt"}


def test_a_place_for_a_result_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    require_place(tmp_path / "x.json")
    assert not [*tmp_path.iterdir()]
    with pytest.raises(ps.ScheduleError, match="Is a directory"):
        require_place(tmp_path)


@pytest.mark.parametrize("ending", ["txt", "json", "csv"])
def test_a_file_with_a_byte_order_mark_was_refused(ending: str, tmp_path: Path) -> None:
    """Editors on Windows write one."""
    path = tmp_path / f"a.{ending}"
    ps.save(schedule := ps.build("1f1b", 2, 3), path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert ps.load(path).order == schedule.order


def test_regression_a_whole_limit_was_read_as_a_fraction_and_the_replay_of_a_log_differed() -> None:
    text = to_json(ps.build("zb-h2", 4, 8))
    assert to_json(from_json(text)) == text
