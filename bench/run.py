"""`python -m engine bench NAME`: runs a benchmark, prints its figures, and keeps them as JSON where asked."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson

from bench.parts import last_line
from engine.config import NANO

NAMES = {
    "machine": "the compiled table against the library, one event",
    "mailbox": "tells, asks, links and the device thread",
    "exchange": "two ranks of a host tell each other their wants, against gloo",
    "device": "greedy answers on an NVIDIA device: recorded steps and drafts on and off",
    "descriptors": "memory of one process in another one by descriptors; with --device cuda of two GPUs",
    "offline": "the engine against transformers on the same weights, token for token",
    "serve": "a server under load: throughput, time to first token and between tokens",
    "cuda": "the model on an NVIDIA device against itself on the CPU",
    "kernels": "each Triton kernel at V4-Flash's shapes against its floor and a library, on an NVIDIA device",
    "ranks": "two ranks with shared experts against one rank, logit by logit",
    "nano": "what the shipped model can do",
    "cost-table": "what steps cost by requests and rows; saved for servers of this machine and model",
    "lossless": "greedy text with drafts is that of plain decoding, token for token",
    "grammar": "answers constrained by schemas: all valid, and throughput against free text",
    "grammar-fuzz": "nearly right schemas, patterns, grammars and tags through gate and compiler, judged",
    "grammar-wait": "what other streams notice while grammars compile: gaps between tokens, against none",
    "lifecycle": "a killed rank to its client's error, a signal to the exit, probes under full load",
    "step": "a whole forward at V4-Flash's widths against its floor, on one or two NVIDIA devices",
    "traffic": "several ranks as one engine against one rank alone, answer for answer",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's name, where its JSON goes, and the benchmark's own flags."""
    parser.add_argument("name", choices=sorted(NAMES), help="; ".join(f"{k}: {v}" for k, v in NAMES.items()))
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--model-path", default=str(NANO), help="the shipped small model by default")
    parser.add_argument("--against", default="", help="offline: the peer to compare with, `transformers`")
    parser.add_argument(
        "--server-flags", default="", metavar="FLAGS", help="more flags for the server, in one string"
    )
    parser.add_argument(
        "--speculative",
        default="",
        choices=("", "both", "dspark"),
        help="offline: both, with drafts against without; grammar: dspark, with drafts",
    )
    parser.add_argument(
        "--concurrency", type=int, default=1, help="offline, grammar: requests at a time (default 1)"
    )
    parser.add_argument(
        "--verify-mode",
        default="compact",
        choices=("static", "cap-accept", "compact"),
        help="offline: of drafts",
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="step; descriptors; offline")
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="offline, with drafts"
    )
    parser.add_argument("--prompts", type=int, default=200, help="lossless: how many (default 200)")
    parser.add_argument("--tokens", type=int, default=200, help="lossless: of each answer (default 200)")
    parser.add_argument("--requests", type=int, default=10_000, help="traffic: how many (default 10000)")
    add_step_arguments(parser)
    parser.add_argument("--minutes", type=float, default=10.0, help="grammar-fuzz: how long (default 10)")
    parser.add_argument("--seed", type=int, default=1, help="grammar-fuzz: of its cases (default 1)")
    parser.add_argument(
        "--quick", action="store_true", help="fewer repetitions, for a smoke test; not for quoting"
    )


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `step` alone."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",") if part]

    parser.add_argument("--layers", type=int, default=0, help="step: of the geometry; 0 for all")
    parser.add_argument(
        "--ranks", type=int, default=0, help="step: 1 or 2; 0 for as many as there are devices"
    )
    parser.add_argument("--kv-cache-dtype", default="auto", help="step: what caches hold, as in serve")
    parser.add_argument("--geometry", default="", help="step: folder of a config.json; V4-Flash on a device")
    parser.add_argument(
        "--kernels", default="", choices=("", "native", "torch", "triton"), help="step: as of serve"
    )
    parser.add_argument(
        "--batches", type=numbers, default=[1, 16, 64], help="step: requests a rank (default 1,16,64)"
    )
    parser.add_argument(
        "--contexts", type=numbers, default=[1024, 65536], help="step: tokens (default 1024,65536)"
    )
    parser.add_argument(
        "--collectives",
        action="store_true",
        help="step: experts' rows go by collectives also where devices reach each other's memory",
    )
    parser.add_argument(
        "--within-s",
        type=float,
        default=0.0,
        help="step, kernels, device: seconds after which no part begins any more; 0: no limit",
    )
    parser.add_argument(
        "--chunks", type=numbers, default=[2048], help="step: rows of a prompt's chunk (default 2048)"
    )


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(models, platform.processor()),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **_devices(),
    }


def _devices() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {"gpus": []}
    return {"gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]}


def commit() -> str:
    """The commit that was measured; `-dirty` where files differ from it, empty outside a repository."""
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True, check=False
    )
    return told.stdout.strip()


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; its module's `run(args)` returns the figures.

    A benchmark that goes on behind parts that failed has "failures", by name: they are printed last, and the
    exit code is 1.
    """
    figures = importlib.import_module(f"bench.{args.name.replace('-', '_')}").run(args)
    report = {
        "name": args.name,
        "command": "python -m engine " + shlex.join(sys.argv[1:]),
        "machine": machine(),
        "commit": commit(),
        "figures": figures,
    }
    text = orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY)
    print(text.decode())
    if args.json:
        args.json.write_bytes(text + b"\n")
    failed = figures.get("failures", {})
    for name, why in failed.items():
        print(f"failed: {name}: {last_line(why)}")
    return 1 if failed else 0
