"""Copy, reverse, sort, count and look up: the answer is in the prompt, often far back."""

import json
from collections.abc import Callable
from typing import Any

from training.tasks import sequence_wordings as ask
from training.tasks import words
from training.tasks.corpus import Corpus, no_corpus_texts
from training.tasks.draw import Draw, Pool
from training.tasks.example import Example, reply, user
from training.tasks.json_short import minified
from training.tasks.wording import styled

Made = tuple[str, str, str]
"""(request, data, answer)"""

ABSENT = "not found"


def generate(draw: Draw, kind: str, corpus: Corpus) -> Example:
    """One example; lengths are log-uniform, so that most are short and some reach 1,500 tokens."""
    maker = draw.weighted(MAKERS)
    request, data, answer = maker(draw, corpus)
    parts = [request, data] if draw.chance(0.6) else [data, request]
    return Example(kind, [user("\n\n".join(parts))], reply(answer), "text", answer)


def _asked(draw: Draw, pool: Pool, *values: object) -> str:
    """One wording, in some manner, with its values filled in unchanged."""
    return styled(draw, draw.of(pool)).format(*values)


def _copy(draw: Draw, corpus: Corpus) -> Made:
    return _asked(draw, ask.COPY), (text := _text(draw, corpus)), text


def _copy_data(draw: Draw, corpus: Corpus) -> Made:
    form = draw.integer(0, 3)
    if form == 0 and corpus.json_texts:
        text = draw.pick(corpus.json_texts)[: draw.log_uniform(60, 1500)].rstrip()
    elif form == 1:
        text = "\n".join(" | ".join(row) for row in _rows(draw, draw.log_uniform(2, 12)))
    elif form == 2:
        text = " ".join(words.code(draw) for _ in range(draw.log_uniform(1, 30)))
    else:
        text = " ".join(words.invented_word(draw) for _ in range(draw.log_uniform(1, 80)))
    return _asked(draw, ask.COPY), text, text


def _copy_changed(draw: Draw, corpus: Corpus) -> Made:
    """Copy with one change: a line left out, or a name replaced."""
    items = _items(draw, draw.log_uniform(3, 30))
    if draw.chance(0.5):
        number = draw.integer(1, len(items))
        request = draw.pick(("Copy the list without line {0}.", "Delete line {0}.", "Leave out line {0}."))
        return (
            styled(draw, request).format(number),
            "\n".join(items),
            "\n".join(items[: number - 1] + items[number:]),
        )
    old, new = draw.pick(items), words.invented_word(draw)
    request = draw.pick(
        ('Replace "{0}" by "{1}".', 'Copy the list, but write "{1}" for "{0}".', "Change {0} to {1}.")
    )
    return (
        request.format(old, new),
        "\n".join(items),
        "\n".join(new if item == old else item for item in items),
    )


def _reverse(draw: Draw, corpus: Corpus) -> Made:
    return _listing(
        draw, _asked(draw, ask.REVERSE), items := _items(draw, draw.log_uniform(2, 40)), items[::-1]
    )


def _sort_words(draw: Draw, corpus: Corpus) -> Made:
    items = _items(draw, draw.log_uniform(2, 20))
    return _listing(draw, _asked(draw, ask.SORT_WORDS), items, sorted(items))


def _sort_numbers(draw: Draw, corpus: Corpus) -> Made:
    items = [draw.integer(0, draw.pick((20, 99, 999))) for _ in range(draw.log_uniform(2, 20))]
    return _listing(
        draw, _asked(draw, ask.SORT_NUMBERS), list(map(str, items)), list(map(str, sorted(items)))
    )


def _unique(draw: Draw, corpus: Corpus) -> Made:
    some = _items(draw, draw.log_uniform(2, 12))
    items = some + [draw.pick(some) for _ in range(draw.integer(1, len(some)))]
    items = draw.shuffled(items)
    return _listing(draw, _asked(draw, ask.UNIQUE), items, list(dict.fromkeys(items)))


def _count(draw: Draw, corpus: Corpus) -> Made:
    items = _items(draw, draw.log_uniform(2, 25))
    request, data, _ = _listing(draw, _asked(draw, ask.COUNT), items, [])
    return request, data, str(len(items))


def _lookup(draw: Draw, corpus: Corpus) -> Made:
    """A key among 3 to 160 pairs; one key in fifteen isn't there."""
    keys = list(dict.fromkeys(_key(draw) for _ in range(draw.log_uniform(3, 160))))
    pairs = {key: _word_or_number(draw) for key in keys}
    wanted = draw.pick(keys)
    if draw.chance(0.07):
        answer = ABSENT
        del pairs[wanted]
    else:
        answer = pairs[wanted]
    middle = draw.pick((": ", " = ", " -> ", "\t"))
    data = "\n".join(f"{key}{middle}{value}" for key, value in pairs.items())
    if draw.chance(0.2):
        data = minified(pairs)
    request = _asked(draw, ask.LOOKUP, wanted)
    return (
        f'{request} If it is missing, say "{ABSENT}".' if answer == ABSENT or draw.chance(0.1) else request,
        data,
        answer,
    )


