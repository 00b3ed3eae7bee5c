"""How two waiting messages of a type become one, for mailboxes with the policy `merge`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.actors.mailbox import Merge
from engine.errors import SpecError

NEWEST_OF: dict[str, str] = {"Snapshot": "rank", "Tick": ""}
"""Message type -> field that must be equal for the newer to replace the older; "": the type is enough."""


def merge_of(types: Sequence[str]) -> Merge:
    """The merge for these message types. Raises SpecError for a type that has no rule."""
    for name in types:
        if name not in NEWEST_OF:
            raise SpecError(f"no rule says how two {name} become one; known: {', '.join(NEWEST_OF)}")
    keys = {name: NEWEST_OF[name] for name in types}

    def merge(older: Any, newer: Any) -> Any:
        kind = type(newer).__name__
        if type(older) is not type(newer) or kind not in keys:
            return None
        field = keys[kind]
        return newer if not field or getattr(older, field) == getattr(newer, field) else None

    return merge
