"""Why a grammar is refused: always with the place in what the client sent."""

from __future__ import annotations

from engine.errors import BadRequest

CODE = "unsupported_grammar"


class GrammarRefused(BadRequest):
    """What a client asks can't be enforced, or isn't well formed.

    param  the field of the request, such as `response_format` or `sampling_params.regex`
    path   JSON pointer inside a schema or a tag, "" for its root; a position for other texts
    """

    def __init__(self, why: str, path: str = "", param: str | None = None) -> None:
        where = f"{param or 'grammar'}{f' at {path}' if path else ''}"
        super().__init__(f"{where}: {why}", param, CODE)
        self.why = why
        self.path = path

    def within(self, param: str, path: str = "") -> GrammarRefused:
        """The same refusal for a field of a request; `path` leads from the field to the refused text."""
        return GrammarRefused(self.why, path + self.path, param)
