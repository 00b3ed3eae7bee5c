"""Records of a topic, one or several, written as a text in which values are looked for."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from training.tasks import words
from training.tasks.corpus import Corpus
from training.tasks.draw import Draw
from training.tasks.fields import Field, make_literal_field
from training.tasks.stating import state
from training.tasks.topics import TOPIC_NAMES, TOPICS
from training.tasks.values import text as text_value


@dataclass(slots=True)
class Records:
    """Records with the same fields; the first field names a record and differs between them."""

    topic: str
    rows: list[list[Field]]
    text: str

    @property
    def names(self) -> list[str]:
        """What the records are called."""
        return [row[0].value.shown for row in self.rows]


def draw_records(draw: Draw, corpus: Corpus, count: int) -> Records:
    """`count` records, or fewer where their names repeat."""
    if count == 1 and draw.chance(0.3):
        return _stanza(draw) if draw.chance(0.6) or not corpus.records else _factbook(draw, corpus)
    topic = draw.of(TOPIC_NAMES)
    specs = [spec for spec in TOPICS[topic] if spec[1] not in ("foods", "tags", "people")]
    specs = [specs[0], *draw.some(specs[1:], draw.integer(1, 4))]
    rows: dict[str, list[Field]] = {}
    for _ in range(count):
        row = [make_literal_field(draw, spec) for spec in specs]
        rows.setdefault(row[0].value.shown, row)
    found = list(rows.values())
    return Records(topic.replace("_", " "), found, _written(draw, topic, found))


def _written(draw: Draw, topic: str, rows: Sequence[Sequence[Field]]) -> str:
    """Lines, a table, CSV, JSON, or a paragraph for each record."""
    if len(rows) == 1:
        return state(draw, rows[0])
    form = draw.integer(0, 4)
    if form == 0:
        between = draw.pick((" | ", ",", "; "))
        head = between.join(field.name for field in rows[0])
        return "\n".join([head, *(between.join(field.value.shown for field in row) for row in rows)])
    if form == 1:
        values = [{field.name: field.value.value for field in row} for row in rows]
        return json.dumps(values, ensure_ascii=False, indent=draw.pick((None, None, 1)))
    if form == 2:
        blocks = ["\n".join(f"{field.label}: {field.shown}" for field in row) for row in rows]
        return "\n\n".join(blocks)
    if form == 3:
        return "\n".join("- " + ", ".join(f"{field.label} {field.shown}" for field in row) for row in rows)
    return "\n".join(_sentence(row) for row in rows)


def _sentence(row: Sequence[Field]) -> str:
    said = [f"{field.label} {field.shown}" for field in row[1:]]
    joined = said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}"
    return f"{row[0].value.shown} has {joined}."


def _stanza(draw: Draw) -> Records:
    """A package description as in a package list."""
    start, end = draw.pick(("lib", "", "", "python3-", "")), draw.pick(("", "-dev", "-doc", "2"))
    name = f"{start}{words.invented_word(draw)}{end}"
    depends = [f"lib{words.invented_word(draw)}{draw.integer(1, 9)}" for _ in range(draw.integer(1, 3))]
    values = {
        "Package": name,
        "Version": f"{draw.integer(0, 9)}.{draw.integer(0, 20)}-{draw.integer(1, 5)}",
        "Architecture": draw.pick(("amd64", "arm64", "all", "i386", "riscv64")),
        "Maintainer": words.person(draw),
        "Installed-Size": str(draw.integer(10, 90000)),
        "Depends": ", ".join(depends),
        "Section": draw.pick(("libs", "utils", "net", "devel", "python", "games", "text")),
        "Priority": draw.pick(("optional", "required", "extra")),
        "Description": f"{words.thing(draw)} for the {draw.of(words.NOUNS)}",
    }
    keys = ["Package", *draw.some([key for key in values if key != "Package"], draw.integer(3, 8))]
    row = [_plain(key, values[key]) for key in keys]
    return Records("package", [row], "\n".join(f"{key}: {values[key]}" for key in keys))


def _factbook(draw: Draw, corpus: Corpus) -> Records:
    """Short facts of a country, as JSON or as lines."""
    for _ in range(20):
        record = draw.pick(corpus.records)
        facts = [
            (k, v) for k, v in record.items() if isinstance(v, str) and 0 < len(v) < 90 and k != "section"
        ]
        if len(facts) >= 3:
            kept = facts[:7]
            row = [_plain(key, value) for key, value in kept]
            lines = "\n".join(f"{key}: {value}" for key, value in kept)
            return Records(
                "country", [row], lines if draw.chance(0.5) else json.dumps(dict(kept), ensure_ascii=False)
            )
    return _stanza(draw)


def _plain(key: str, value: str) -> Field:
    return Field(key, key, key, text_value(value), value)
