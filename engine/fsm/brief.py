"""Messages as one short line: fields that have their default value are left out."""

from __future__ import annotations

from typing import Any

import msgspec

LONGEST = 24  # Bytes that are shown.


def brief(value: Any) -> str:
    """The value's text for a run's listing; a struct is `Name(field=value)` with its defaults left out."""
    if isinstance(value, msgspec.Struct):
        shown = []
        for one in msgspec.structs.fields(value):
            content = getattr(value, one.name)
            if one.required or content != one.default:
                shown.append(f"{one.name}={brief(content)}")
        return f"{type(value).__name__}({', '.join(shown)})"
    if type(value) is tuple:
        return f"({', '.join(brief(item) for item in value)}{',' if len(value) == 1 else ''})"
    if isinstance(value, bytes):
        rest = f"..({len(value)} bytes)" if len(value) > LONGEST else ""
        return f"x{value[:LONGEST].hex()}{rest}"
    return repr(value)
