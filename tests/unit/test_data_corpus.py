"""Corpora: the same tokens and the same split everywhere, and every wrong source one clear error."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.data import ByteTokenizer, DataError, IndexedTokens, load_tokenizer, open_corpus, prepare
from penstock.data.corpus import open_documents
from penstock.data.documents import Document, stdlib_documents

pytestmark = pytest.mark.unit


def test_the_default_corpus_is_large_text_split_by_whole_documents() -> None:
    corpus = open_corpus()
    assert corpus.num_tokens > 4_000_000
    assert corpus.train.dtype == np.uint8
    assert 0.01 < corpus.validation.size / corpus.num_tokens < 0.12
    again = open_corpus()
    assert again.digest == corpus.digest
    assert np.array_equal(again.validation, corpus.validation)
    documents = list(stdlib_documents())
    assert corpus.num_documents == len(documents)
    expected = b"".join(d.text + b"\0" for d in documents if d.is_validation)
    assert corpus.validation.tobytes() == expected


def test_the_default_corpus_has_sources_and_topics_and_no_tests() -> None:
    keys = [document.key for document in stdlib_documents()]
    assert len(set(keys)) == len(keys)
    assert {"json/decoder.py", "argparse.py", "pydoc_data/topics.py/lambda"} <= set(keys)
    assert "pydoc_data/topics.py" not in keys
    parts = {part for key in keys for part in key.split("/")[:-1]}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    topic = next(d.text for d in stdlib_documents() if d.key.endswith("/lambda"))
    assert b"\n" in topic
    assert b"\\n" not in topic


def test_a_library_elsewhere_is_read_sorted_with_its_line_ends_made_plain(tmp_path: Path) -> None:
    for name, text in {
        "b.py": b"b\r\n",
        "a/z.py": b"z",
        "a.py": b"a",
        "test/x.py": b"x",
        "n/tests/x.py": b"x",
        "site-packages/x.py": b"x",
        "a/data.txt": b"x",
        "_sysconfigdata_x.py": b"x",
        "sitecustomize.py": b"x",
        "empty.py": b"",
        "pydoc_data/topics.py": b"topics = {'b': 'B\\n', 'a': 'A'}",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text)
    assert [(d.key, d.text) for d in stdlib_documents(tmp_path)] == [
        ("a.py", b"a"),
        ("a/z.py", b"z"),
        ("b.py", b"b\n"),
        ("pydoc_data/topics.py/a", b"A"),
        ("pydoc_data/topics.py/b", b"B\n"),
    ]


@pytest.mark.parametrize("source", [b"topics = {'a': 1}", b"topics = {", b"topics = {'a': open('x')}", b"x = 1"])
def test_topics_of_another_shape_stay_source_and_are_never_run(tmp_path: Path, source: bytes) -> None:
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_bytes(source)
    assert [(d.key, d.text) for d in stdlib_documents(tmp_path)] == [("pydoc_data/topics.py", source)]


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.touch()])
def test_a_python_without_sources_says_what_to_do(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "python311.zip")
    with pytest.raises(DataError, match=r"keeps no sources(.|\n)*Name a text file"):
        list(stdlib_documents(tmp_path / "python311.zip"))


def test_the_split_is_a_matter_of_the_key_and_never_changes() -> None:
    # Written down, because a checkpoint's validation loss means something only on the same documents.
    assert Document("argparse.py", b"").is_validation
    assert not Document("json/decoder.py", b"").is_validation
    share = sum(Document(f"{i}.txt", b"").is_validation for i in range(4000)) / 4000
    assert 0.04 < share < 0.06


def test_a_text_file_gives_its_last_twentieth_to_validation(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(1, 200)))
    with pytest.raises(DataError, match=r"a\.txt: not a text file \(not UTF-8 at byte 127\)"):
        open_corpus(path)
    path.write_text("x" * 1999)
    corpus = open_corpus(str(path))
    assert (corpus.train.size, corpus.validation.size) == (1900, 100)
    assert corpus.validation.tobytes() == b"x" * 99 + b"\0"
    assert corpus.description == f"{path}: 1 documents, 2,000 tokens (bytes; '\\x00' ends a document)"


def test_a_folder_is_read_sorted_and_binary_files_are_passed_over(tmp_path: Path) -> None:
    for name, text in {
        "b.md": b"bb",
        "a/z.txt": b"zz",
        "a.rst": b"aa",
        "photo.jpg": b"\xff\xd8\xff",
        "zeros": b"a\0b",
        ".hidden": b"h",
        ".git/config": b"g",
        "empty": b"",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text)
    passed_over: list[str] = []
    assert [d.key for d in open_documents(tmp_path, passed_over)] == ["a.rst", "a/z.txt", "b.md"]
    assert passed_over == ["empty", "photo.jpg", "zeros"]
    corpus = open_corpus(tmp_path)
    assert np.concatenate([corpus.train, corpus.validation]).tobytes() == b"aa\0zz\0bb\0"
    assert corpus.description.endswith("; passed over as empty or no text: 3 files, such as empty")


def test_jsonl_in_a_folder_was_trained_on_as_json(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "in").mkdir(parents=True)
    (folder / "in" / "b.jsonl").write_text('{"text": "one", "id": 1}\n{"text": "two", "id": 2}\n')
    (folder / "a.txt").write_text("plain")
    (folder / "c.JSONL").write_text("")
    corpus = open_corpus(folder)
    assert np.concatenate([corpus.train, corpus.validation]).tobytes() == b"plain\0one\0two\0"
    assert corpus.num_documents == 3
    made = prepare(folder, tmp_path / "out", ByteTokenizer())
    assert (made.num_documents, made.passed_over) == (3, ["c.JSONL"])
    (folder / "in" / "b.jsonl").write_text('{"text": "one"}\n{"body": "two"}\n')
    with pytest.raises(DataError, match=r"b\.jsonl, line 2: no text field \(fields: body\)"):
        open_corpus(folder)


def test_a_large_folder_is_split_by_documents_whatever_else_it_holds(tmp_path: Path) -> None:
    for i in range(100):
        (tmp_path / f"{i:03}.txt").write_text(f"document {i}")
    held = bytes(open_corpus(tmp_path).validation)
    assert 0 < held.count(b"\0") < 20
    (tmp_path / "another.txt").write_text("more")
    after = bytes(open_corpus(tmp_path).validation)
    assert after.replace(b"more\0", b"") == held


def test_jsonl_takes_text_fields_and_keeps_copies_on_one_side(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"text": f"row {i % 50}", "id": i} for i in range(200)]
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + '\n{"text": ""}\n')
    corpus = open_corpus(path)
    assert corpus.num_documents == 200
    train = set(corpus.train.tobytes().split(b"\0"))
    held = set(corpus.validation.tobytes().split(b"\0"))
    assert len(held) > 1
    assert train & held == {b""}


def test_half_a_surrogate_pair_in_jsonl_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud800b"}')
    assert [d.text for d in open_documents(path, [])] == [b"a?b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "line 3: is not JSON"),
        ("[1]", "line 3: a JSON list"),
        ('{"body": "a", "id": 1}', r"line 3: no text field \(fields: body, id\)"),
        ("{}", r"line 3: no text field \(fields: none\)"),
        ('{"text": 7}', "line 3: the text field is a int"),
        ("[" * 100_000, "line 3: is"),
        ("\xff", "line 3: is not JSON"),
    ],
)
def test_jsonl_errors_name_the_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(DataError, match=rf"a\.jsonl, {message}"):
        open_corpus(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", None, "no such file or folder"),
        ("a.txt", b"", "the file is empty"),
        ("a.txt", b"a\0b", r"zero byte at position 1"),
        ("a.jsonl", b"", "no text in this file"),
        ("a.jsonl", b'{"text": ""}\n', "no text in this file"),
        ("folder/a.jpg", b"\xff", "no text files in this folder"),
    ],
)
def test_no_text_is_an_error_that_names_the_source(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        open_corpus(path if path.parent == tmp_path else path.parent)
    assert len(str(caught.value).splitlines()) <= 2
    assert str(tmp_path) in str(caught.value)


def test_an_unreadable_file_is_a_data_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("penstock.data.documents.open", refuse, raising=False)
    with pytest.raises(DataError, match=r"a\.txt: cannot be read \(Permission denied\)"):
        open_corpus(path)


def test_a_prepared_corpus_is_mapped_and_split_at_a_document(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for i in range(40):
        (source / f"{i:02}.txt").write_text(chr(65 + i) * (i + 1))
    summary = prepare(source, tmp_path / "out" / "corpus", ByteTokenizer())
    assert (summary.num_documents, summary.num_tokens, summary.dtype) == (40, 40 * 41 // 2 + 40, "uint8")
    assert summary.num_text_bytes == 40 * 41 // 2
    for given in ("corpus", "corpus.bin", "corpus.idx"):
        corpus = open_corpus(tmp_path / "out" / given)
        assert corpus.num_tokens == summary.num_tokens
        assert corpus.validation.tobytes() == b"g" * 39 + b"\0" + b"h" * 40 + b"\0"
        assert isinstance(corpus.train, np.memmap)
    assert corpus.num_documents == 40


def test_prepare_without_end_marks_and_with_a_tokenizer_file(tmp_path: Path) -> None:
    package = pytest.importorskip("tokenizers")
    inner = package.Tokenizer(package.models.WordLevel({"one": 0, "two": 1, "x": 400}, unk_token="x"))
    inner.pre_tokenizer = package.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(tmp_path / "t.json")
    (tmp_path / "a.jsonl").write_text('{"text": "one two two"}\n{"text": "zebra"}')
    prepare(tmp_path / "a.jsonl", tmp_path / "corpus", tokenizer)
    pair = IndexedTokens(tmp_path / "corpus")
    assert [document.tolist() for document in pair] == [[0, 1, 1], [400]]
    assert pair.dtype == np.uint16
    corpus = open_corpus(tmp_path / "corpus", tokenizer)
    assert (corpus.vocab_size, corpus.num_tokens) == (401, 4)


def test_a_failed_prepare_leaves_the_old_pair_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"no": 1}')
    prepare(tmp_path / "good.txt", tmp_path / "corpus", ByteTokenizer())
    with pytest.raises(DataError, match="line 2: no text field"):
        prepare(tmp_path / "bad.jsonl", tmp_path / "corpus", ByteTokenizer())
    assert IndexedTokens(tmp_path / "corpus").tokens.tobytes() == b"good\0"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "bad.jsonl",
        "corpus.bin",
        "corpus.idx",
        "good.txt",
    ]


def test_prepare_refuses_tokens_as_text(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("good")
    prepare(tmp_path / "good.txt", tmp_path / "corpus", ByteTokenizer())
    with pytest.raises(DataError, match="holds tokens, not text"):
        prepare(tmp_path / "corpus.bin", tmp_path / "again", ByteTokenizer())
    assert not (tmp_path / "again.bin").exists()


def test_digests_tell_corpora_apart(tmp_path: Path) -> None:
    digests = set()
    for name, text in {"a.txt": "aaaa" * 20, "b.txt": "aaab" * 20}.items():
        (tmp_path / name).write_text(text)
        prepare(tmp_path / name, tmp_path / name[0], ByteTokenizer())
        digests |= {open_corpus(tmp_path / name).digest, open_corpus(tmp_path / name[0]).digest}
    assert len(digests) == 4
    assert all(len(digest) == 16 for digest in digests)


def test_data_needs_no_torch() -> None:
    code = "import sys, penstock.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
