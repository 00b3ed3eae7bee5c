"""Extraction: named values out of records, with distractors; also back from a record to a sentence."""

from collections.abc import Callable
from typing import Any

from training.tasks.corpus import Corpus
from training.tasks.draw import Draw, lines
from training.tasks.example import Example, reply, user
from training.tasks.fields import Field, make_field
from training.tasks.json_short import minified
from training.tasks.records import Records, draw_records
from training.tasks.topics import TOPICS
from training.tasks.wording import styled

ONE = lines(
    """What is the {0}?
    Give the {0}.
    {0}?
    Tell me the {0}.
    Find the {0}.
    I need the {0}.
    Which {0} is given?
    Extract the {0}.
    Return only the {0}.
    Look for the {0}.
    What does the text say about the {0}?
    State the {0}."""
)
OF_ONE = lines(
    """What is the {0} of {1}?
    Give the {0} of {1}.
    {1}: {0}?
    Tell me the {0} of {1}.
    Find the {0} for {1}.
    I need the {0} of {1}.
    Which {0} does {1} have?
    Look up the {0} of {1}.
    Return the {0} that belongs to {1}.
    For {1}, what is the {0}?"""
)
AS_JSON = lines(
    """Give {0} as JSON.
    Return JSON with {0}.
    Extract {0}. Answer with JSON.
    JSON with the keys {0}, please.
    I want {0} as a JSON object.
    Collect {0} in a JSON object.
    Which values have {0}? Answer in JSON.
    Read out {0} and write them as JSON."""
)
ALL = lines(
    """List every {0}.
    Which values of {0} are there? One a line.
    Give all values of {0}, one a line.
    Name the {0} of each record, one a line.
    Collect each {0}, one a line.
    Write down every {0}, in order, one a line."""
)
SENTENCE = lines(
    """Write this as one sentence.
    Say this in a sentence.
    Put the record into words.
    Describe this in one sentence.
    Turn the data into a sentence.
    State all of this in one sentence."""
)
NOT_STATED = "not stated"


def generate(draw: Draw, kind: str, corpus: Corpus) -> Example:
    """One example over 1 to 12 records."""
    count = 1 if draw.chance(0.45) else draw.log_uniform(2, 12)
    records = draw_records(draw, corpus, count)
    return draw.weighted(MAKERS)(draw, kind, records)


def _one_value(draw: Draw, kind: str, records: Records) -> Example:
    """One value; of a named record where there are several. One in twelve isn't in the text."""
    row = draw.pick(records.rows)
    field = draw.pick(row[1:] or row)
    label, answer = field.label, field.shown if len(records.rows) == 1 else field.value.shown
    absent = draw.chance(0.08)
    if absent:
        label, answer = _absent_label(draw, row), NOT_STATED
    if len(records.rows) > 1:
        request = styled(draw, draw.of(OF_ONE)).format(label, row[0].value.shown)
    else:
        request = styled(draw, draw.of(ONE)).format(label)
    if absent or draw.chance(0.1):
        request += f' If the text lacks it, say "{NOT_STATED}".'
    accepted = [answer, field.value.shown, *_as_written(field)] if not absent else [answer]
    return _example(draw, kind, request, records.text, answer, "one_of", accepted)


def _as_written(field: Field) -> list[str]:
    """A JSON table writes booleans and numbers in its own way."""
    return [minified(field.value.value)] if not isinstance(field.value.value, str) else []


def _fields_as_json(draw: Draw, kind: str, records: Records) -> Example:
    """Some fields of one record as JSON; a field that isn't there is null."""
    row = draw.pick(records.rows)
    chosen = draw.some(row, draw.integer(1, 4))
    value: dict[str, Any] = {field.key: field.value.value for field in chosen}
    if draw.chance(0.12):
        value[_absent_label(draw, row).replace(" ", "_")] = None
    keys = list(value)
    listed = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} and {keys[-1]}"
    request = styled(draw, draw.of(AS_JSON)).format(listed)
    if len(records.rows) > 1:
        request = f"{request} Only for {row[0].value.shown}."
    if None in value.values():
        request += " Use null for what is missing."
    return _example(draw, kind, request, records.text, minified(value), "json", value)


def _all_values(draw: Draw, kind: str, records: Records) -> Example:
    """One field of every record."""
    index = draw.integer(0, len(records.rows[0]) - 1)
    label = records.rows[0][index].name.replace("_", " ")
    if draw.chance(0.4):
        value = [row[index].value.value for row in records.rows]
        request = draw.pick(("Give all values of {0} as a JSON list.", "JSON list of every {0}, please."))
        return _example(draw, kind, request.format(label), records.text, minified(value), "json", value)
    shown = "\n".join(row[index].value.shown for row in records.rows)
    return _example(draw, kind, styled(draw, draw.of(ALL)).format(label), records.text, shown, "text", shown)


def _to_sentence(draw: Draw, kind: str, records: Records) -> Example:
    """The reverse: every value of a record in one sentence."""
    row = draw.pick(records.rows)[:4]
    data = "\n".join(f"{field.label}: {field.shown}" for field in row)
    if draw.chance(0.4):
        data = minified({field.key: field.shown for field in row})
    said = [f"the {field.label} is {field.shown}" for field in row]
    text = said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}"
    answer = f"{text[0].upper()}{text[1:]}."
    return _example(
        draw, kind, styled(draw, draw.of(SENTENCE)), data, answer, "contains", [f.shown for f in row]
    )


def _absent_label(draw: Draw, row: list[Field]) -> str:
    """The label of a field that no record here has."""
    present = {field.label for field in row} | {field.name for field in row}
    while True:
        topic = draw.pick(tuple(TOPICS))
        label = make_field(draw, draw.pick(TOPICS[topic])).name.replace("_", " ")
        if label not in present and label.replace(" ", "_") not in present:
            return label


def _example(
    draw: Draw, kind: str, request: str, data: str, answer: str, checker: str, expected: Any
) -> Example:
    parts = [request, data] if draw.chance(0.5) else [data, request]
    return Example(kind, [user("\n\n".join(parts))], reply(answer), checker, expected)


MAKERS: dict[Callable[[Draw, str, Records], Example], float] = {
    _one_value: 4.0,
    _fields_as_json: 4.0,
    _all_values: 1.2,
    _to_sentence: 1.2,
}
