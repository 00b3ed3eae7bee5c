"""Formats that are enforced, each as a pattern of texts that surely have it.

A pattern may allow less than its standard does, never more. Names that are hints by custom are not enforced.
"""

from __future__ import annotations

from engine.grammar.gate import pattern
from engine.grammar.gate.tree import Tree

_LONG_MONTH = r"(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
_SHORT_MONTH = r"(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
_MONTH_DAY = rf"(?:{_LONG_MONTH}|{_SHORT_MONTH}|02-(?:0[1-9]|1\d|2[0-8]))"
_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = rf"(?:(?:000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d{{3}})-{_MONTH_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_DURATION_TIME = r"T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)"
_DURATION_DATE = r"(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)"
_DURATION = rf"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|\d+W)"
# Few and short parts: each place in a bounded part costs a mask, and the standards bound all of them.
_LABEL = r"[A-Za-z0-9]{1,20}(?:-[A-Za-z0-9]{1,20})?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,2}}"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,24}"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM})?@{_LABEL}(?:\.{_LABEL}){{1,2}}"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_PIECE = r"[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [rf"(?:{_PIECE}:){{7}}{_PIECE}", rf"(?:{_PIECE}:){{1,7}}:", r"::", rf"::{_PIECE}(?::{_PIECE}){{0,6}}"]
    + [rf"(?:{_PIECE}:){{{n}}}(?::{_PIECE}){{1,{7 - n}}}" for n in range(1, 7)]
)
_PATH_CHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_TAIL = rf"(?:/{_PATH_CHAR}*)*(?:\?(?:{_PATH_CHAR}|[/?])*)?(?:#(?:{_PATH_CHAR}|[/?])*)?"
_AUTHORITY = r"[A-Za-z0-9]+(?:[.-][A-Za-z0-9]+)*(?::\d{1,5})?"
_URI = rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{_AUTHORITY}{_TAIL}|{_PATH_CHAR}+{_TAIL})"
_REFERENCE = rf"(?:{_URI}|/(?:{_PATH_CHAR}+{_TAIL})?|[A-Za-z0-9._~-]+{_TAIL})"
_UUID = r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"
_BASE64 = r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"

PATTERNS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": _HOST,
    "idn-hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _URI,
    "iri": _URI,
    "uri-reference": _REFERENCE,
    "iri-reference": _REFERENCE,
    "uri-template": r"(?:[A-Za-z0-9._~/?#&=:-]|%[0-9A-Fa-f]{2}|\{[A-Za-z0-9_]+\})*",
    "uuid": _UUID,
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9]\d*)(?:#|{_POINTER})",
    "byte": _BASE64,
    "base64": _BASE64,
}
"""Name -> what the whole text is."""

HINTS = frozenset(
    {
        "int32",
        "int64",
        "float",
        "double",
        "decimal",
        "password",
        "binary",
        "markdown",
        "html",
        "text",
        "string",
    }
)
"""Customary names that say how a value is shown or stored, not which values are allowed."""


def format_tree(name: str) -> Tree | None:
    """The whole-text tree of a format; None for one that isn't enforced."""
    found = PATTERNS.get(name)
    return None if found is None else pattern.parse(f"^(?:{found})$")
