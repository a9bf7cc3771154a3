"""The words of the project: sentences that readers stumbled over do not come back."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from documents import ROOT


def the_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prose_check", ROOT / ".ci" / "prose.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


PROSE = the_check()


@pytest.mark.parametrize("rule", PROSE.RULES, ids=lambda rule: rule.example)
def test_each_rule_finds_its_example(rule: object) -> None:
    assert [instead for _, _, instead in PROSE.found(iter([(1, rule.example)]))] == [rule.instead]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "sentence",
    [
        "Two stages per rank.",
        "The decider says which op a rank runs next.",
        "max_in_flight: most stage activations a rank may hold.",
        "A schedule with more than 50,000 ops runs compiled.",
        "It takes 40 ms a step, and 3,000 tokens a second.",
        "Towers are told apart by their names.",
        "A rank that is told to wait asks again.",
    ],
)
def test_plain_sentences_pass(sentence: str) -> None:
    assert list(PROSE.found(iter([(1, sentence)]))) == []


def test_code_and_drawings_are_no_prose() -> None:
    page = "Run `two stages a rank`.\n\n```python\nx = 'the the'\n```\n\n| a | two stages a rank |\n"
    assert [(line, words) for line, words, _ in PROSE.found(PROSE.prose_of_page(page))] == [(7, "stages a rank")]
    source = '"""Draws a picture of it.\n\n    rank 0 | the the\n\nIt is the the end of it.\n"""\n'
    assert [line for line, _, _ in PROSE.found(PROSE.prose_of_source(source))] == [5]


def test_messages_are_read_too() -> None:
    source = 'raise ValueError(f"{name} is {value}: give one number a stage")\n'
    assert [words for _, words, _ in PROSE.found(PROSE.prose_of_source(source))] == ["number a stage"]


@pytest.mark.parametrize(
    ("sentence", "words"),
    [
        ("It runs for ever.", "for ever"),
        ("At the end of the day a rank waits.", "At the end of the day"),
        ("This is a very good plan.", "very"),
    ],
)
def test_bad_english_is_found_at_its_line(sentence: str, words: str) -> None:
    paragraphs = [(3, "A rank runs its ops."), (7, "Links are late."), (12, sentence)]
    assert {(line, said) for line, said, _ in PROSE.found_by_proselint(paragraphs)} == {(12, words)}


def test_words_of_code_are_no_bad_english() -> None:
    said = 'Give "1f1b" to `…`, resume, and see 8 x 16 ... forwards.'
    assert list(PROSE.found_by_proselint([(1, said)])) == []
    assert list(PROSE.found_by_proselint([])) == []


@pytest.mark.nightly
def test_nothing_is_left_to_mend(capsys: pytest.CaptureFixture[str]) -> None:
    assert PROSE.main() == 0, capsys.readouterr().out
