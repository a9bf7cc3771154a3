"""Where text comes from: the standard library, a text file, a folder or JSONL, each a stream of documents.

A document is the unit that tokens never run across without an end mark, and the unit that goes to training or
to validation as a whole. Its key, a path or a content digest, decides which, so the split does not depend on
the machine, on the order of a directory listing, or on what other documents there are.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from penstock.data.tokens import DataError

__all__ = ["Document", "folder_documents", "is_jsonl", "jsonl_documents", "stdlib_documents", "text_document"]

VALIDATION_ONE_IN = 20

# Not the library's own text, or different from one machine to the next.
SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "site-packages", "dist-packages", "lib-dynload", "test", "tests", "idle_test"}
)
SKIPPED_FILES = frozenset({"sitecustomize.py", "usercustomize.py"})
TOPICS = "pydoc_data/topics.py"


@dataclass(frozen=True, slots=True)
class Document:
    """One text; `key` names it for the split: its path below the source, or a digest of its content."""

    key: str
    text: bytes

    @property
    def is_validation(self) -> bool:
        """About one document in twenty, by a hash of the key alone."""
        digest = hashlib.blake2b(self.key.encode("utf-8", errors="surrogateescape"), digest_size=8).digest()
        return int.from_bytes(digest, "big") % VALIDATION_ONE_IN == 0


def stdlib_documents(root: str | Path | None = None) -> Iterator[Document]:
    """The running Python's standard library, sorted by path: `*.py` without tests, and `pydoc_data`'s topics.

    The topics, the language reference in English, come as one document each rather than as the quoted
    strings of `topics.py`. `DataError` where the library has no sources (a zipped or stripped Python).
    """
    root = Path(root if root is not None else sysconfig.get_paths()["stdlib"])
    found = False
    for name in _walk(root, SKIPPED_FOLDERS):
        base = name.rpartition("/")[2]
        if not base.endswith(".py") or base in SKIPPED_FILES or base.startswith("_sysconfigdata"):
            continue
        if name.startswith("config-"):
            continue
        # Some installers write the sources with Windows line ends; the corpus is the same everywhere.
        text = _read(root / name).replace(b"\r\n", b"\n")
        if not text:
            continue
        found = True
        topics = _topics(text) if name == TOPICS else None
        if topics is None:
            yield Document(name, text)
        else:
            for topic, body in sorted(topics.items()):
                yield Document(f"{TOPICS}/{topic}", body.encode("utf-8"))
    if not found:
        raise DataError(
            f"{root}: this Python ({sys.version.split()[0]}) keeps no sources of its standard library, "
            "which are the default text.\nName a text file, a folder or a .jsonl file to train on instead."
        )


def text_document(path: str | Path) -> Document:
    """A file of UTF-8 text as one document; `DataError` if it is missing, empty or not text."""
    path = Path(path)
    text = _read(path)
    if not text:
        raise DataError(f"{path}: the file is empty. Give a file with text in it.")
    if fault := _not_text(text):
        raise DataError(f"{path}: not a text file ({fault}). Give UTF-8 text, .jsonl or a .bin/.idx pair.")
    return Document(path.name, text)


def folder_documents(root: Path, passed_over: list[str]) -> Iterator[Document]:
    """Every UTF-8 text file below `root` as a document, and each line of the JSONL files, sorted by path.

    Hidden files do not count. The names of files that are empty or no text are added to `passed_over`. `DataError` as
    for a JSONL file alone, or if there is nothing to read.
    """
    names = _walk(root, frozenset({"__pycache__"}))
    for name in names:
        if is_jsonl(root / name) and (root / name).stat().st_size:
            yield from jsonl_documents(root / name)
        elif (text := _read(root / name)) and _not_text(text) is None:
            yield Document(name, text)
        else:
            passed_over.append(name)
    if len(passed_over) == len(names):
        raise DataError(f"{root}: no text files in this folder. Give one that holds UTF-8 text.")


def is_jsonl(path: Path) -> bool:
    """Whether each line of a file is a document, by the name of the file."""
    return path.suffix.lower() in (".jsonl", ".ndjson")


def jsonl_documents(path: str | Path) -> Iterator[Document]:
    """One document a line, from its `text` field; empty lines and empty texts are passed over.

    `DataError` names the line that is not a JSON object with a `text` string, or says that there was no text.
    """
    path = Path(path)
    found = False
    with _open(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                reason = "is not JSON" if isinstance(error, ValueError) else "is nested too deep"
                raise DataError(f"{where}: {reason}. Each line must be an object with a text field.") from None
            if not isinstance(row, dict):
                kind = type(row).__name__
                raise DataError(f"{where}: a JSON {kind}. Each line must be an object with a text field.")
            if "text" not in row:
                fields = ", ".join(list(row)[:5]) or "none"
                raise DataError(f"{where}: no text field (fields: {fields}). Rename the one that holds the text.")
            if not isinstance(row["text"], str):
                kind = type(row["text"]).__name__
                raise DataError(f"{where}: the text field is a {kind}. It must be a string.")
            # "replace" because JSON can spell half of a surrogate pair, which UTF-8 cannot.
            text = row["text"].encode("utf-8", errors="replace")
            if text:
                found = True
                yield Document(hashlib.blake2b(text, digest_size=16).hexdigest(), text)
    if not found:
        raise DataError(f"{path}: no text in this file. Each line must be an object with a text field.")


def _walk(root: Path, skipped: frozenset[str]) -> list[str]:
    """Names of all files below `root`, sorted, with forward slashes; links to folders are not followed."""
    names: list[str] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped and not name.startswith(".")]
        inside = Path(folder).relative_to(root)
        names += [(inside / name).as_posix() for name in files if not name.startswith(".")]
    return sorted(name for name in names if (root / name).is_file())


def _open(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}).") from None


def _read(path: Path) -> bytes:
    with _open(path) as file:
        return file.read()


def _not_text(data: bytes) -> str | None:
    """Why `data` is not text, or None if it is."""
    zero = data.find(b"\0")
    if zero >= 0:
        return f"zero byte at position {zero}"
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start}"
    return None


def _topics(source: bytes) -> dict[str, str] | None:
    """The dictionary of strings assigned in `pydoc_data/topics.py`, read without running the file."""
    with contextlib.suppress(SyntaxError, ValueError):
        for statement in ast.parse(source).body:
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
                topics = ast.literal_eval(statement.value)
                if all(isinstance(item, str) for pair in topics.items() for item in pair):
                    return dict(topics)
    return None
