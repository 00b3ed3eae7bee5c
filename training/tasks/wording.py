"""How people put a request: polite, terse, in lower case, with a typing error."""

from training.tasks.draw import Draw, lines

_POLITE = lines(
    """Please {0}
    Could you {0}
    {1} Thank you.
    {1} Thanks!
    Would you please {0}
    Hi! {1}
    Hello. {1}
    {1} Please.
    I need help: {0}""",
    9,
)


def styled(draw: Draw, text: str) -> str:
    """An instruction in one of several manners; the plain one is the most common."""
    manner = draw.random.random()
    if manner < 0.72:
        return text
    if manner < 0.84:
        polite = draw.of(_POLITE)
        if text.endswith("?") and "{0}" in polite:
            polite = "{1} Thanks!"
        return polite.format(text[:1].lower() + text[1:], text)
    if manner < 0.93:
        return text.lower()
    return _with_typo(draw, text)


def _with_typo(draw: Draw, text: str) -> str:
    """Two neighbouring letters swapped, or one left out."""
    spots = [i for i in range(1, len(text) - 1) if text[i].isalpha() and text[i + 1].isalpha()]
    if not spots:
        return text
    spot = draw.pick(spots)
    if draw.chance(0.5):
        return text[:spot] + text[spot + 1] + text[spot] + text[spot + 2 :]
    return text[:spot] + text[spot + 1 :]


SYSTEMS = lines(
    """You are a helpful assistant.
    You are a careful assistant. Answer briefly.
    You turn text into data.
    Answer with data only.
    You work in the office of a small company and fill in forms.
    Be exact and brief.
    You help people with short, exact answers. Never make facts up.
    You are a service. Your replies are read by a program.
    Use only what the user gives you.""",
    9,
)
