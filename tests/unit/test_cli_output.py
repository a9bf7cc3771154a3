"""What the command line does where its output can't be written: one sentence, an exit code, no traceback."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import main

pytestmark = pytest.mark.unit

COUNTS = ("--ranks", "2", "--microbatches", "4")
SAID = "penstock: stdout: No space left on device; what was printed is not whole\n"
VERBS = [
    ("simulate", "1f1b", *COUNTS),
    ("show", "1f1b", *COUNTS),
    ("check", "1f1b", *COUNTS),
    ("plan", *COUNTS, "--time", "0.05"),
    ("plan", *COUNTS, "--placement", "all"),
    ("tune", "--costs", "amdp-gpt", "--batch", "2", "--ranks", "1", "--no-programs"),
    ("simulate", "1f1b", "zb-v", *COUNTS),
    ("show", "given.json", "--out", "made.txt"),
]


class Full:
    """A stdout on a full disk, which fails as soon as it is written to, or only when it is flushed."""

    def __init__(self, buffered: bool) -> None:
        self._buffered, self._written = buffered, False
        self._file = os.open(os.devnull, os.O_WRONLY)

    def write(self, text: str) -> int:
        self._written = True
        if not self._buffered:
            self._fail()
        return len(text)

    def flush(self) -> None:
        if self._written:
            self._fail()

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._file

    def _fail(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("words", VERBS, ids=lambda words: words[0])
def test_a_full_disk_behind_stdout_is_no_bug_of_ours(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["show", "1f1b", *COUNTS, "--out", "given.json"]) == 0
    for extra in ((), ("--json",)):
        for buffered in (False, True):
            monkeypatch.setattr(sys, "stdout", Full(buffered))
            assert main([*words, *extra]) == 1
            assert capsys.readouterr().err.endswith(SAID)


def test_a_file_that_cannot_be_written_is_not_taken_for_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "1f1b", *COUNTS, "--timeline", "/nowhere/x.svg"]) == 2
    told = "penstock: /nowhere/x.svg: No such file or directory; name a file in a folder that is there\n"
    assert capsys.readouterr().err == told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "unbuffered", "redirection", "code", "said"),
    [
        ("simulate 1f1b --ranks 2 --microbatches 2 --json", "", ">/dev/full", 1, SAID),
        ("--help", "1", ">/dev/full", 1, SAID),
        ("--help", "1", ">&-", 0, ""),
        ("nosuch --json", "", ">/dev/full 2>/dev/full", 1, ""),
        ("nosuch --json", "", "| true; exit ${PIPESTATUS[0]}", 2, ""),
    ],
)
def test_a_real_process_says_one_sentence(
    words: str, unbuffered: str, redirection: str, code: int, said: str
) -> None:
    command = f"{sys.executable} -m penstock {words} {redirection}"
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, said)
