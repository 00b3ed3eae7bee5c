"""Rules of form and honesty: few words, one word, capitals, a fixed ending, nothing invented."""

from collections.abc import Callable

from training.tasks import words
from training.tasks.draw import Draw, lines
from training.tasks.example import Example, Message, reply, system, user

UNKNOWN = "I don't know."
NOT_SAID = "The text doesn't say."
ENDINGS = ("OK", "Over.", "Done.", "Yours, Bot", "END", "That is all.")
RULES = lines(
    """Always end with "{0}".
    End every answer with "{0}".
    Each reply must end with "{0}".
    Finish all your answers with "{0}".
    The last words of every answer are "{0}".""",
    5,
)
ABSENT = lines(
    """Who owns the {0}?
    How old is {1}?
    Where does {1} live?
    What did {1} say about the {0}?
    How much does the {0} of {1} cost?
    When was {1} born?
    Which {0} does {1} like?
    What is the number of {1}?""",
    8,
)


def generate(draw: Draw, kind: str) -> Example:
    """One example of one rule."""
    return draw.weighted(MAKERS)(draw, kind)


def _few_words(draw: Draw, kind: str) -> Example:
    """At most so many words, from facts in the prompt."""
    noun, first, second, place = draw.of(words.NOUNS), *draw.several_of(words.ADJECTIVES, 2), words.city(draw)
    limit = draw.integer(3, 10)
    facts = f"The {noun} is {first} and {second}. It stands in {place}."
    full = [f"A {first} {noun}.", f"A {first}, {second} {noun}.", f"A {first}, {second} {noun} in {place}."]
    answer = max((text for text in full if len(text.split()) <= limit), key=len)
    request = draw.pick(
        (
            "Say this in at most {0} words.",
            "Sum up in no more than {0} words.",
            "Shorten to {0} words or fewer.",
        )
    )
    rule = {"max_words": limit, "contains": [first, noun]}
    return Example(kind, [user(f"{facts}\n\n{request.format(limit)}")], reply(answer), "rule", rule)


def _first_words(draw: Draw, kind: str) -> Example:
    """The first words of a text."""
    text = [draw.of(words.ADJECTIVES if i % 2 else words.NOUNS) for i in range(draw.integer(6, 20))]
    count = draw.integer(1, 5)
    request = draw.pick(("Give the first {0} words.", "Copy only the first {0} words."))
    answer = " ".join(text[:count])
    return Example(
        kind, [user(f"{request.format(count)}\n\n{' '.join(text)}")], reply(answer), "text", answer
    )


def _one_word(draw: Draw, kind: str) -> Example:
    """One word, out of a sentence."""
    noun, colour, place = draw.of(words.NOUNS), draw.of(words.COLOURS), words.city(draw)
    question, answer = draw.pick((("Which color is the {0}?", colour), ("Where is the {0}?", place)))
    text = f"The {colour} {noun} is in {place}. {question.format(noun)} Answer in one word."
    return Example(kind, [user(text)], reply(answer), "one_of", [answer])


def _capitals(draw: Draw, kind: str) -> Example:
    """Capitals only."""
    name, place, noun = words.person(draw), words.city(draw), draw.of(words.NOUNS)
    question, answer = draw.pick((("Who has the {0}?", name), ("Where is the {0}?", place)))
    rule = draw.pick(
        ("Answer only in capitals.", "Write the answer in capital letters.", "USE CAPITALS ONLY.")
    )
    text = f"{name} has a {noun} in {place}. {question.format(noun)}"
    messages = [system(rule), user(text)] if draw.chance(0.5) else [user(f"{text} {rule}")]
    return Example(kind, messages, reply(answer.upper()), "text", answer.upper())


def _not_said(draw: Draw, kind: str) -> Example:
    """A question on a fact that the text doesn't have."""
    noun, colour, place = draw.of(words.NOUNS), draw.of(words.COLOURS), words.city(draw)
    question = draw.pick(
        ("What does the {0} cost?", "Who made the {0}?", "How heavy is the {0}?", "How old is it?")
    )
    text = f"The {noun} is {colour} and stands in {place}.\n\n{question.format(noun)}"
    return Example(kind, [user(text)], reply(NOT_SAID), "one_of", [NOT_SAID, UNKNOWN])


def _unknown(draw: Draw, kind: str) -> Example:
    """A question without any data."""
    question = draw.of(ABSENT).format(draw.of(words.NOUNS), words.person(draw))
    return Example(kind, [user(question)], reply(UNKNOWN), "one_of", [NOT_SAID, UNKNOWN])


def _fixed_ending(draw: Draw, kind: str) -> Example:
    """A system rule that holds for the whole conversation."""
    ending = draw.pick(ENDINGS)
    messages: list[Message] = [system(draw.of(RULES).format(ending))]
    for _ in range(draw.integer(0, 2)):
        question, answer = _question(draw)
        messages += [user(question), reply(f"{answer} {ending}")]
    question, answer = _question(draw)
    rule = {"ends": ending, "contains": [answer.rstrip(".")]}
    return Example(kind, [*messages, user(question)], reply(f"{answer} {ending}"), "rule", rule)


def _question(draw: Draw) -> tuple[str, str]:
    if draw.chance(0.5):
        a, b = draw.integer(1, 20), draw.integer(1, 20)
        return f"What is {a} + {b}?", f"{a + b}."
    noun, colour = draw.of(words.NOUNS), draw.of(words.COLOURS)
    return f"The {noun} is {colour}. Which color is it?", f"{colour.capitalize()}."


MAKERS: dict[Callable[[Draw, str], Example], float] = {
    _few_words: 1.0,
    _first_words: 0.8,
    _one_word: 1.0,
    _capitals: 1.0,
    _not_said: 1.0,
    _unknown: 1.0,
    _fixed_ending: 1.2,
}
