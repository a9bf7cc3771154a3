"""README and docs as tests see them: the examples they show, the commands they name, the links they give.

Blocks of one page run in order, in one folder and one namespace, so that a later one may use what an earlier one
made. A block's language says what is done with it:

    python              runs; comments behind a print, or right below it or a loop, are what it must print
    python file=net.py  a file that a page shows; it lies in the folder of every page's examples
    python torchrun=2   runs under torchrun, where `blocks` is asked for these
    python from=job.py  a part of a file below examples/
    sh                  commands that must work; training is stopped before it starts
    sh nightly          the same, at night alone; by day their options must be there
    console             `$ command` and its output; a line `...` stands for any lines
    console nightly     the same, at night alone
    text, json, ...     shown only
"""

from __future__ import annotations

import ast
import io
import re
import shlex
import tokenize
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock import lab
from penstock.cli import main
from penstock.control import Configuration, Controller, Job, rehearse
from penstock.lab.layout import Layout
from penstock.lab.links import read_links
from penstock.train import command as train_command
from penstock.train.folder import RunFolder
from penstock.train.job import TrainJob
from penstock.train.tasks.open import open_task, schedule_of
from tiers import NIGHTLY
from tune_models import Ranks

ROOT = Path(__file__).parents[1]
SITE = ROOT / "docs" / "site"
PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent != SITE)
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: where it starts, its language, what follows the language, its text."""

    page: Path
    line: int
    language: str
    more: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        language, _, more = match["info"].strip().partition(" ")
        found.append(Block(page, text[: match.start()].count("\n") + 2, language, more, match["text"]))
    return found


def shown_files() -> dict[str, str]:
    """By name the files that pages show, for models and data of one's own."""
    found = [block for page in PAGES for block in blocks(page) if block.more.startswith("file=")]
    return {block.more.removeprefix("file="): block.text for block in found}


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def commands(block: Block) -> list[list[str]]:
    """The words of each command of a sh block, comments left out."""
    joined = block.text.replace("\\\n", " ")
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def run_page(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> int:
    """Runs the blocks of a page inside `folder`; returns how many examples and commands ran."""
    monkeypatch.chdir(folder)
    for variable in ("FORCE_COLOR", "RANK"):
        monkeypatch.delenv(variable, raising=False)
    stop_before_running(monkeypatch)
    from in_step import keep_in_step

    keep_in_step(monkeypatch)
    for name, text in shown_files().items():
        (folder / name).write_text(text, encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": "example"}
    count = 0
    for block in blocks(page):
        if block.language == "python" and not block.more:
            run_python(block, namespace)
            count += 1
        elif block.language == "console" and (NIGHTLY or block.more != "nightly"):
            for line, expected in sessions(block):
                printed = run_command(shlex.split(line), block, capsys)
                assert matches(expected, printed), f"{block.where}: {line} printed\n{printed}"
                count += 1
        elif block.language == "sh":
            for words in commands(block):
                by_help = [] if NIGHTLY or block.more != "nightly" else ["--help"]
                run_command([*words, *by_help], block, capsys)
                count += 1
        else:
            assert block.language in ("text", "json", "toml", "python", "console"), (
                f"{block.where}: language {block.language!r}"
            )
    return count


def stop_before_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training reads and checks its settings and then only leaves its folder, and the tuner measures nothing."""
    from penstock.cli import lab as lab_command
    from penstock.cli import links as links_command
    from penstock.cli import play as play_command
    from penstock.train import start
    from penstock.tune import meter, verify
    from penstock.tune.links import MeasuredLinks, PairTimes

    def only_check(order: TrainJob, is_program: bool) -> int:
        settings, folder = order.settings, RunFolder(Path(order.folder))
        open_task(settings, schedule_of(settings))
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        folder.settings.write_text(settings.to_json(), encoding="utf-8")
        if settings.adapt:
            folder.file("control.jsonl").write_text(rehearsed_log(), encoding="utf-8")
        return 0

    monkeypatch.setattr(train_command, "_carry_out", only_check)

    class NoLab:
        """Takes what a lab takes, checks it, and makes nothing."""

        name, hosts, layout = "0", range(3), Layout("0", 3)

        def __init__(self, hosts: int = 3, nics: int = 2, links: Any = ()) -> None:
            read_links(links, Layout("0", hosts, nics))

        def __enter__(self) -> NoLab:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

        def ways(self) -> list[dict[str, Any]]:
            return []

    def no_late_links(environment: None, num_ranks: int, *rest: Any) -> MeasuredLinks:
        pairs = {(a, b): PairTimes(0.1, 0.1, 1e9, 1e9) for a in range(num_ranks) for b in range(a + 1, num_ranks)}
        return MeasuredLinks(["host"] * num_ranks, ["host"] * num_ranks, pairs, 1.0)

    monkeypatch.setattr(links_command, "_measured", no_late_links)
    monkeypatch.setattr(lab, "Lab", NoLab)
    monkeypatch.setattr(lab_command, "_keep", lambda made, json: None)  # it reads what is typed
    monkeypatch.setattr(lab.lab, "find", lambda name: NoLab.layout)
    monkeypatch.setattr(lab.kernel, "require", lambda: None)
    monkeypatch.setattr(lab.process, "run_everywhere", lambda *args, **options: [])
    monkeypatch.setattr(play_command.webbrowser, "open", lambda address: True)
    monkeypatch.setattr(play_command.ThreadingHTTPServer, "serve_forever", lambda self: None)
    monkeypatch.setattr(start, "run_job", lambda job: 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("cache").resolve()))
    monkeypatch.setattr(meter, "run_job", Ranks())
    monkeypatch.setattr(verify, "run_job", Ranks())


def rehearsed_log() -> str:
    """What a short run leaves of its control, for `penstock report`."""
    lines: list[str] = []
    zb, costs = ps.build("zb", 2, 4), ps.Costs.uniform(2, f=10, i=10, w=10)
    job = Job(costs, Configuration(zb, "frozen", (), tuple(ps.simulate(zb, costs).peak_activations)))
    rehearse(Controller(job, log=lines.append), ps.Links.parse("0:1=30"), until=1_000)
    return "\n".join(lines) + "\n"


def run_command(words: list[str], block: Block, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs one command and returns what it printed; fails where it names what is not there."""
    program, *rest = words
    shown = f"{block.where}: {shlex.join(words)}"
    capsys.readouterr()
    if program == "penstock":
        code = main(rest)
        printed = capsys.readouterr()
        assert code == 0, f"{shown}\nexit code {code}\n{printed.err}{printed.out}"
        return printed.out
    if program == "torchrun":
        own = rest.index("-m")
        if rest[own + 1 : own + 3] == ["penstock", "links"]:
            assert main([*rest[own + 2 :], "--ranks", "4"]) == 0, shown
            return capsys.readouterr().out
        assert rest[own + 1] == "penstock.train", shown
        assert train_command.run_command(rest[own + 2 :]) == 0, shown
    elif program == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert {word for word in rest if "=" not in word} <= set(targets), shown
    elif program == "python" and rest[0] == "-m":
        is_ours = rest[1].startswith("penstock.") and find_spec(rest[1]) is not None
        assert is_ours or rest[1:3] == ["pip", "install"], shown
        assert all((ROOT / after).exists() for flag, after in pairwise(rest) if flag == "-c"), shown
    elif program == "python":
        assert (ROOT / rest[0]).is_file(), shown
    elif program == ".venv/bin/pytest":
        known = (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
        assert all(word in known if word.startswith("--") else (ROOT / word).exists() for word in rest), shown
    else:
        pytest.fail(f"{shown}\nno test knows how to check {program}")
    return ""


def run_python(block: Block, namespace: dict[str, Any]) -> None:
    """Runs an example statement by statement and compares what it prints with the comments that say so.

    A comment behind a print says what that prints; lines of comments right below a print or a
    loop say what that prints.
    """
    said = dict(print_comments(block.text))
    lines_of_text = block.text.splitlines()
    for node in ast.parse(block.text).body:
        end = node.end_lineno or node.lineno
        expected = [said[line] for line in range(node.lineno, end + 1) if line in said]
        if isinstance(node, ast.For) or (lines_of_text[node.lineno - 1].startswith("print(") and not expected):
            below = takewhile(lambda line: line.startswith("# "), lines_of_text[end:])
            expected += [line.removeprefix("# ") for line in below]
        ast.increment_lineno(node, block.line - 1)
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(ast.Module([node], []), block.where, "exec"), namespace)
        if expected:
            lines = iter(printed.getvalue().splitlines())
            assert all(line in lines for line in expected), f"{block.where}: printed {printed.getvalue()!r}"


def print_comments(text: str) -> Iterator[tuple[int, str]]:
    """Line and comment of each print that says what it prints."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("print("):
            yield token.start[0], token.string.removeprefix("#").strip()


def sessions(block: Block) -> list[tuple[str, list[str]]]:
    """Each command of a console block with the lines below it."""
    found: list[tuple[str, list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def matches(expected: list[str], printed: str) -> bool:
    """Whether the lines are those printed, `...` standing for any."""
    pattern = "".join("(?:.*\n)*?" if line == "..." else re.escape(line) + "\n" for line in expected)
    return re.fullmatch(pattern, printed) is not None


def links(text: str) -> list[str]:
    """Targets of a page's links and pictures that are not on the web."""
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target for target in targets if not target.startswith(("http://", "https://"))]


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page may name."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str | None = None) -> list[str]:
    """Links to files or headings that are not there.

    A page that only the site has is none of them: it is named behind docs/site/README.md, as `#gallery.md`, which
    leads somewhere in the repository too. Whether its headings are there, the strict build of the site says.

    Args:
        text: of the page. Default: what its file holds outside fenced blocks.
    """
    broken = []
    for link in links(prose(page) if text is None else text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if target == SITE / "README.md":
            if f"{anchor.partition('.md')[0]}.md" not in made_by_the_site():
                broken.append(link)
        elif not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@cache
def made_by_the_site() -> frozenset[str]:
    """Pages that are there only where the site has been built: the gallery, the reference, the playground."""
    spec = spec_from_file_location("site_pages", SITE / "pages.py")
    assert spec is not None
    assert spec.loader is not None
    pages = module_from_spec(spec)
    spec.loader.exec_module(pages)
    return frozenset(pages.NAMES)


def missing_paths(page: Path) -> list[str]:
    """Files and folders named in backticks that are neither in the repository nor in the package."""
    named = re.findall(r"`([\w./-]+(?:\.py|\.md|\.svg|/))`", prose(page))
    bases = (ROOT, ROOT / "src" / "penstock", page.parent)
    return [name for name in named if name != "runs/" and not any((base / name).exists() for base in bases)]
