"""The corpus on disk: xz-compressed JSON lines, `{"source": ..., "text": ...}`."""

import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Document:
    """One page, section, chapter, group of dictionary entries or JSON value."""

    source: str
    text: str


def read_documents(path: Path) -> Iterator[Document]:
    """Documents of one `.jsonl.xz` file, in file order."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            yield Document(record["source"], record["text"])


def training_files(folder: Path) -> list[Path]:
    """The training part of a corpus folder; FileNotFoundError where it has none."""
    files = sorted(folder.glob("docs-*.jsonl.xz"))
    if not files:
        raise FileNotFoundError(f"no docs-*.jsonl.xz in {folder}")
    return files


def heldout_file(folder: Path) -> Path:
    """The held-out part: 1 % of the documents of each source, in no training file."""
    return folder / "heldout.jsonl.xz"
