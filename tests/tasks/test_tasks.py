"""Every kind of task: its answer passes its judge, a spoilt one fails, held-out parts stay held out."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import jsonschema
import pytest

from engine.model.dsml import parse_reply
from engine.model.tokenizer import Tokenizer, load_tokenizer
from training.tasks import (
    KINDS,
    WEIGHTS,
    Corpus,
    Example,
    answer_text,
    check,
    generate,
    prompt_ids,
    render,
    stream,
)
from training.tasks.checking import NANO, nano_encoding
from training.tasks.mixture import Split
from training.tasks.tool_pool import NAMES

ENCODING = nano_encoding()
SEEDS = range(200)
SPLITS: tuple[Split, ...] = ("train", "heldout")


def small_corpus() -> Corpus:
    corpus = Corpus()
    corpus.add(
        "python-doc", "The call returns a list of names. Each name is unique, and the order is kept.\n\n" * 3
    )
    corpus.add(
        "man-pages", "On success, zero is returned. On error, minus one is returned and the cause is set."
    )
    corpus.add("wordnet", WORDNET)
    corpus.add("gcide", "Candent (adjective): Heated to whiteness; glowing with heat.")
    corpus.add("foldoc", "ping: (networking) A program that tests whether a host answers.")
    facts = {
        "country": "Norway",
        "section": "Land",
        "Coast": "83,281 km",
        "Terrain": "mostly high",
        "Climate": "cool",
    }
    corpus.add("json-factbook", json.dumps(facts))
    return corpus


WORDNET = """vomer (noun): thin bone of the nose. Kind of: bone.

jaw (noun): the part of the skull that holds the teeth. Synonyms: mandible. Kind of: skull part.

