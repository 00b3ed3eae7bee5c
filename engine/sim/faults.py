"""The points at which a run may be disturbed. Each says which seam of the shells it uses and what it does
there.

A new subsystem declares its own points here with `@fault`; scenarios name them; `replay --list-faults` lists
them with the scenarios that use them, and a point that no scenario reaches fails a test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import ConfigError, MailboxFull
from engine.messages import Abort, Signalled
from engine.sim.scenario import Fault, drawn

if TYPE_CHECKING:
    from engine.sim.world import World

Act = Callable[["World", Fault], None]


@dataclass(frozen=True, slots=True)
class Point:
    """One declared point.

    seam  where in the shells
    act   does it, at the fault's time; None: it is part of the workload or the bounds, which name it
    """

    name: str
    seam: str
    say: str
    act: Act | None = None


POINTS: dict[str, Point] = {}


def fault(name: str, seam: str) -> Callable[[Act], Act]:
    """Declares a point; the function's docstring says what happens."""

    def declare(act: Act) -> Act:
        POINTS[name] = Point(name, seam, (act.__doc__ or "").strip(), act)
        return act

    return declare


def inherent(name: str, seam: str, say: str) -> None:
    """Declares a point that clients or bounds reach by themselves."""
    POINTS[name] = Point(name, seam, say)


def point(kind: str) -> Point:
    """The point of this name. Raises ConfigError with those that can be chosen."""
    found = POINTS.get(kind)
    if found is None or found.act is None:
        known = ", ".join(name for name, one in POINTS.items() if one.act is not None)
        raise ConfigError(f"there is no fault {kind!r}; known: {known}")
    return found


@fault("rank_death", "children.Child.process")
def _rank_death(world: World, it: Fault) -> None:
    """The process of a rank is killed, between two of its instructions."""
    world.harm(it.kind)
    world.ranks[it.rank].kill()


@fault("device_error", "device.StepRunner.execute")
def _device_error(world: World, it: Fault) -> None:
    """The next step of a rank's device raises."""
    world.harm(it.kind)
    device = world.ranks[it.rank].device
    if device is not None:
        device.breaks = True


@fault("device_stall", "device.Device.submit")
def _device_stall(world: World, it: Fault) -> None:
    """The next step of a rank's device takes `for_s` longer; beyond the watchdog the rank is given up."""
    device = world.ranks[it.rank].device
    seconds = drawn(it.for_s)
    if seconds * 1000 > world.plan.bounds.watchdog_ms / 2:
        world.harm(it.kind)
    if device is not None:
        device.stall_s = seconds


@fault("slow_start", "rank_interface.Parts.load")
def _slow_start(world: World, it: Fault) -> None:
    """A rank takes `for_s` longer to load. At 0 s only."""
    world.load_s[it.rank] = drawn(it.for_s)
    if world.load_s[it.rank] * 1000 > world.plan.bounds.watchdog_ms / 2:
        world.harm(it.kind)


@fault("link_cut", "links.Link.stream")
def _link_cut(world: World, it: Fault) -> None:
    """The connection between api and a rank breaks, after `bytes` more bytes from the rank."""
    world.harm(it.kind)
    wire = world.ranks[it.rank].stream.far
    wire.cut_after = int(drawn(it.bytes))
    if wire.cut_after == 0:
        wire.cut()


@fault("link_slow", "links.Link.stream")
def _link_slow(world: World, it: Fault) -> None:
    """Everything between api and a rank takes `by_s` longer, for `for_s`."""
    wires = (world.ranks[it.rank].stream, world.ranks[it.rank].stream.far)

    def change(by_s: float) -> None:
        for wire in wires:
            wire.extra_s += by_s

    change(drawn(it.by_s))
    world.agenda.after(drawn(it.for_s), lambda: change(-drawn(it.by_s)))


@fault("link_rubbish", "wire.Codec.decode")
def _link_rubbish(world: World, it: Fault) -> None:
    """A frame that is no message arrives from a rank: it is reported and skipped."""
    world.ranks[it.rank].stream.far.inject(b"\x05\0\0\0\x00rubb")


@fault("exchange_slow", "rank.Peer")
def _exchange_slow(world: World, it: Fault) -> None:
    """What ranks tell each other takes `by_s` longer, for `for_s`."""
    by_s = drawn(it.by_s)
    world.exchange.extra_s += by_s

    def back() -> None:
        world.exchange.extra_s -= by_s

    world.agenda.after(drawn(it.for_s), back)


@fault("exchange_lost", "rank.Peer")
def _exchange_lost(world: World, it: Fault) -> None:
    """What a rank tells its peers is lost from now on: they stall and are given up."""
    world.harm(it.kind)
    world.exchange.lost.add(it.rank)


@fault("mailbox_full", "mailbox.Mailbox.tell")
def _mailbox_full(world: World, it: Fault) -> None:
    """`messages` aborts of unknown requests flood ingress at once; what is refused is refused by an error."""
    ingress = world.process.mailbox("ingress")
    for number in range(int(drawn(it.messages))):
        try:
            ingress.tell(Abort(-1 - number))
        except MailboxFull:
            world.crowded_until_s = world.now_s()
            return


@fault("wall_jump", "rank_interface.Parts.wall_s")
def _wall_jump(world: World, it: Fault) -> None:
    """The wall clock jumps by `by_s`, back where that is negative."""
    world.wall_offset_s += drawn(it.by_s)


@fault("clock_leap", "timers.Timers")
def _clock_leap(world: World, it: Fault) -> None:
    """The host sleeps for `by_s`: every clock leaps, and everything that was due is due at once."""
    if drawn(it.by_s) * 1000 > world.plan.bounds.watchdog_ms / 2:
        world.harm(it.kind)
    world.leap(drawn(it.by_s))


@fault("signal", "launch.Launcher.listen_to_signals")
def _signal(world: World, it: Fault) -> None:
    """The operator wants an end: the first drains, the second ends requests, the third kills."""
    world.signals += 1
    world.refuses_from(world.now_s())
    world.harm(it.kind, 0.0 if world.signals > 1 else world.plan.bounds.drain_s)
    world.process.mailbox("shutdown").tell(Signalled())


inherent(
    "client_dawdles", "api.handle.Group.take", "A client pauses between chunks; too long, and it is cut off."
)
inherent("client_leaves", "api.handle.Engine.close", "A client of the handle goes away before the end.")
inherent(
    "disconnect", "api.exchange.Exchange", "An HTTP client disconnects after any byte of body or answer."
)
inherent(
    "slow_reader", "api.exchange.Exchange.write", "An HTTP client's connection takes nothing for a while."
)
inherent(
    "row_failure",
    "device.StepDone.failed",
    "The sampling of one row fails; the request ends alone (`failing`).",
)
inherent("small_mailbox", "wiring.Wiring.mailbox", "A mailbox is smaller than in system.toml (`mailbox`).")
inherent("retraction", "planning.Planner", "Pages run out: a request gives its own back.")
inherent("deadline", "intake.Intake.check_deadlines", "A request isn't done within its deadline.")
