"""Files that a full disk does not take: each is named, what was there before stays, nothing half-written is left."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpoint_cases import on_ranks
from penstock.cli.failure import failure_of
from penstock.data import ByteTokenizer, DataError, prepare
from penstock.runtime.checkpoint import folder as checkpoint_folder
from penstock.runtime.checkpoint import latest
from penstock.runtime.checkpoint.dcp import write
from penstock.runtime.errors import CheckpointError, RuntimeFailure
from penstock.runtime.transport.delegate.boxes import cannot
from penstock.train import command
from penstock.train.folder import write_whole
from penstock.train.job import TrainJob
from penstock.train.metrics import Metrics
from penstock.train.settings import Settings
from penstock.train.start import hand_over

pytestmark = pytest.mark.unit


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """No file may be longer within it: a write ends with an OSError that names no file, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_of_a_run_that_the_disk_does_not_take_was_called_a_bug(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text("before")
    said = r"settings\.json could not be written: File too large; make room there"
    with files_of_at_most(8), pytest.raises(RuntimeFailure, match=said):
        write_whole(path, "much longer than that")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_metrics_that_are_no_text_any_more_lose_what_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "loss": 1.5}\n\xff\xfe\x00\n')
    with Metrics(path, 1) as lines:
        lines.write(1, {"loss": 1.25})
    assert path.read_text() == '{"step": 0, "loss": 1.5}\n{"step": 1, "loss": 1.25}\n'


def test_metrics_in_a_folder_that_is_gone_name_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailure, match=r"gone/metrics\.jsonl could not be written: No such file"):
        Metrics(tmp_path / "gone" / "metrics.jsonl", 0)


def test_prepared_data_on_a_full_disk_was_called_a_bug(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A rank runs its ops. " * 2000)
    with files_of_at_most(4096), pytest.raises(DataError, match=r"corpus: cannot be written \(File too large\)"):
        prepare(text, tmp_path / "corpus", ByteTokenizer())
    assert list(tmp_path.iterdir()) == [text]


def test_a_full_disk_that_names_no_file_is_no_bug() -> None:
    failure = failure_of(OSError(errno.ENOSPC, "No space left on device"))
    assert failure is not None
    assert failure.exit_code == 1
    assert "No space left on device; make room" in failure.message


def test_a_host_without_a_folder_for_temporary_files_is_no_bug() -> None:
    failure = failure_of(FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"))
    assert failure is not None
    assert failure.message.endswith("set TMPDIR to a folder that can be written to")


def test_what_ranks_need_names_the_folder_that_is_full(tmp_path: Path) -> None:
    order = TrainJob(settings=Settings(), folder="runs/mine")
    with files_of_at_most(8), pytest.raises(RuntimeFailure, match=r"File too large; make room there, or set TMPDIR"):
        hand_over(tmp_path, order)


def test_delegates_whose_memory_may_not_be_as_long_are_told_the_limit() -> None:
    """A limit of files counts for memory that processes share, too; it was told as: File too large."""
    said = str(cannot(OSError(errno.EFBIG, "File too large"), ["127.0.0.1"]))
    assert "delegates need more shared memory" in said
    assert "ulimit -f" in said


@pytest.mark.parametrize(
    ("number", "way"),
    [(errno.ENOSPC, "make room there"), (errno.EROFS, "can be written to"), (errno.EMFILE, "ulimit -n")],
)
def test_a_checkpoint_that_could_not_be_written_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, way: str
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuses)
        with pytest.raises(CheckpointError, match=f"{os.strerror(number)}.*older ones are untouched; .*{way}"):
            write(tmp_path, 1, {"a": torch.zeros(3)}, {})
    assert latest(tmp_path) is None


def test_one_process_under_torchrun_ended_with_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> int:
        raise CheckpointError("checkpoint x could not be written")

    monkeypatch.setattr(command, "_carry_out", fails)
    assert command.run_command(["--in-process"]) == 2
    assert capsys.readouterr().err == "penstock: checkpoint x could not be written\n"


@pytest.mark.parametrize("again", [False, True])
def test_metrics_that_are_removed_in_mid_training_were_lost_without_a_word(tmp_path: Path, again: bool) -> None:
    path = tmp_path / "metrics.jsonl"
    with Metrics(path, 0) as lines:
        lines.write(0, {"loss": 1.5})
        path.unlink()
        if again:
            path.touch()
        with pytest.raises(RuntimeFailure, match=r"step 1 could not be written to .*metrics\.jsonl"):
            lines.write(1, {"loss": 1.25})


def test_a_folder_of_checkpoints_that_is_moved_away_while_one_is_saved_ends_in_an_error_for_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 ended with FileNotFoundError, and the others waited for it."""
    folder, plain = tmp_path / "checkpoints", checkpoint_folder.commit

    def commit(temporary: Path, target: Path) -> None:
        plain(temporary, target)
        folder.rename(tmp_path / "moved")

    monkeypatch.setattr(checkpoint_folder, "commit", commit)
    errors = on_ranks(2, lambda peers: write(folder, 1, {f"{peers.here[0]}": torch.zeros(3)}, {}, peers=peers))
    assert all("could not be written: No such file or directory" in str(error) for error in errors), errors
