"""Pictures are written by their ending, whole or not at all."""

from __future__ import annotations

import gzip
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import penstock as ps
from penstock.draw import save_picture

pytestmark = pytest.mark.unit


def test_each_ending_gives_its_form(tmp_path: Path) -> None:
    s = ps.build("1f1b", 2, 3)
    t = ps.simulate(s)
    for drawn in (s, t, [t, s]):
        for ending in ("svg", "html", "txt", "json", "json.gz", "SVG"):
            save_picture(drawn, tmp_path / f"p.{ending}")
        ET.fromstring((tmp_path / "p.svg").read_text(encoding="utf-8"))
        assert (tmp_path / "p.html").read_text(encoding="utf-8").startswith("<!doctype html>")
        plain = (tmp_path / "p.json").read_bytes()
        assert json.loads(plain)["traceEvents"]
        assert gzip.decompress((tmp_path / "p.json.gz").read_bytes()) == plain
    save_picture(s, tmp_path / "p.txt")
    assert ps.parse((tmp_path / "p.txt").read_text()) == s


def test_unknown_endings_name_what_is_possible(tmp_path: Path) -> None:
    with pytest.raises(ps.ScheduleError, match=r"p\.png: pictures are written as \.svg, \.html or \.txt"):
        save_picture(ps.build("1f1b", 2, 3), tmp_path / "p.png")
    assert not list(tmp_path.iterdir())


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ps.ScheduleError, match="No such file"):
        save_picture(ps.build("1f1b", 2, 3), tmp_path / "none" / "p.svg")
    path = tmp_path / "p.svg"
    path.write_text("old")

    def fail(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ps.ScheduleError, match="No space left"):
        save_picture(ps.build("1f1b", 2, 3), path)
    assert [p.name for p in tmp_path.iterdir()] == ["p.svg"]
    assert path.read_text() == "old"