terrific (adjective): causing terror. Synonyms: terrifying, fearful. Example: "a terrifying wail"."""
CORPUS = small_corpus()


def examples(kind: str, split: Split = "train", corpus: Corpus | None = CORPUS) -> Iterator[Example]:
    return (generate(kind, seed, split, corpus) for seed in SEEDS)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(NANO)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_wanted_answer_passes_its_own_judge(kind: str, split: Split) -> None:
    for example in examples(kind, split):
        assert check(example, answer_text(example)), example
        assert check(example, answer_text(example).removesuffix(ENCODING.strings.tokens["eos"])), example


def spoilt(example: Example) -> str:
    """The wanted answer with the letters or digits that matter changed."""
    text = answer_text(example).removesuffix(ENCODING.strings.tokens["eos"])
    if example.checker == "calls":
        return text.replace('invoke name="', 'invoke name="x', 1)
    if example.checker in ("contains", "rule"):
        needed = example.expected if example.checker == "contains" else example.expected["contains"]
        return text.lower().replace(needed[0].lower(), "#")
    spot = max(i for i, letter in enumerate(text) if letter.isalnum())
    return f"{text[:spot]}{'777' if text[spot] != '7' else '333'}{text[spot + 1 :]}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_spoilt_answer_fails(kind: str) -> None:
    judged = [example for example in examples(kind) if example.checker != "f1"]
    assert not [(spoilt(example), example) for example in judged if check(example, spoilt(example))]


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_answer_and_a_call_out_of_place_fail(kind: str) -> None:
    block = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="no">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    for example in examples(kind):
        assert not check(example, "</think>" if example.thinking else "")
        assert not check(example, answer_text(example).removesuffix(ENCODING.strings.tokens["eos"]) + block)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_example_again(kind: str) -> None:
    assert list(examples(kind)) == list(examples(kind))
    assert len({repr(example) for example in examples(kind)}) > 150


def test_the_same_example_comes_from_another_process() -> None:
    code = "from training.tasks import generate; print([generate('json', s).messages for s in range(20)])"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, check=True) for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stdout.decode().strip() == str([generate("json", seed).messages for seed in range(20)])


@pytest.mark.parametrize("kind", ["json", "json_deep"])
@pytest.mark.parametrize("split", SPLITS)
def test_json_answers_validate_by_their_schema(kind: str, split: Split) -> None:
    checked = 0
    for example in examples(kind, split):
        wanted = example.response_format
        if wanted and wanted["type"] == "json_schema":
            schema = wanted["json_schema"]["schema"]
            jsonschema.Draft202012Validator.check_schema(schema)
            jsonschema.validate(json.loads(example.answer["content"]), schema)
            checked += 1
    assert checked > 40


def test_tool_arguments_validate_by_the_schemas_in_the_prompt() -> None:
    for kind in ("tools", "conversations"):
        for example in examples(kind):
            schemas = {
                tool["function"]["name"]: tool["function"]["parameters"] for tool in example.tools or ()
            }
            reply = parse_reply(answer_text(example), ENCODING.strings, thinking=example.thinking)
            for call in reply.calls:
                jsonschema.validate(json.loads(call.arguments), schemas[call.name])


def keys_of(example: Example) -> str | None:
    wanted = example.response_format
    if not wanted or wanted["type"] != "json_schema":
        return None
    properties = wanted["json_schema"]["schema"]["properties"]
    return " ".join(sorted(key for key, schema in properties.items() if "const" not in schema))


def test_schemas_of_the_heldout_split_never_occur_in_training() -> None:
    trained = {keys_of(generate("json", seed)) for seed in range(4000)} - {None}
    held = {keys_of(generate("json", seed, "heldout")) for seed in range(400)} - {None}
    assert len(held) > 60
    assert not trained & held


def test_heldout_tools_never_occur_in_training() -> None:
    trained = {tool["function"]["name"] for example in examples("tools") for tool in example.tools or ()}
    held = {
        tool["function"]["name"] for example in examples("tools", "heldout") for tool in example.tools or ()
    }
    assert not trained & set(NAMES.heldout)
    assert held & set(NAMES.heldout)


def test_heldout_questions_of_arithmetic_never_occur_in_training() -> None:
    trained = {example.messages[0]["content"] for example in islice(map(_arithmetic, range(20_000)), 20_000)}
    held = {generate("arithmetic", seed, "heldout").messages[0]["content"] for seed in range(500)}
    assert not trained & held


def _arithmetic(seed: int) -> Example:
    return generate("arithmetic", seed)


@pytest.mark.parametrize("kind", KINDS)
def test_rendering_is_the_encoders_and_trains_on_answer_and_eos_only(kind: str, tokenizer: Tokenizer) -> None:
    eos = tokenizer.token_id(ENCODING.strings.tokens["eos"])
    for example in islice(examples(kind), 60):
        rendered = render(example, ENCODING, tokenizer)
        talk = [*example.messages, dict(example.answer)]
        assert rendered.ids == tokenizer.encode_segments(ENCODING.segments(talk, **example.options))
        assert rendered.ids[: rendered.prompt_length] == prompt_ids(example, ENCODING, tokenizer)
        assert rendered.mask == sorted(rendered.mask)
        answer = rendered.ids[rendered.prompt_length :]
        assert tokenizer.decode(answer, skip_special=False) == answer_text(example)
        assert answer[-1] == eos
        assert check(example, tokenizer.decode(answer, skip_special=False))


@pytest.mark.parametrize("split", SPLITS)
def test_most_prompts_of_short_json_have_at_most_110_tokens(split: Split, tokenizer: Tokenizer) -> None:
    lengths = [len(prompt_ids(example, ENCODING, tokenizer)) for example in examples("json", split)]
    assert sum(length <= 110 for length in lengths) >= 0.6 * len(lengths)


def test_the_stream_mixes_all_kinds_by_weight_and_differs_by_seed() -> None:
    drawn = list(islice(stream(3, CORPUS), 2000))
    for kind, weight in WEIGHTS.items():
        assert abs(sum(example.kind == kind for example in drawn) / 2000 - weight) < 0.04
    assert list(islice(stream(3, CORPUS), 50)) == drawn[:50]
    assert list(islice(stream(4, CORPUS), 50)) != drawn[:50]
    assert abs(sum(WEIGHTS.values()) - 1) < 1e-9


def test_every_kind_works_without_a_corpus() -> None:
    for kind in KINDS:
        for example in islice(examples(kind, corpus=None), 50):
            assert check(example, answer_text(example))


def test_reasoning_with_a_false_equation_fails() -> None:
    thinking = [example for example in examples("arithmetic") if example.thinking]
    assert len(thinking) > 60
    for example in thinking:
        wrong = replace(example, answer={**example.answer, "reasoning_content": "2 + 2 = 5"})
        assert not check(example, answer_text(wrong))


def test_the_tasks_need_the_standard_library_alone() -> None:
    code = (
        "import sys; sys.path.insert(0, '.');"
        "from training.tasks import mixture;"
        "list(zip(range(200), mixture.stream(1)));"
        "assert not {'msgspec', 'orjson', 'torch', 'numpy', 'faker', 'jsonschema'} & set(sys.modules)"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
