"""What must hold when a run is over: texts, fates, pages, queues, mailboxes, exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.actors.mailbox import Mailbox
from engine.actors.stops import first_match
from engine.config import PAGE_TOKENS
from engine.memory.pages import pages_for
from engine.messages import ABORTED, FAILED, LENGTH, STOP_EOS, STOP_STRING
from engine.sim.chain import EOS, FAILS, Expected, Rules, expected, prompt_of
from engine.sim.clients import LEFT, REFUSED, SERVED, Answer, Completion, entries_of
from engine.sim.ranks import SimulatedRank
from engine.sim.settings import served_of

if TYPE_CHECKING:
    from engine.sim.world import World

WORDS = {STOP_EOS: "stop", STOP_STRING: "stop", LENGTH: "length"}
SLOW, DEADLINE = 408, 500

PROBE_WITHIN_S = 1.0
FRESH_AFTER_S = 0.2
"""A rank that is up sends its first snapshot within a period and this."""

LATE_S = 1.5
"""A request may outlive its deadline by two ticks and this, with what the clock leaps meanwhile."""


def judge(world: World) -> None:
    """Tells the watch of everything that is wrong with the end of a run."""
    for answer in world.answers:
        _answer(world, answer)
    for name, ref in world.process.refs.items():
        if isinstance(ref, Mailbox) and len(ref):
            world.watch.wrong("I11", f"{len(ref)} messages are left in the mailbox of {name}")
    told, ended = world.ends.accepted, world.ends.ended
    for where in ("client", "ingress"):
        if told - ended[where]:
            missing = sorted(told - ended[where])
            world.watch.wrong("I11", f"{where}: requests {missing} have no terminal event")
    if world.process.failed:
        world.watch.wrong("crash", f"actors of the api process failed: {world.process.failed}")
    for rank in world.ranks:
        _rank(world, rank)
    _exit(world)
    _probes(world)


def _probes(world: World) -> None:
    """The health routes answer at once; ready only while every rank is up; fresh while nothing is wrong."""
    fresh_from_s = world.all_up_s + world.plan.bounds.snapshot_s + FRESH_AFTER_S
    for one in world.probes:
        done_s = one.at_s + one.took_s
        early = one.status == 200 and done_s < world.all_up_s
        quiet = fresh_from_s < one.at_s and done_s < min(world.refusing_s, world.failing_from_s())
        dead = quiet and one.status != 200 and "wall_jump" not in world.hits
        if one.status not in (200, 503) or one.took_s > PROBE_WITHIN_S or early or dead:
            world.watch.wrong("H1", f"{one}; every rank was up at {world.all_up_s} s")


def _rank(world: World, rank: SimulatedRank) -> None:
    core = rank.scheduler
    if core is None or rank.process.returncode != 0:
        return
    world.audits.audit(core, rank.name)
    held = core.requests.held
    if held.full.free != held.full.usable or held.window.free != held.window.usable or held.slot.any():
        world.watch.wrong("I10", f"{rank.name} has ended with pages or slots in hand")
    if any(core.requests.rows(group).size for group in ("waiting", "active", "ending")):
        world.watch.wrong("I11", f"{rank.name} has ended with requests in its queue")
    if rank.device is not None and rank.device.in_flight:
        world.watch.wrong("I8", f"{rank.name} has ended with {rank.device.in_flight} steps on its device")


def _exit(world: World) -> None:
    codes = [rank.process.returncode for rank in world.ranks]
    if None in codes:
        world.watch.wrong("I8", f"the server has closed; exit codes of the ranks: {codes}")
    if (world.launcher.exit_code != 0) != any(codes):
        world.watch.wrong("I8", f"exit code {world.launcher.exit_code}, of the ranks {codes}")
    if any(codes) and not world.harmful:
        world.watch.wrong("crash", f"ranks ended with {codes}; reports: {world.reports[-3:]}")


def _answer(world: World, answer: Answer) -> None:
    client = answer.client
    if answer.fate == REFUSED and not _may_be_refused(world, answer):
        world.watch.wrong("I15", f"{client} was refused: {answer.status} {answer.message}")
    if answer.fate not in (REFUSED, SERVED, LEFT, "failed"):
        world.watch.wrong("I11", f"{client} has the fate {answer.fate!r}: {answer.message}")
    if answer.fate == REFUSED:
        return
    rules = Rules(world.plan.bounds.eos, world.plan.bounds.failing)
    prompt = prompt_of(client.seed, client.prompt)
    for child, (entry, one) in enumerate(zip(entries_of(client), answer.completions, strict=True)):
        want = expected(prompt, entry.sampling, child, world.plan.bounds.context_tokens, rules)
        _completion(world, answer, child, one, want)
    late_s = answer.ended_s - answer.began_s - client.deadline_s - 2 * world.plan.bounds.snapshot_s
    is_held = client.deadline_s > 0 and client.kind == "handle" and not client.pause_s
    if is_held and late_s > LATE_S + world.leapt_s:
        world.watch.wrong("deadline", f"{client} ended {late_s:.3f} s too late")


def _completion(world: World, answer: Answer, child: int, one: Completion, want: Expected) -> None:
    client = answer.client
    text, stopped = text_of(world, want, client.stop)
    finish = STOP_STRING if stopped else want.finish
    where = f"child {child} of {client}"
    if not text.startswith(one.text):
        world.watch.wrong("I13", f"{where} got {one.text!r}, not a beginning of {text!r}")
    elif one.finish in (finish, WORDS.get(finish)):
        if one.text != text:
            world.watch.wrong("I13", f"{where} ended with {one.text!r} instead of {text!r}")
        if client.kind == "handle" and not stopped and tuple(one.tokens) != want.tokens:
            world.watch.wrong("I13", f"{where} got the tokens {one.tokens} instead of {want.tokens}")
    elif one.finish is None:
        if answer.fate == SERVED:
            world.watch.wrong("I11", f"{where} has no terminal event")
    elif one.finish not in (ABORTED, FAILED, "error"):
        world.watch.wrong("I6", f"{where} ended with {one.finish} instead of {finish}")
    elif not _may_fail(world, answer, one, want):
        world.watch.wrong("I15", f"{where} failed with {one.status}: {one.message}")


def text_of(world: World, want: Expected, stop: str) -> tuple[str, bool]:
    """The text that a client gets of these tokens, and whether a stop string ends it."""
    tokenizer = served_of(world.plan.bounds.context_tokens).tokenizer
    shown = [token for token in want.tokens if token != EOS]
    text = tokenizer.decode(shown)
    match = first_match(text, (stop,)) if stop else None
    # A request that fails ends before the characters that were never finished.
    if match is None and want.finish == FAILS:
        return text, False
    return (text, False) if match is None else (text[: match[0]], True)


def _may_be_refused(world: World, answer: Answer) -> bool:
    if world.refusing_s <= answer.ended_s or world.failing_from_s() <= answer.ended_s:
        return True
    if answer.client.kind != "handle" and _explained(world, answer):
        return True
    if answer.status == 503:
        crowded = bool(world.plan.bounds.mailbox) or world.crowded_until_s >= answer.began_s
        starting = answer.began_s <= world.all_up_s
        return crowded or starting
    return answer.status == 429 or (answer.status == 400 and bool(answer.client.rid))


def _explained(world: World, answer: Answer) -> bool:
    """An HTTP request that failed before its first byte has the status of its failure."""
    client, bounds = answer.client, world.plan.bounds
    if answer.status == SLOW:
        return bool(client.pause_s)
    if answer.status == 400:
        return _outgrows(client.prompt + client.tokens, bounds.full_pages - 1)
    rules = Rules(bounds.eos, bounds.failing)
    prompt = prompt_of(client.seed, client.prompt)
    return answer.status == 500 and any(
        expected(prompt, entry.sampling, entry.child, bounds.context_tokens, rules).finish == FAILS
        for entry in entries_of(client)
    )


def _may_fail(world: World, answer: Answer, one: Completion, want: Expected) -> bool:
    """Whether something in the scenario explains that this completion ended with an error."""
    client, bounds = answer.client, world.plan.bounds
    if world.failing_from_s() <= answer.ended_s or answer.fate == LEFT:
        return True
    if client.kind != "handle" and one.finish == "error":
        return True if client.pause_s else want.finish == FAILS or _sibling_fails(world, answer)
    if one.status == SLOW:
        return bool(client.pause_s)
    if want.finish == FAILS and one.status == 500:
        return True
    if client.deadline_s and one.status == DEADLINE and answer.ended_s - answer.began_s >= client.deadline_s:
        world.hit("deadline")
        return True
    if one.status == 429:
        return True
    return one.status == 400 and _outgrows(client.prompt + client.tokens, bounds.full_pages - 1)


def _sibling_fails(world: World, answer: Answer) -> bool:
    return _explained(world, Answer(answer.client, [], status=500)) or _explained(
        world, Answer(answer.client, [], status=400)
    )


def _outgrows(tokens: int, pages: int) -> bool:
    return pages_for(tokens) > pages and tokens > pages * PAGE_TOKENS
