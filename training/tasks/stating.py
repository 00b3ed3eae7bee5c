"""Writes a text that states the values of fields: sentences, forms, lists, tables, log lines, mails."""

from collections.abc import Callable, Sequence

from training.tasks import words
from training.tasks.draw import Draw
from training.tasks.fields import PLACEHOLDER, Field

Form = Callable[[Draw, Sequence[Field]], str]


def state(draw: Draw, fields: Sequence[Field]) -> str:
    """A text that states every field, in their order."""
    if not fields:
        return ""
    choices = _CLEAR if any(isinstance(field.value.value, list) for field in fields) else FORMS
    if draw.heldout and draw.chance(0.25):
        return HELDOUT_FORMS[draw.pick(tuple(HELDOUT_FORMS))](draw, fields)
    return _CALLS[draw.weighted(choices)](draw, fields)


def fill_sentence(sentence: str, fields: Sequence[Field]) -> str:
    """The sentence of a topic with the shown values in it; units are in the sentence already."""
    shown = {field.name: field.value.shown for field in fields}
    return PLACEHOLDER.sub(lambda match: shown[match.group(1)], sentence)


def _label(draw: Draw, field: Field) -> str:
    return field.key if draw.chance(0.15) else field.label


def _lines(draw: Draw, fields: Sequence[Field]) -> str:
    start, middle = draw.pick((("", ": "), ("- ", ": "), ("* ", ": "), ("", " = "), ("- ", " - ")))
    upper = draw.chance(0.5)
    shown = []
    for field in fields:
        label = _label(draw, field)
        shown.append(f"{start}{_first_upper(label) if upper else label}{middle}{field.shown}")
    return "\n".join(shown)


def _inline(draw: Draw, fields: Sequence[Field]) -> str:
    between, middle = draw.pick(
        ((", ", ": "), ("; ", ": "), ("; ", " "), (", ", " "), (" | ", ": "), (" / ", ": "))
    )
    return between.join(f"{_label(draw, field)}{middle}{field.shown}" for field in fields)


def _equals(draw: Draw, fields: Sequence[Field]) -> str:
    head = draw.pick(("", "", "", f"{words.clock(draw)} INFO ", f"{words.date(draw)} "))
    return head + " ".join(f"{field.key}={_quoted(field.shown)}" for field in fields)


def _quoted(shown: str) -> str:
    return f'"{shown}"' if " " in shown and '"' not in shown else shown


def _sentences(draw: Draw, fields: Sequence[Field]) -> str:
    said = [_sentence(draw, field) for field in fields]
    return " ".join(f"{_first_upper(text)}." for text in said)


def _sentence(draw: Draw, field: Field) -> str:
    if field.value.flag:
        return f"it is {'' if field.value.value else 'not '}{field.label}"
    return f"{draw.pick(('the ', 'the ', 'its ', 'our '))}{field.label} is {field.shown}"


def _one_sentence(draw: Draw, fields: Sequence[Field]) -> str:
    said = [_sentence(draw, field) for field in fields]
    joined = said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}"
    return f"{_first_upper(joined)}."


def _with(draw: Draw, fields: Sequence[Field]) -> str:
    said = [
        f"{field.label} {field.shown}" if not field.value.flag else f"{field.label}: {field.shown}"
        for field in fields
    ]
    head = draw.pick(
        ("One with", "A new entry with", "This one has", "Item with", f"The {draw.of(words.NOUNS)} has")
    )
    return f"{head} {said[0] if len(said) == 1 else ', '.join(said[:-1]) + ' and ' + said[-1]}."


def _table(draw: Draw, fields: Sequence[Field]) -> str:
    names = [_label(draw, field) for field in fields]
    shown = [field.shown for field in fields]
    if draw.chance(0.4):
        return f"{','.join(names)}\n{','.join(shown)}"
    return f"| {' | '.join(names)} |\n| {' | '.join(shown)} |"


def _mail(draw: Draw, fields: Sequence[Field]) -> str:
    hello = draw.pick(("Hello,", "Hi,", "Dear team,", f"Hi {draw.of(words.FIRST)},"))
    end = draw.pick(("Regards", "Thanks", "Best", "Bye"))
    return f"{hello}\n{_one_sentence(draw, fields)}\n{end}, {draw.of(words.FIRST)}"


def _values_first(draw: Draw, fields: Sequence[Field]) -> str:
    return draw.pick((", ", "; ", "\n")).join(f"{field.shown} ({field.label})" for field in fields)


def _arrows(draw: Draw, fields: Sequence[Field]) -> str:
    return "\n".join(f"{field.label} -> {field.shown}" for field in fields)


def _told(draw: Draw, fields: Sequence[Field]) -> str:
    said = "; ".join(f"as {field.label} they gave {field.shown}" for field in fields)
    return f"I asked them: {said}."


_CALLS: dict[str, Form] = {
    "lines": _lines,
    "inline": _inline,
    "equals": _equals,
    "sentences": _sentences,
    "one sentence": _one_sentence,
    "with": _with,
    "table": _table,
    "mail": _mail,
    "values first": _values_first,
}
FORMS = {
    "lines": 4.0,
    "inline": 3.0,
    "equals": 1.5,
    "sentences": 3.0,
    "one sentence": 3.0,
    "with": 1.5,
    "table": 1.0,
    "mail": 1.0,
    "values first": 0.7,
}
# Lists hold commas and "and"; these forms keep their fields apart by other means.
_CLEAR = {"lines": 4.0, "sentences": 3.0}
HELDOUT_FORMS: dict[str, Form] = {"arrows": _arrows, "told": _told}


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]
