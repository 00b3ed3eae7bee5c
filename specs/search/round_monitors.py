"""What is watched from outside in the searches of rounds."""

from __future__ import annotations

from typing import Any

from specs.search.round import run_of


def committed_is_plain_decoding(world: Any) -> bool:
    """I13, greedy: what is committed, and the anchor behind it, is what plain decoding gives."""
    for core in world.cores.values():
        for slot, cache in core.caches.items():
            length = int(core.lengths[slot])
            if core.waits == "step" and length:
                request = world.environment.requests[core.number, slot][int(core.generations[slot]) - 1]
                run = run_of(slot, int(core.generations[slot]), request.prompt, length + 1)
                if [*cache[:length], core.anchors[slot]] != run:
                    return False
    return True


def retained_is_plain_decoding(world: Any) -> bool:
    """I13, and the lengths of device and host agree as long as the request goes on."""
    return world.environment.faulty not in ("I13", "lengths")


def nothing_after_the_end(world: Any) -> bool:
    """I6: nothing is kept of a group whose grammar had ended."""
    return bool(world.environment.faulty != "I6")


def everyone_takes_part(world: Any) -> bool:
    """I9: ranks meet at the forward of the same step, idle ones included."""
    return bool(world.environment.faulty != "I9")


def injected_once_and_in_order(world: Any) -> bool:
    """The ring has each committed row once, in order, and no rejected one."""
    for core in world.cores.values():
        for slot, ring in core.ring.items():
            generation = int(core.generations[slot])
            places = [at for at, _ in ring]
            run = run_of(
                slot, generation, world.environment.requests[core.number, slot][generation - 1].prompt, 20
            )
            if places != sorted(set(places)) or any(run[at] != token for at, token in ring):
                return False
    return True


def matchers_have_what_is_retained(world: Any) -> bool:
    """I1, at the end of a run: each matcher advanced once over each token that was kept."""
    rest = world.environment
    for key, matcher in rest.matchers.items():
        request = rest.requests[key][matcher.generation - 1]
        ends = min(request.eos_at or request.ends_at, request.ends_at)
        if request.constrained and matcher.length != ends:
            return False
    return True


def every_request_has_ended(world: Any) -> bool:
    """At the end of a run: each request of each slot was served to its end."""
    rest = world.environment
    return all(place.number == len(rest.requests[key]) for key, place in rest.places.items())
