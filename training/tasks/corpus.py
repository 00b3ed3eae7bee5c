"""Texts that some tasks work on: paragraphs, JSON values and dictionary entries of the training corpus."""

import json
import lzma
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training.tasks.draw import Draw

DICTIONARIES = ("wordnet", "gcide", "foldoc")
PROSE = (
    "linux-doc",
    "python-doc",
    "postgresql-doc",
    "git-doc",
    "man-pages",
    "bible-web",
    "rust-books",
    "debian-docs",
)
_WORDNET = re.compile(r"^(?P<word>[^\n(:]+) \((?P<part>[a-z ]+)\): (?P<text>.+)$")
_GCIDE = re.compile(r"^(?P<word>[^\n(:]+) \((?P<part>[a-z ]+)\): (?P<text>[^\n]+)$")
_FOLDOC = re.compile(r"^(?P<word>[^\n:]+)(?:: |\n)\((?P<part>[a-z ,]+)\) (?P<text>[^\n]+)$")


@dataclass(frozen=True, slots=True)
class Entry:
    """One dictionary entry. `raw` is its text in the corpus, which is what an open-book prompt shows."""

    source: str
    word: str
    part: str
    meaning: str
    raw: str
    synonyms: tuple[str, ...] = ()
    kind_of: str = ""
    example: str = ""


@dataclass(slots=True)
class Corpus:
    """Documents in memory, sorted by what they are good for."""

    paragraphs: list[str] = field(default_factory=list)
    json_texts: list[str] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    entries: dict[str, list[Entry]] = field(default_factory=dict)

    @classmethod
    def load(cls, files: Iterable[Path], documents_per_source: int = 1500) -> "Corpus":
        """The first documents of each source in these `.jsonl.xz` files."""
        corpus = cls()
        counts: dict[str, int] = {}
        for path in files:
            with lzma.open(path, "rt", encoding="utf-8") as lines:
                for line in lines:
                    document = json.loads(line)
                    source = document["source"]
                    counts[source] = counts.get(source, 0) + 1
                    if counts[source] <= documents_per_source:
                        corpus.add(source, document["text"])
        return corpus

    def add(self, source: str, text: str) -> None:
        """One document."""
        if source in DICTIONARIES:
            self.entries.setdefault(source, []).extend(parse_entries(source, text))
        elif source.startswith("json-"):
            self._add_json(source, text)
        elif source in PROSE:
            self.paragraphs += [part for part in text.split("\n\n") if _is_prose(part)]

    def _add_json(self, source: str, text: str) -> None:
        if len(text) > 4000:
            return
        try:
            value = json.loads(text)
        except ValueError:
            return
        self.json_texts.append(text)
        if source == "json-factbook" and isinstance(value, dict):
            self.records.append(value)

    def entry(self, draw: Draw, source: str | None = None) -> Entry:
        """Some entry of a dictionary, or of any."""
        return draw.pick(self.entries[source or draw.pick(tuple(self.entries))])

    def neighbours(self, draw: Draw, source: str, count: int) -> list[Entry]:
        """Entries that stand together."""
        entries = self.entries[source]
        start = draw.integer(0, max(0, len(entries) - count))
        return entries[start : start + count]


def parse_entries(source: str, text: str) -> list[Entry]:
    """The entries of a dictionary document that have one plain meaning."""
    pattern = {"wordnet": _WORDNET, "gcide": _GCIDE, "foldoc": _FOLDOC}[source]
    found = []
    for raw in text.split("\n\n"):
        match = pattern.match(raw.strip())
        if match and len(raw) < 400:
            found.append(_entry(source, raw.strip(), match))
    return found


def _entry(source: str, raw: str, match: re.Match[str]) -> Entry:
    word, part, text = match["word"].strip(), match["part"], match["text"]
    if source != "wordnet":
        return Entry(source, word, part, text, raw)
    meaning, *more = re.split(r"\. (?=Synonyms: |Kind of: |Related: |Example: )", text)
    facts = dict(item.split(": ", 1) for item in more if ": " in item)
    return Entry(
        source,
        word,
        part,
        meaning.rstrip("."),
        raw,
        synonyms=_split(facts.get("Synonyms", "")),
        kind_of=facts.get("Kind of", "").rstrip("."),
        example=facts.get("Example", "").strip('".'),
    )


def _split(synonyms: str) -> tuple[str, ...]:
    return tuple(word.strip(" .") for word in synonyms.split(",") if word.strip(" ."))


def _is_prose(paragraph: str) -> bool:
    return (
        60 <= len(paragraph) <= 900
        and paragraph[0].isalpha()
        and "```" not in paragraph
        and "\n" not in paragraph
    )


def no_corpus_texts(draw: Draw, words: Sequence[str]) -> str:
    """A stand-in paragraph where no corpus is given: sentences of random words."""
    sentences = []
    for _ in range(draw.integer(2, 6)):
        chosen = [draw.pick(words) for _ in range(draw.integer(4, 11))]
        sentences.append(f"{' '.join(chosen).capitalize()}.")
    return " ".join(sentences)
