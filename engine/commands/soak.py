"""`python -m engine soak`: mixed load on a real server with live invariants and a report."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import orjson

from engine.config import NANO, Settings
from engine.config_sources import add_flags, resolve
from engine.errors import ConfigError
from engine.soak.conduct import Soak
from engine.soak.options import Options, Outcome, kinds_of, within_limits
from engine.soak.page import page
from engine.soak.report import figures, judge, summary
from engine.soak.server import HOST, ROOM, SERVE, Server, free_port, has_draft, log_folder, vocabulary_of

CLEAN, VIOLATED, REFUSED = 0, 1, 2
"""Exit codes: nothing found; something found; the soak couldn't begin."""

DESCRIPTION = """\
Starts `serve` (two CPU ranks of the shipped model, row-invariant, with drafts where the checkpoint has them),
sends seeded traffic of every kind for some minutes, watches what must always hold, ends the server with
SIGTERM, and reports. With --url it uses a server of this host that runs already, whose only client it must
be, and leaves it running. Ctrl-C ends it early, with a report.

Exit status: 0 all well, 1 a violation, 2 it could not begin.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `soak`."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--minutes", type=float, default=60.0, help="of traffic, after the warm-up (default 60)")
    add("--seed", type=int, default=0, help="of the traffic's plan (default 0)")
    add("--clients", type=int, default=8, help="at once (default 8)")
    add("--kinds", default="", metavar="A,B", help="only these kinds of requests; default: all")
    add("--server-flags", default="", metavar="FLAGS", help="more flags for the server, in one string")
    add("--url", default="", help="a server of this host that runs already")
    add("--model-path", default=str(NANO), help="the server's checkpoint (default: the shipped one)")
    add("--log", type=Path, metavar="FILE", help="with --url: the server's log, to be watched for errors")
    add("--work-s", type=float, default=60.0, help="seconds of traffic between two rests (default 60)")
    add("--rest-s", type=float, default=3.0, help="seconds of a rest (default 3)")
    add("--sample-s", type=float, default=30.0, help="seconds between two samples (default 30)")
    add("--json", type=Path, metavar="FILE", help="also write the report as JSON")
    add("--html", type=Path, metavar="FILE", help="also write it as a page with plots")


def run(args: argparse.Namespace, command: Sequence[str] = SERVE) -> int:
    """Does it; 0, 1 or 2 as the description says.

    command  what starts the server
    """
    try:
        outcome = soaked_url(args) if args.url else soaked_child(args, command)
    except (ConfigError, BaseExceptionGroup) as error:
        cause = leaf(error)
        if not isinstance(cause, ConfigError):
            raise
        print(f"soak: {cause}", file=sys.stderr)
        return REFUSED
    judge(outcome)
    report = reported(outcome)
    print(summary(report["figures"]))
    if args.json:
        args.json.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2) + b"\n")
    if args.html:
        args.html.write_text(page(report))
    return VIOLATED if outcome.ledger.violation_count else CLEAN


def leaf(error: BaseException) -> BaseException:
    """The first error inside groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def options_of(args: argparse.Namespace, **more: Any) -> Options:
    """The soak that these flags ask for. raises ConfigError"""
    if args.minutes <= 0 or args.clients < 1 or min(args.work_s, args.sample_s) <= 0 or args.rest_s < 0:
        raise ConfigError(
            "--minutes, --clients, --work-s and --sample-s must be positive, --rest-s not negative"
        )
    return Options(
        minutes=args.minutes, seed=args.seed, clients=args.clients, kinds=tuple(kinds_of(args.kinds)),
        work_s=args.work_s, rest_s=args.rest_s, sample_s=args.sample_s,
        vocabulary=vocabulary_of(args.model_path), **more,
    )  # fmt: skip


def soaked_url(args: argparse.Namespace) -> Outcome:
    """The soak of a server that runs already. raises ConfigError"""
    server = Server(args.url, args.log)
    server.find()
    return anyio.run(Soak(server, options_of(args)).run, backend_options={"use_uvloop": True})


def soaked_child(args: argparse.Namespace, command: Sequence[str]) -> Outcome:
    """The soak of a server that is started here, and its end. raises ConfigError"""
    drafts = ["--speculative-algorithm", "DSPARK"] if has_draft(args.model_path) else []
    flags = ["--model-path", args.model_path, "--dp-size", "2", "--deterministic", *drafts, *ROOM]
    with log_folder() as folder:
        flags += ["--grammar-cache-dir", f"{folder}/grammars", *shlex.split(args.server_flags)]
        settings = settings_of(flags)
        options = within_limits(
            options_of(args, repeatable=repeatable(settings), prefix=settings.metrics_prefix),
            settings.max_running_requests, settings.max_queued_requests, settings.dp_size, settings.max_n,
        )  # fmt: skip
        server = Server(f"http://{HOST}:{free_port()}")
        try:
            server.start(flags, command, Path(folder))
            soak = Soak(server, options)
            outcome = anyio.run(soak.run, backend_options={"use_uvloop": True})
            outcome.exit_code, left = server.stop(soak.watch.mapped)
            ended_wrong(outcome, server, left)
        finally:
            server.kill()
    return outcome


def repeatable(settings: Settings) -> bool:
    """Whether a seed alone decides a sampled text."""
    return settings.deterministic


def ended_wrong(outcome: Outcome, server: Server, left: list[str]) -> None:
    """The server's end must be clean, to the last line of its log."""
    if outcome.exit_code:
        outcome.ledger.violate("end", f"exit code {outcome.exit_code}: {server.tail()[-1000:]}")
    for what in left:
        outcome.ledger.violate("end", f"left: {what}")
    for line in server.wrong_lines():
        outcome.ledger.violate("log", line)


def settings_of(flags: Sequence[str]) -> Settings:
    """What the server makes of its flags. raises ConfigError"""
    parser = argparse.ArgumentParser(prog="--server-flags", exit_on_error=False)
    add_flags(parser)
    try:
        given, unknown = parser.parse_known_args(list(flags))
    except argparse.ArgumentError as error:
        raise ConfigError(f"--server-flags: {error}") from error
    if unknown:
        raise ConfigError(f"--server-flags: {' '.join(unknown)} are no flags of serve")
    return resolve(given)[0]


def reported(outcome: Outcome) -> dict[str, Any]:
    """The report, in the form of the benchmarks'."""
    from bench.run import commit, machine

    return {
        "name": "soak",
        "command": "python -m engine " + shlex.join(sys.argv[1:]),
        "machine": machine(),
        "commit": commit(),
        "figures": figures(outcome),
    }
