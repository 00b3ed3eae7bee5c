"""What all messages have, and those that any actor may get."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages; array-like on the wire, tagged with the class name."""


# Finish codes, uint8, in StepOut.finish and Finished.reason.
GOES_ON, STOP_EOS, STOP_TOKEN, STOP_STRING, LENGTH, ABORTED, FAILED = range(7)


class Hello(Message, frozen=True):
    """First frame of every link, in both directions."""

    version: int
    spec_hash: str
    name: str


class Stop(Message, frozen=True):
    """Supervisor or shutdown coordinator -> any core: finish and stop."""

    reason: str = ""


class Failed(Message, frozen=True):
    """Supervisor -> whoever decides what next: an actor of this process ended with an error.

    state, message  in which it was, and what it was about to handle, as text
    """

    name: str
    state: str
    message: str
    error: str
