"""Bytes and tokenizer files: round trips, and errors that say what to do."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import numpy as np
import pytest

from penstock.data import ByteTokenizer, DataError, Tokenizer, load_tokenizer, open_corpus
from penstock.data.tokens import token_dtype
from penstock.train.options import options_of
from penstock.train.settings import Settings

pytestmark = pytest.mark.unit


def test_bytes_round_trip_and_cut_letters_become_replacement_marks() -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode("né\n")
    assert tokens.tolist() == [110, 195, 169, 10]
    assert tokens.dtype == np.uint8
    assert tokenizer.encode(b"\xff\x00").tolist() == [255, 0]
    assert tokenizer.decode(tokens) == "né\n"
    assert tokenizer.decode([110, 195]) == "n\ufffd"
    assert isinstance(tokenizer, Tokenizer)


@pytest.mark.parametrize(
    ("vocab_size", "name"),
    [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "int32"), (2**31, "int32")],
)
def test_the_smallest_type_that_fits(vocab_size: int, name: str) -> None:
    dtype = token_dtype(vocab_size)
    assert dtype.name == name
    assert np.iinfo(dtype).max >= vocab_size - 1


@pytest.mark.parametrize("vocab_size", [0, -1, 2**31 + 1])
def test_a_vocabulary_that_no_type_fits_is_refused(vocab_size: int) -> None:
    with pytest.raises(ValueError, match="between 1 and"):
        token_dtype(vocab_size)


@pytest.fixture
def words(tmp_path: Path) -> Path:
    package = pytest.importorskip("tokenizers")
    vocab = {"one": 0, "two": 1, "[UNK]": 2, "<|endoftext|>": 300}
    inner = package.Tokenizer(package.models.WordLevel(vocab, unk_token="[UNK]"))
    inner.pre_tokenizer = package.pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    inner.save(str(path))
    return path


def test_a_tokenizer_file_encodes_decodes_and_finds_its_end_mark(words: Path) -> None:
    tokenizer = load_tokenizer(words)
    # The size is the highest number plus one: numbers may have holes.
    assert tokenizer.vocab_size == 301
    assert tokenizer.end_of_document == 300
    assert tokenizer.encode(b"two one zebra").tolist() == [1, 0, 2]
    assert tokenizer.encode("two").dtype == np.uint16
    assert tokenizer.decode(np.array([1, 0])) == "two one"
    assert isinstance(tokenizer, Tokenizer)


@pytest.mark.parametrize(
    ("config", "end"),
    [
        (None, "<eos>"),  # Gemma's has the HTML tag </s> too, ahead of it
        ({"eos_token": "<end>"}, "<end>"),
        ({"eos_token": {"content": "<end>", "lstrip": False}}, "<end>"),
        ({"eos_token": "<elsewhere>"}, "<eos>"),
        ({"eos_token": None}, "<eos>"),
        ({}, "<eos>"),
        ([], "<eos>"),
    ],
)
def test_bug_the_first_known_word_ended_a_document_whatever_the_tokenizers_config_says(
    tmp_path: Path, config: object, end: str
) -> None:
    package = pytest.importorskip("tokenizers")
    vocab = {word: number for number, word in enumerate(["one", "None", "</s>", "<eos>", "<end>", "[UNK]"])}
    package.Tokenizer(package.models.WordLevel(vocab, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.end_of_document == vocab[end]
    (tmp_path / "text.txt").write_text("one " * 40)
    assert open_corpus(tmp_path / "text.txt", tokenizer).description.endswith(f"; '{end}' ends a document)")


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps({"model": {"type": "Unheard"}})])
def test_a_broken_file_is_one_clear_error(tmp_path: Path, content: str) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizers JSON file \(.+\)"):
        load_tokenizer(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.json: no such tokenizer file"):
        load_tokenizer(tmp_path / "nothing.json")


def test_a_folder_with_a_tokenizer_was_refused_and_the_help_did_not_say_what_it_takes(words: Path) -> None:
    folder = words.parent
    assert load_tokenizer(folder).encode("two one").tolist() == load_tokenizer(words).encode("two one").tolist()
    assert "A tokenizer.json, or a folder with one" in options_of(Settings)["tokenizer"].help
    words.unlink()
    with pytest.raises(DataError, match=r"tokenizer\.json: no such tokenizer file"):
        load_tokenizer(folder)


def test_a_missing_package_names_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: object, **keywords: object) -> object:
        if name == "tokenizers":
            raise ModuleNotFoundError(name, name=name)
        return real(name, *args, **keywords)

    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"pip install '\.\[tokenizers\]'"):
        load_tokenizer(path)
