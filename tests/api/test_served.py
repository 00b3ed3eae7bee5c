"""A real server: processes, sockets and the real model code, with random weights of the shipped shape."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from bench.serve import server
from engine.config import NANO
from tests.actors.servers import wait_for

pytestmark = pytest.mark.slow
HELLO: Any = [{"role": "user", "content": "Hello"}]
FILES = ("encoding.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")

NOBODY = "none"
"""The server of these tests wants no key, the client demands one."""

SHAPE: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 128, 0, 0, 0],
    "compress_rope_theta": 160000.0,
    "dspark_noise_token_id": 2,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 256,
    "index_head_dim": 128,
    "index_n_heads": 16,
    "index_topk": 64,
    "max_position_embeddings": 8192,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hash_layers": 3,
    "num_hidden_layers": 8,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 2,
    "o_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
        "type": "yarn",
    },
    "rope_theta": 10000.0,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 8192,
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that is ready; afterwards it must end by itself, without a failure."""
    folder: Path = tmp_path_factory.mktemp("models") / "nano"
    folder.mkdir()
    for name in FILES:
        shutil.copy(NANO / name, folder)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    with server(["--model", str(folder), "--load-format", "dummy", "--max-total-tokens", "65536"]) as (
        port,
        child,
    ):
        yield f"http://127.0.0.1:{port}"
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0


def get(url: str) -> httpx.Response:
    """The answer, however busy the machine is."""
    return httpx.get(url, timeout=60)


def post(url: str, body: dict[str, Any]) -> httpx.Response:
    """The answer, however busy the machine is."""
    return httpx.post(url, json=body, timeout=60)


def test_the_openai_client_streams_a_chat_from_a_real_server(url: str) -> None:
    with OpenAI(api_key=NOBODY, base_url=url + "/v1", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="nano", messages=HELLO, stream=True, max_tokens=12, stream_options={"include_usage": True}
        )
        chunks = list(stream)
    assert chunks[-1].usage is not None
    assert 1 <= chunks[-1].usage.completion_tokens <= 12
    assert chunks[-2].choices[0].finish_reason in ("stop", "length")


def test_a_seed_gives_the_same_text_again_and_each_completion_its_own(url: str) -> None:
    body = {"prompt": "Once", "seed": 5, "max_tokens": 20, "n": 3, "ignore_eos": True}
    first, second = (texts_of(post(url + "/v1/completions", body)) for _ in range(2))
    assert first == second
    assert len(set(first)) == 3


def test_greedy_text_is_the_same_streamed_whole_and_beside_others(url: str) -> None:
    body = {"prompt": "Once upon", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    alone = texts_of(post(url + "/v1/completions", body))
    beside = texts_of(post(url + "/v1/completions", {**body, "prompt": ["Once upon", "a", "time"]}))
    streamed = post(url + "/v1/completions", {**body, "stream": True}).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert alone[0] == beside[0] == "".join(event["choices"][0]["text"] for event in events)


def test_log_probabilities_of_a_greedy_answer_are_those_of_the_prompt_that_repeats_it(url: str) -> None:
    """Scored as output and, echoed, as prompt: the same numbers within float32's noise."""
    greedy = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    body = {"input_ids": [5, 6, 7], "return_logprob": True, "sampling_params": greedy}
    told = post(url + "/generate", body).json()
    again = {"prompt": [5, 6, 7, *told["output_ids"]], "echo": True, "logprobs": 0, "max_tokens": 1}
    scored = post(url + "/v1/completions", again).json()["choices"][0]["logprobs"]
    output = [value for value, _, _ in told["meta_info"]["output_token_logprobs"]]
    assert scored["token_logprobs"][3:11] == pytest.approx(output, abs=1e-3)


def test_health_models_and_metrics_answer(url: str) -> None:
    # A host that stands still for some seconds makes a sign of life too old until the next one.
    assert wait_for(lambda: get(url + "/health_scheduler").json()["status"] == "ok")
    assert get(url + "/v1/models").json()["data"][0]["id"] == "nano"
    exposed = get(url + "/metrics").text
    assert 'sglang:num_running_reqs{dp_rank="0"' in exposed


def test_a_client_that_closes_its_stream_frees_its_place(url: str) -> None:
    body = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        wait_for_running(url, 1)
    wait_for_running(url, 0)


def wait_for_running(url: str, count: int) -> None:
    """Until a snapshot says so; each is half a second younger than the one before."""
    assert wait_for(lambda: running(url) == count)


def running(url: str) -> float:
    """Requests that hold a slot, as the last snapshot says."""
    (line,) = [
        line
        for line in get(url + "/metrics").text.splitlines()
        if line.startswith("sglang:num_running_reqs{")
    ]
    return float(line.split()[-1])


def texts_of(answer: httpx.Response) -> list[str]:
    """The texts of all choices."""
    answer.raise_for_status()
    return [choice["text"] for choice in answer.json()["choices"]]
