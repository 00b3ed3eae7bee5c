"""The shipped model behind a real server: answers obey, workers may die, and nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from openai import OpenAI

from bench.grammar_cases import cases
from bench.serve import server

pytestmark = pytest.mark.slow
NOBODY = "none"
"""The server of these tests wants no key, the client demands one."""

HELLO: Any = [{"role": "user", "content": "Which city? Answer."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 12},
        "number": {"type": "integer", "minimum": 10, "maximum": 99},
    },
    "required": ["city", "number"],
    "additionalProperties": False,
}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "fixed"}}
TOOL: Any = {"type": "function", "function": {"name": "find", "strict": True, "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """(url, process) of a server that is ready; afterwards it ends by itself and leaves no process behind."""
    store = tmp_path_factory.mktemp("grammars")
    flags = ["--threads", "1", "--max-total-tokens", "65536", "--grammar-cache-dir", str(store)]
    flags += ["--grammar-timeout", "60"]
    with server(flags) as (port, child):
        url = f"http://127.0.0.1:{port}"
        while not figure(url, "grammar_workers"):
            time.sleep(0.1)
        yield url, child
        started = children(child.pid)
        assert any(b"engine.grammar.worker" in command(pid) for pid in started)
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
        assert [pid for pid in started if Path(f"/proc/{pid}").exists()] == []


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command(pid: int) -> bytes:
    """What a process runs."""
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def whole(url: str, path: str, body: dict[str, Any]) -> Any:
    """The answer's JSON."""
    answer = httpx.post(url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_openai_client_gets_json_of_a_schema(served: tuple[str, Any]) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    with OpenAI(api_key=NOBODY, base_url=served[0] + "/v1", max_retries=0) as client:
        asked: Any = {"model": "nano", "messages": HELLO, "response_format": wanted, "max_tokens": 200}
        answer = client.chat.completions.create(**asked, n=2, temperature=1.0, seed=3)
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            Draft202012Validator(SCHEMA).validate(json.loads(choice.message.content or ""))
        greedy = client.chat.completions.create(**asked, temperature=0).choices[0].message.content
        stream = client.chat.completions.create(**asked, temperature=0, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == greedy


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find"}}])
def test_the_openai_client_gets_a_strict_call(served: tuple[str, Any], choice: Any) -> None:
    asked: Any = {"model": "nano", "messages": HELLO, "tools": [TOOL], "tool_choice": choice}
    with OpenAI(api_key=NOBODY, base_url=served[0] + "/v1", max_retries=0) as client:
        answer = client.chat.completions.create(**asked, max_tokens=300, temperature=1.0, seed=5)
    assert answer.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")
    calls = answer.choices[0].message.tool_calls
    assert calls
    for call in calls:
        assert call.function.name == "find"
        Draft202012Validator(SCHEMA).validate(json.loads(call.function.arguments))


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        ("regex", "[a-c]{3}-[0-9]{2}", "[a-c]{3}-[0-9]{2}"),
        ("ebnf", 'root ::= "yes" | "no" " " "way"', "yes|no way"),
        ("guided_choice", ["north", "south"], "north|south"),
        ("structured_outputs", {"regex": "(ab){2,4}"}, "(ab){2,4}"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"enum": ["x", 3]}}}, '"x"|3'),
        ("structural_tag", TAG, "fixed"),
    ],
)  # fmt: skip
def test_every_form_is_obeyed(served: tuple[str, Any], field: str, value: Any, pattern: str) -> None:
    body = {"prompt": "Say it:", field: value, "temperature": 1.0, "n": 3, "seed": 1, "max_tokens": 40}
    for choice in whole(served[0], "/v1/completions", body)["choices"]:
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(pattern, choice["text"]), choice["text"]


def test_with_thinking_the_answer_obeys_and_the_reasoning_is_free(served: tuple[str, Any]) -> None:
    body = {
        "messages": [{"role": "user", "content": "What is 12 + 30?"}],
        "thinking": {"type": "enabled"},
        "regex": "[0-9]{2}",
        "max_tokens": 600,
        "temperature": 0,
    }
    message = whole(served[0], "/v1/chat/completions", body)["choices"][0]["message"]
    assert re.search(r"[^0-9]", message["reasoning_content"])
    assert re.fullmatch("[0-9]{2}", message["content"])


def test_sixteen_schemas_at_once_are_compiled_once_each_and_all_obeyed(served: tuple[str, Any]) -> None:
    before = figure(served[0], "grammar_compilation_time_seconds_count")

    def one(number: int) -> None:
        case = cases()[number % 16]
        params = {
            "json_schema": json.dumps(case.schema),
            "max_new_tokens": case.longest + 1,
            "temperature": 1.0,
        }
        answer = whole(served[0], "/generate", {"text": "An example:", "sampling_params": params})
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        Draft202012Validator(case.schema).validate(json.loads(answer["text"]))

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(one, range(32)))
    assert figure(served[0], "grammar_compilation_time_seconds_count") - before == 16


def figure(url: str, name: str) -> float:
    """A series without further labels."""
    lines = httpx.get(url + "/metrics", timeout=60).text.splitlines()
    (line,) = [one for one in lines if one.startswith(f"sglang:{name}{{")]
    return float(line.rsplit(" ", 1)[1])


def test_a_worker_that_is_killed_is_replaced_and_harms_nobody_else(served: tuple[str, Any]) -> None:
    url, child = served
    done = threading.Event()
    texts: list[str] = []

    def others() -> None:
        while not done.is_set():
            texts.append(
                whole(url, "/v1/completions", {"prompt": "One", "max_tokens": 4})["choices"][0]["text"]
            )

    other = threading.Thread(target=others)
    other.start()
    try:
        (worker,) = [pid for pid in children(child.pid) if b"engine.grammar.worker" in command(pid)][:1]
        os.kill(worker, signal.SIGKILL)
        while Path(f"/proc/{worker}").exists():
            time.sleep(0.001)  # A job that it takes in its last moment is lost with it.
        body = {"prompt": "x", "regex": "[d-f]{4}", "max_tokens": 20}
        assert re.fullmatch("[d-f]{4}", whole(url, "/v1/completions", body)["choices"][0]["text"])
    finally:
        done.set()
        other.join()
    assert texts
    assert child.poll() is None
