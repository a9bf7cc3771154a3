"""What every tier shares: golden files, which change only when `--update-golden` says so."""

from __future__ import annotations

import difflib
import gc
import importlib.util
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from groups import scheduler
from tiers import ALONE, examples, runs_alone
from waiting import PATIENCE

# No test asserts a time, Hypothesis' 200 ms for each example and its own for drawing the first ten among them.
NO_TIMES: Any = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ours", max_examples=examples(100), **NO_TIMES)
# What continuous integration runs: the same examples for the same code, so that a change is judged by what it did.
# New examples are looked for wherever the tests are run by hand.
settings.register_profile("same-examples", max_examples=examples(100), derandomize=True, **NO_TIMES)
settings.load_profile("ours")

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as in the foreground, here and in processes started here, though the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, without a window. Tests that use it are in the group `browser`, so that one is started."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs chromium to open pages")
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("needs playwright to act in pages")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        running = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        running.new_context, running.new_page = map(patient, (running.new_context, running.new_page))
        yield running
        running.close()


def patient(make: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the same, in which whatever is waited for has as long as elsewhere in the tests, and not 30 s."""

    def made(**options: Any) -> Any:
        one = make(**options)
        one.set_default_timeout(1e3 * PATIENCE)
        return one

    return made


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread for torch, as ranks in processes of their own have: sums differ with the number."""
    import torch  # here, for tests of planning start without it

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def small_work_is_deferred(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even small weight gradients wait for W; one thread, and random numbers from seed 0."""
    import torch

    from penstock.runtime.split_backward import prepared

    torch.manual_seed(0)
    monkeypatch.setattr(prepared, "MERGE_WORK", 0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files with what is made now")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares `text` with tests/golden/<name>, or rewrites it under `--update-golden`."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
            return
        if not path.exists():
            pytest.fail(f"no golden file {name}: make it with pytest --update-golden", pytrace=False)
        old = path.read_bytes().decode()
        if old == text:
            return
        diff = list(difflib.unified_diff(old.splitlines(), text.splitlines(), name, "made now", lineterm="", n=2))
        shown = "\n".join(line[:200] for line in diff[:60]) or "(only line endings or the last newline differ)"
        pytest.fail(f"{name} changed; if that is meant, pytest --update-golden\n{shown}", pytrace=False)

    return compare


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of the tests that run alone, only the files that have some are loaded: all 380 take a quarter of a minute."""
    if not (config.getoption("markexpr") or "").startswith(ALONE) or not collection_path.name.startswith("test_"):
        return None
    return None if runs_alone(collection_path.read_text(encoding="utf-8")) else True


def pytest_collection_finish() -> None:
    """What has been loaded stays: the collector of garbage looks through it no more, which took seconds each time."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one group go to one worker."""
    return scheduler(config, log) if config.getoption("dist") == "loadgroup" else None
