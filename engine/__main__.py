"""`python -m engine COMMAND`: argument parsing only. A command's module is imported only when it runs."""

from __future__ import annotations

import argparse
import importlib
import sys

COMMANDS = {
    "serve": ("engine.commands.serve", "serve a model over HTTP"),
    "generate": ("engine.commands.generate", "prompts in, text out, without HTTP"),
    "check": ("engine.commands.check", "load and search every state machine; non-zero on any violation"),
    "diagrams": ("engine.fsm.diagrams", "write the diagrams of specs/, or compare them"),
    "docs": ("engine.commands.docs", "write the pages of docs/operations that are made from the code"),
    "replay": ("engine.commands.replay", "the whole engine in virtual time, with faults, from two seeds"),
    "bench": ("bench.run", "run a benchmark and print its figures"),
    "soak": ("engine.commands.soak", "mixed load on a real server with live invariants and a report"),
    "rank": ("engine.commands.rank", "one rank's process; started by serve"),
}


def parser_for(name: str) -> argparse.ArgumentParser:
    """The parser of one command; its module says which arguments."""
    module, say = COMMANDS[name]
    parser = argparse.ArgumentParser(prog=f"python -m engine {name}", description=say)
    importlib.import_module(module).add_arguments(parser)
    return parser


def main(argv: list[str]) -> int:
    """Runs the command that argv names; returns the exit code."""
    overview = argparse.ArgumentParser(
        prog="python -m engine",
        description="An LLM serving engine for the DeepSeek-V4 family.",
        epilog="`python -m engine COMMAND --help` explains a command's flags.",
    )
    commands = overview.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, say) in COMMANDS.items():
        commands.add_parser(name, help=say, add_help=False)
    chosen, rest = overview.parse_known_args(argv[:1])[0].command, argv[1:]
    args = parser_for(chosen).parse_args(rest)
    return int(importlib.import_module(COMMANDS[chosen][0]).run(args))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
