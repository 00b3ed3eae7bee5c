"""Questions on dictionary entries: with the entries in the prompt (two thirds), or from memory."""

from training.tasks import words
from training.tasks.corpus import Corpus, Entry
from training.tasks.draw import Draw, lines
from training.tasks.example import Example, reply, user
from training.tasks.wording import styled

DEFINE = lines(
    """What is {0}?
    Define {0}.
    What does {0} mean?
    Explain {0}.
    Meaning of {0}?
    Give the definition of {0}.
    {0} means what?
    Tell me what {0} is.
    How is {0} defined?
    What do people mean by {0}?"""
)
SYNONYM = lines(
    """Give a synonym of {0}.
    Which word means the same as {0}?
    Another word for {0}?
    Name a synonym for {0}.
    What else is {0} called?"""
)
KIND = lines(
    """What kind of thing is {0}?
    {0} is a kind of what?
    Which class of things does {0} belong to?
    Name the more general term for {0}.
    What sort of thing is {0}?"""
)
USE = lines(
    """Use {0} in a sentence.
    Give an example sentence with {0}.
    Write a sentence with {0}.
    Show how {0} is used.
    An example of {0}, please."""
)
CHOOSE = lines(
    """Which word means "{0}"?
    Which of these words means "{0}"?
    Choose the word for "{0}".
    What is the word for "{0}"?
    Find the word that means "{0}"."""
)
COMPUTING = lines(
    """What does {0} mean in computing?
    What is {0} in computing?
    Explain {0} as a computing term.
    In computing, what is {0}?
    Define the computing term {0}."""
)

# A small corpus may have no held-out word at all; an invented one is asked for then.
TRIES = 300


def generate(draw: Draw, kind: str, corpus: Corpus) -> Example:
    """One question. Without a corpus the entries are made up and always in the prompt."""
    open_book = draw.chance(0.67)
    source = draw.weighted({"wordnet": 6.0, "gcide": 2.5, "foldoc": 1.5})
    if corpus.entries and source not in corpus.entries:
        source = draw.pick(tuple(corpus.entries))
    entries, entry = _entries(draw, corpus, source)
    makers = {
        _meaning: 4.0,
        _synonym: 1.5 if entry.synonyms else 0.0,
        _kind_of: 1.5 if entry.kind_of else 0.0,
        _usage: 1.0 if entry.example else 0.0,
        _choice: 1.5 if len({other.word for other in entries}) > 1 else 0.0,
        _is_a: 1.0 if entry.kind_of else 0.0,
    }
    maker = draw.weighted(makers)
    request, answer, checker, expected = maker(draw, entry, entries)
    if open_book or entry.source == "invented":
        book = "\n\n".join(other.raw for other in entries)
        request = "\n\n".join((book, request) if draw.chance(0.7) else (request, book))
    elif maker in (_meaning, _usage):
        checker, expected = "f1", answer
    return Example(kind, [user(request)], reply(answer), checker, expected)


Asked = tuple[str, str, str, str | list[str]]
"""(request, answer, checker, expected)"""


def _entries(draw: Draw, corpus: Corpus, source: str) -> tuple[list[Entry], Entry]:
    """Up to five neighbouring entries, and the one to ask for; one word in 30 is kept for evaluation."""
    for _ in range(TRIES if corpus.entries else 0):
        entries = corpus.neighbours(draw, source, draw.integer(1, 5))
        entry = draw.pick(entries)
        if draw.allows(entry.word, 30):
            return entries, entry
    while True:
        entries = _invented(draw)
        entry = draw.pick(entries)
        if draw.allows(entry.word, 30):
            return entries, entry


def _meaning(draw: Draw, entry: Entry, entries: list[Entry]) -> Asked:
    pool = COMPUTING if entry.source == "foldoc" and draw.chance(0.6) else DEFINE
    request = styled(draw, draw.of(pool)).format(_named(draw, entry))
    return request, entry.meaning, "one_of", [other.meaning for other in entries if other.word == entry.word]


def _synonym(draw: Draw, entry: Entry, entries: list[Entry]) -> Asked:
    request = styled(draw, draw.of(SYNONYM)).format(_named(draw, entry))
    accepted = [synonym for other in entries if other.word == entry.word for synonym in other.synonyms]
    return request, entry.synonyms[0], "one_of", accepted


def _kind_of(draw: Draw, entry: Entry, entries: list[Entry]) -> Asked:
    request = styled(draw, draw.of(KIND)).format(_named(draw, entry))
    accepted = [other.kind_of for other in entries if other.word == entry.word and other.kind_of]
    return request, entry.kind_of, "one_of", accepted


def _usage(draw: Draw, entry: Entry, entries: list[Entry]) -> Asked:
    request = styled(draw, draw.of(USE)).format(_named(draw, entry))
    return request, entry.example, "text", entry.example


def _choice(draw: Draw, entry: Entry, entries: list[Entry]) -> Asked:
    """The word for a meaning, among up to four."""
    others = [other.word for other in entries if other.word != entry.word]
    choices = draw.shuffled([entry.word, *list(dict.fromkeys(others))[:3]])
    request = styled(draw, draw.of(CHOOSE)).format(entry.meaning)
    return f"{request}\nChoices: {', '.join(choices)}", entry.word, "one_of", [entry.word]


def _is_a(draw: Draw, entry: Entry, entries: list[Entry]) -> Asked:
    """Yes or no, by the kind that the entry names."""
    others = [other.kind_of for other in entries if other.kind_of and other.kind_of != entry.kind_of]
    truth = draw.chance(0.5) or not others
    kind = entry.kind_of if truth else draw.pick(others)
    question = draw.pick(("Is {0} a kind of {1}?", "Does {0} belong to {1}?", "{0}: is it a sort of {1}?"))
    answer = "yes" if truth else "no"
    return f"{question.format(_named(draw, entry), kind)} Answer yes or no.", answer, "one_of", [answer]


def _named(draw: Draw, entry: Entry) -> str:
    return f'"{entry.word}"' if draw.chance(0.5) else entry.word


def _invented(draw: Draw) -> list[Entry]:
    """Entries of words that don't exist."""
    found = []
    for _ in range(draw.integer(1, 5)):
        word, kind_of = words.invented_word(draw), draw.of(words.NOUNS)
        meaning = f"a {draw.of(words.ADJECTIVES)} {kind_of} for the {draw.of(words.NOUNS)}"
        raw = f"{word} (noun): {meaning}. Kind of: {kind_of}."
        found.append(Entry("invented", word, "noun", meaning, raw, kind_of=kind_of))
    return found
