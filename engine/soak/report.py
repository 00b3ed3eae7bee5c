"""The figures of a soak, the last judgements, and the summary for people."""

from __future__ import annotations

from typing import Any

from engine.soak.figures import quantile
from engine.soak.options import Outcome
from engine.soak.pace import BUSY_SHARE, REQUESTS_A_SECOND
from engine.soak.plan import FORMS
from engine.soak.samples import JUDGED_MINUTES

MOST_MIB_H = 1.0
"""A process may not grow faster."""


def judge(outcome: Outcome) -> None:
    """Violations that only the whole course shows: paths that didn't run, slow growth, too little load."""
    ledger, watch = outcome.ledger, outcome.watch

    def grown(name: str) -> float:
        return watch.newest.total(name) - watch.first.total(name)

    if watch.newest.total("spec_num_draft_tokens") and not grown("spec_accepted_tokens_total"):
        ledger.violate("path", "drafting is on, and no draft was accepted")
    if any(ledger.kinds[kind] for kind in FORMS) and not grown("num_so_requests_total"):
        ledger.violate("path", "structured output was asked for, and num_so_requests_total did not grow")
    if outcome.options.minutes < JUDGED_MINUTES or outcome.stopped_early:
        return
    for name, slope in outcome.samples.slopes().items():
        if slope is not None and slope > MOST_MIB_H:
            ledger.violate(
                "memory", f"{name} grows by {slope} MiB an hour, at most {MOST_MIB_H:g} are allowed"
            )
    for rank, share in busy_shares(outcome).items():
        if share < BUSY_SHARE:
            ledger.violate(
                "load", f"rank {rank} was busy for {share:.0%} of the time, {BUSY_SHARE:.0%} are the goal"
            )
    if per_hour(outcome) < REQUESTS_A_SECOND * 3600:
        ledger.violate("load", f"{per_hour(outcome):.0f} requests an hour, 20000 are the goal")


def busy_shares(outcome: Outcome) -> dict[str, float]:
    """Share of the looks in which each rank had running requests, rests included."""
    watch = outcome.watch
    return (
        {rank: round(count / watch.polls, 4) for rank, count in sorted(watch.busy.items())}
        if watch.polls
        else {}
    )


def per_hour(outcome: Outcome) -> float:
    """Requests, over the whole traffic; those of the warm-up don't count."""
    rows = outcome.samples.rows
    done = outcome.ledger.requests - rows[0]["requests"] if rows else 0
    return done / outcome.minutes * 60 if outcome.minutes else 0.0


def figures(outcome: Outcome) -> dict[str, Any]:
    """Of the JSON report."""
    ledger, watch, samples = outcome.ledger, outcome.watch, outcome.samples
    now, first = watch.newest, watch.first
    accepted = now.total("spec_accepted_tokens_total") - first.total("spec_accepted_tokens_total")
    verified = now.total("spec_verified_tokens_total") - first.total("spec_verified_tokens_total")
    settled = samples.settled()
    return {
        "minutes": round(outcome.minutes, 2),
        "stopped_early": outcome.stopped_early,
        "seed": outcome.options.seed,
        "requests_per_hour": round(per_hour(outcome)),
        "busy_share": busy_shares(outcome),
        "health_p99_ms": round(quantile(watch.health_s, 0.99) * 1e3, 2),
        "health_max_ms": round(max(watch.health_s, default=0.0) * 1e3, 2),
        "health_answers": len(watch.health_s),
        "latency_ms_p50": round(quantile(ledger.latencies_s, 0.5) * 1e3, 1),
        "latency_ms_p99": round(quantile(ledger.latencies_s, 0.99) * 1e3, 1),
        "acceptance": round(accepted / verified, 4) if verified else None,
        "memory_slope_mib_h": samples.slopes(),
        "memory_slope_of_minutes": round((settled[-1]["at_s"] - settled[0]["at_s"]) / 60, 1)
        if settled
        else 0.0,
        "memory_judged": outcome.options.minutes >= JUDGED_MINUTES and not outcome.stopped_early,
        "rests": outcome.rests,
        "bursts": outcome.bursts,
        "crowds": outcome.crowds,
        "canaries": outcome.canaries,
        "workers_replaced": watch.workers_replaced,
        "left_out": outcome.left_out,
        "exit_code": outcome.exit_code,
        **ledger.counts(),
        "samples": samples.rows,
    }


def summary(told: dict[str, Any]) -> str:
    """The figures in a few lines."""
    busy = ", ".join(f"rank {rank} {share:.0%}" for rank, share in told["busy_share"].items())
    slopes = ", ".join(f"{name} {slope}" for name, slope in told["memory_slope_mib_h"].items())
    judged = "" if told["memory_judged"] else f" (of {told['memory_slope_of_minutes']} minutes, not judged)"
    lines = [
        f"soak: {told['minutes']} minutes, {told['requests']} requests "
        f"({told['requests_per_hour']} an hour), {told['output_tokens']} tokens out, "
        f"{told['violations']} violations",
        f"  disconnects {told['disconnects']}, bad requests {told['bad_requests']}, queue full "
        f"{told['queue_full']}, bursts {told['bursts']}, crowds {told['crowds']}, rests {told['rests']}, "
        f"canaries {told['canaries']}",
        f"  busy: {busy or 'unknown'}; health p99 {told['health_p99_ms']} ms; answers p50 "
        f"{told['latency_ms_p50']} ms, p99 {told['latency_ms_p99']} ms; acceptance {told['acceptance']}",
        f"  memory, MiB an hour{judged}: {slopes}",
        f"  exit code of the server: {told['exit_code']}",
    ]
    lines += [f"  left out: {kind}: {why}" for kind, why in told["left_out"].items()]
    lines += [
        f"  VIOLATION at {one['at_s']} s: {one['what']}: {one['evidence'][:400]}"
        for one in told["violation_list"]
    ]
    return "\n".join(lines)