def _several(draw: Draw, corpus: Corpus) -> Made:
    """Several keys at once, answered as JSON."""
    pairs = {_key(draw): _word_or_number(draw) for _ in range(draw.log_uniform(5, 60))}
    wanted = draw.some(list(pairs), draw.integer(2, 3))
    request = draw.pick(
        ("Return JSON with the values of {0}.", "Look up {0}. Answer as JSON.", "{0} as JSON, please.")
    )
    data = "\n".join(f"{key}: {value}" for key, value in pairs.items())
    return (
        styled(draw, request).format(" and ".join(wanted)),
        data,
        minified({key: pairs[key] for key in wanted}),
    )


def _nth(draw: Draw, corpus: Corpus) -> Made:
    items = _items(draw, draw.log_uniform(3, 40))
    number = draw.integer(1, len(items))
    data = (
        "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1)) if draw.chance(0.6) else "\n".join(items)
    )
    return _asked(draw, ask.NTH, number), data, items[number - 1]


def _quote(draw: Draw, corpus: Corpus) -> Made:
    """A sentence by one of its words that occurs in no other sentence."""
    while True:
        text = " ".join(_paragraph(draw, corpus) for _ in range(draw.integer(1, 3)))
        sentences = [part.strip() + "." for part in text.rstrip(".").split(". ")]
        wanted = draw.pick(sentences)
        rare = [
            word
            for word in wanted.rstrip(".").split()
            if word.isalpha() and len(word) > 3 and text.count(word) == 1
        ]
        if rare:
            return _asked(draw, ask.QUOTE, draw.pick(rare)), " ".join(sentences), wanted


def _json_layout(draw: Draw, corpus: Corpus) -> Made:
    value: Any = {
        row[0]: row[1:] if draw.chance(0.4) else row[1] for row in _rows(draw, draw.log_uniform(1, 8))
    }
    compact, indented = minified(value), json.dumps(value, ensure_ascii=False, indent=2)
    if draw.chance(0.5):
        return _asked(draw, ask.COMPACT), indented, compact
    return _asked(draw, ask.INDENT), compact, indented


def _listing(draw: Draw, request: str, items: list[str], answer: list[str]) -> Made:
    """Items over several lines or on one, answered in the same form."""
    between = draw.pick(("\n", "\n", ", ", " "))
    return request, between.join(items), between.join(answer)


def _items(draw: Draw, count: int) -> list[str]:
    """Different words of one sort; invented ones half of the time."""
    if draw.chance(0.5):
        return list(dict.fromkeys(words.invented_word(draw) for _ in range(count)))
    pool = draw.pick((words.NOUNS, words.FOODS, words.FIRST, words.CITIES, words.LAST, words.VOCABULARY))
    return draw.several_of(pool, min(count, len(pool) // 2))


def _key(draw: Draw) -> str:
    return draw.pick((words.code, words.invented_word, words.proper_name))(draw)


def _word_or_number(draw: Draw) -> str:
    return str(draw.integer(0, 9999)) if draw.chance(0.4) else words.proper_name(draw)


def _rows(draw: Draw, count: int) -> list[list[str]]:
    width = draw.integer(2, 4)
    return [
        [words.invented_word(draw), *(_word_or_number(draw) for _ in range(width - 1))] for _ in range(count)
    ]


def _paragraph(draw: Draw, corpus: Corpus) -> str:
    return draw.pick(corpus.paragraphs) if corpus.paragraphs else no_corpus_texts(draw, words.NOUNS)


def _text(draw: Draw, corpus: Corpus) -> str:
    """A paragraph, or the first sentences of one."""
    text = _paragraph(draw, corpus)
    if draw.chance(0.5):
        text = text.split(". ")[0].rstrip(".") + "."
    return text


MAKERS: dict[Callable[[Draw, Corpus], Made], float] = {
    _copy: 3.0,
    _copy_data: 3.0,
    _copy_changed: 1.5,
    _reverse: 1.5,
    _sort_words: 1.0,
    _sort_numbers: 1.0,
    _unique: 0.8,
    _count: 0.5,
    _lookup: 3.5,
    _several: 1.5,
    _nth: 1.2,
    _quote: 1.0,
    _json_layout: 1.5,
}
