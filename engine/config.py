"""Every setting of a server, with its unit, its default and the flag that sets it.

`Settings` is the one place that knows defaults; flags, variables and keys of files are made from its fields
in `engine/config_sources.py`, so none of them can exist without a field, nor a field without a help text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from engine.errors import ConfigError

PAGE_TOKENS = 256
"""Tokens of one logical page; fixed by the cache layout (256 window, 64 c4, 2 c128 rows)."""

MOST_TOPS = 255
"""Counts of top logprobs travel as bytes."""

NANO = Path(__file__).parent / "assets" / "nano"
"""The model that ships with the package."""


def _flag(default: Any, say: str, *names: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"say": say, "names": names, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of one server. Sizes in tokens or requests, times in seconds."""

    model_path: str = _flag(str(NANO), "checkpoint folder; the shipped small model by default", "--model")
    served_model_name: str = _flag("", "name in /v1/models; the folder's name by default")
    host: str = _flag("127.0.0.1", "address to listen on")
    port: int = _flag(30000, "port to listen on")
    api_key: str = _flag("", "bearer token that clients must send; empty: none")
    load_format: str = _flag(
        "auto",
        "auto reads the checkpoint; dummy makes random weights of its geometry: a config.json is enough",
        choices=("auto", "dummy"),
    )
    device: str = _flag("cpu", "cpu or cuda", choices=("cpu", "cuda"))
    dtype: str = _flag("float32", "activation and dense weight type", choices=("float32", "bfloat16"))
    kernels: str = _flag(
        "",
        "kernel set: native (C, float32 on the CPU), triton (bfloat16 on a device, weights as stored) or "
        "torch; by default the one of device and type",
        choices=("", "native", "triton", "torch"),
    )
    kv_cache_dtype: str = _flag(
        "auto",
        "what caches hold: fp8 (latents and index keys in FP8), or values of the --dtype, named like it; "
        "auto: fp8 where a device's kernels read it, else the --dtype",
        choices=("auto", "fp8", "fp8_e4m3", "bfloat16", "float32"),
    )
    deterministic: bool = _flag(
        False, "row invariance: a result doesn't depend on its batch", "--enable-deterministic-inference"
    )
    threads: int = _flag(0, "compute threads on the CPU; 0 measures at start-up")
    context_length: int = _flag(0, "longest prompt plus output in tokens; 0 takes the model's")
    max_total_tokens: int = _flag(0, "tokens of full cache; 0 sizes it from the free memory")
    mem_fraction_static: float = _flag(
        0.0,
        "share of the memory that the cache takes, where sized from memory, of what weights and steps leave; "
        "0: 0.9 of a device, 0.5 of a host",
    )
    swa_full_tokens_ratio: float = _flag(
        0.5, "window pages for each full page, before the minimum per request"
    )
    max_running_requests: int = _flag(64, "requests that hold a slot")
    max_queued_requests: int = _flag(512, "requests that wait; beyond it 429")
    chunked_prefill_size: int = _flag(1024, "most prompt tokens of one step")
    cuda_graph_max_bs_decode: int = _flag(
        0,
        "requests of the largest decode step that is captured as a CUDA graph; 0: as many as hold a slot",
        "--cuda-graph-max-bs",
    )
    disable_cuda_graph: bool = _flag(False, "every step runs eagerly, as on the CPU they always do")
    max_body_bytes: int = _flag(16 << 20, "longest HTTP body; beyond it 413")
    max_n: int = _flag(16, "most completions of one request")
    max_top_logprobs: int = _flag(20, "most top logprobs of one token")
    stream_buffer: int = _flag(256, "chunks kept for a slow client before it is aborted")
    drain_s: float = _flag(30.0, "seconds that running requests get at shutdown")
    watchdog_s: float = _flag(
        300.0, "seconds a step may take before the rank is declared dead", "--watchdog-timeout"
    )
    snapshot_s: float = _flag(0.5, "seconds between load snapshots, when idle too")
    metrics_prefix: str = _flag("sglang:", "prefix of metric names; dashboards know the default")
    enable_vllm_metrics: bool = _flag(False, "also expose metrics under the names of vLLM")
    dp_size: int = _flag(1, "data-parallel ranks", "--dp")
    ep_size: int = _flag(1, "ranks that share the routed experts: 1, or all of them", "--ep")
    enable_dp_lm_head: bool = _flag(
        False, "split the vocabulary's head over the data-parallel ranks", "--dp-lm-head"
    )
    dp_exchange: str = _flag(
        "links",
        "what carries the ranks' wants of a step: links (any number of ranks), native (two of one host), or "
        "collective (any number, over torch.distributed)",
        choices=("links", "native", "collective"),
    )
    load_balance_method: str = _flag(
        "total_requests",
        "how requests that demand no rank are spread",
        choices=("round_robin", "total_requests", "total_tokens", "prefix_aware"),
    )
    speculative_algorithm: str = _flag(
        "",
        "who drafts: DSPARK, from a checkpoint with draft stages; empty: plain decoding",
        "--speculative",
        choices=("", "DSPARK", "dspark"),
    )
    speculative_verify_mode: str = _flag(
        "compact",
        "compact verifies the scheduled prefix of each draft, cap-accept verifies all but accepts that "
        "prefix only, static verifies and accepts all",
        choices=("static", "cap-accept", "compact"),
    )
    speculative_num_draft_tokens: int = _flag(0, "drafted tokens of a round; 0 takes the checkpoint's block")
    speculative_cost_table: str = _flag(
        "",
        "file with the costs of steps, as bench cost-table writes it; by default in the user's cache folder",
    )
    grammar_backend: str = _flag(
        "xgrammar", "library that compiles grammars of structured output", choices=("xgrammar",)
    )
    grammar_whitespace: str = _flag(
        "compact",
        "in generated JSON: none; compact, at most one space after a comma or a colon; flexible, up to 20 "
        "characters anywhere",
        choices=("none", "compact", "flexible"),
    )
    constrained_json_disable_any_whitespace: bool = _flag(False, "the same as --grammar-whitespace none")
    grammar_workers: int = _flag(0, "processes that compile grammars; 0: half of the processors, at most 4")
    grammar_timeout_s: float = _flag(
        8.0, "seconds that a request waits for its grammar; beyond it 408", "--grammar-timeout"
    )
    grammar_cache_bytes: int = _flag(256 << 20, "of compiled grammars in the server's memory")
    grammar_cache_entries: int = _flag(1024, "compiled grammars in the server's memory")
    grammar_cache_dir: str = _flag(
        "", "folder of compiled grammars; by default in the user's cache folder; none: not on disk"
    )
    grammar_cache_disk_bytes: int = _flag(1 << 30, "of compiled grammars on disk")
    log_format: str = _flag(
        "text", "lines on standard error: text, or one JSON object each", choices=("text", "json")
    )
    log_level: str = _flag("info", "log level", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        positive = (
            "max_running_requests",
            "max_queued_requests",
            "chunked_prefill_size",
            "max_body_bytes",
            "max_n",
            "stream_buffer",
            "grammar_cache_bytes",
            "grammar_cache_entries",
            "grammar_cache_disk_bytes",
        )
        for name in positive:
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is {getattr(self, name)}, but must be at least 1"
                )
        self._check_grammars()
        self._check_graphs()
        if self.dp_size < 1 or self.ep_size not in (1, self.dp_size):
            raise ConfigError(
                f"--ep-size is {self.ep_size}, but must be 1 or the ranks of --dp-size, {self.dp_size}"
            )
        if self.enable_dp_lm_head and self.dp_size == 1:
            raise ConfigError("--enable-dp-lm-head splits the head over ranks, but --dp-size is 1")
        if self.dp_exchange == "native" and self.dp_size != 2:
            raise ConfigError(f"--dp-exchange native is for two ranks, but --dp-size is {self.dp_size}")
        if self.dp_exchange == "collective" and self.dp_size == 1:
            raise ConfigError("--dp-exchange collective is between ranks, but --dp-size is 1")
        if not 0.0 <= self.mem_fraction_static <= 1.0:
            raise ConfigError(f"--mem-fraction-static is {self.mem_fraction_static}, but must be in [0, 1]")
        if not 0 <= self.max_top_logprobs <= MOST_TOPS:
            raise ConfigError(
                f"--max-top-logprobs is {self.max_top_logprobs}, but must be in [0, {MOST_TOPS}]"
            )
        if not re.fullmatch(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?", self.metrics_prefix):
            raise ConfigError(f"--metrics-prefix is {self.metrics_prefix!r}, no beginning of a metric's name")

    def _check_grammars(self) -> None:
        if self.grammar_workers < 0:
            raise ConfigError(f"--grammar-workers is {self.grammar_workers}, but must be at least 0")
        if not 0.0 < self.grammar_timeout_s <= 3600.0:
            raise ConfigError(f"--grammar-timeout is {self.grammar_timeout_s}, but must be in (0, 3600]")
        if self.constrained_json_disable_any_whitespace and self.grammar_whitespace == "flexible":
            raise ConfigError(
                "--constrained-json-disable-any-whitespace contradicts --grammar-whitespace flexible"
            )

    def _check_graphs(self) -> None:
        most = self.cuda_graph_max_bs_decode
        if most < 0:
            raise ConfigError(f"--cuda-graph-max-bs-decode is {most}, but must be at least 0")
        if most and self.device == "cpu":
            raise ConfigError(f"--cuda-graph-max-bs-decode is {most}, but steps on the CPU run eagerly")
        if most and self.disable_cuda_graph:
            raise ConfigError("--cuda-graph-max-bs-decode contradicts --disable-cuda-graph")

    @property
    def cache_share(self) -> float:
        """Of the memory that is left, what the cache may take: others are on a host, nobody on a device."""
        return self.mem_fraction_static or (0.9 if self.device == "cuda" else 0.5)

    @property
    def whitespace(self) -> Literal["none", "compact", "flexible"]:
        """In generated JSON."""
        if self.constrained_json_disable_any_whitespace:
            return "none"
        return cast(Literal["none", "compact", "flexible"], self.grammar_whitespace)

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        return self.served_model_name or Path(self.model_path).resolve().name
