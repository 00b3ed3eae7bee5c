"""Ids by string, clients' text without special tokens, detokenisation without split characters."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from engine.errors import ConfigError
from engine.model.encoding import Encoding, load_encoding
from engine.model.tokenizer import Detokenizer, Tokenizer, load_tokenizer

NANO = Path(__file__).parents[2] / "engine" / "assets" / "nano"
ENCODING: Encoding = load_encoding(NANO)
SPECIALS = ENCODING.strings.specials


def _small() -> Library:
    """A throw-away tokenizer: every byte, a few merges, the special tokens with three of them flagged."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=list(SPECIALS[:2]), show_progress=False
    )
    library.train_from_iterator(["the cat sat on the mat and äöü 你好 🎉🎉 then the other"] * 9, trainer)
    library.add_tokens([AddedToken(text, normalized=False, special=False) for text in SPECIALS[2:]])
    return library


LIBRARY = _small()
TOKENIZER = Tokenizer(LIBRARY.to_str())
ids_lists = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40)
texts = st.text(
    alphabet=st.sampled_from("the catä你🎉\n <>|/｜\ufffd") | st.characters(codec="utf-8"), max_size=40
)


@given(text=texts, special=st.sampled_from(SPECIALS), tail=texts)
def test_a_clients_text_never_holds_a_special_id_and_comes_back(text: str, special: str, tail: str) -> None:
    whole = text + special + tail
    ids = TOKENIZER.encode_plain(whole)
    assert not set(ids) & set(TOKENIZER.control_ids.values())
    assert TOKENIZER.decode(ids) == whole


@given(text=texts)
def test_trusted_text_is_encoded_as_by_the_library(text: str) -> None:
    whole = f"{SPECIALS[0]}{text}{SPECIALS[3]}{text}"
    assert TOKENIZER.encode(whole) == LIBRARY.encode(whole, add_special_tokens=False).ids


@given(text=texts)
def test_segments_of_harmless_text_have_the_ids_of_the_whole_prompt(text: str) -> None:
    if any(special in text for special in SPECIALS):
        return
    talk = [{"role": "system", "content": text}, {"role": "user", "content": text}]
    tools = [{"function": {"name": "f", "description": text}}]
    segments = ENCODING.segments(talk, tools=tools)
    assert TOKENIZER.encode_segments(segments) == TOKENIZER.encode(ENCODING.render(talk, tools=tools))


@given(ids=ids_lists)
def test_decoding_equals_the_librarys(ids: list[int]) -> None:
    only_text = [i for i in ids if i not in TOKENIZER.control_ids.values()]
    assert TOKENIZER.decode(only_text) == LIBRARY.decode(only_text, skip_special_tokens=False)


@given(ids=ids_lists, cuts=st.lists(st.integers(0, 40)), skip=st.booleans())
def test_pieces_and_flush_are_the_whole_text(ids: list[int], cuts: list[int], skip: bool) -> None:
    stream = Detokenizer(TOKENIZER, skip_special=skip)
    edges = sorted({0, len(ids), *(min(cut, len(ids)) for cut in cuts)})
    pieces = [stream.feed(ids[a:b]) for a, b in pairwise(edges)]
    assert "".join(pieces) + stream.flush() == TOKENIZER.decode(ids, skip_special=skip)


@given(text=texts)
def test_no_piece_of_sound_text_has_a_replacement_character(text: str) -> None:
    stream = Detokenizer(TOKENIZER)
    pieces = [stream.feed([token]) for token in TOKENIZER.encode_plain(text)]
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")
    assert stream.flush() == ""


def test_an_unfinished_character_is_held_back_and_flushed_once() -> None:
    ids = TOKENIZER.encode_plain("🙂")
    stream = Detokenizer(TOKENIZER)
    assert [stream.feed([token]) for token in ids[:-1]] == [""] * (len(ids) - 1)
    assert stream.flush() == "\ufffd"


def test_only_flagged_tokens_are_skipped() -> None:
    bos, think = TOKENIZER.token_id(SPECIALS[0]), TOKENIZER.token_id("</think>")
    assert TOKENIZER.decode([bos, think]) == "</think>"
    assert TOKENIZER.decode([bos, think], skip_special=False) == SPECIALS[0] + "</think>"


def test_an_unknown_token_and_a_bad_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no token '<x>'"):
        TOKENIZER.token_id("<x>")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not a tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="byte-level"):
        Tokenizer(Library(models.BPE()).to_str())


def test_the_shipped_tokenizer_has_every_special_token() -> None:
    shipped = load_tokenizer(NANO)
    assert [shipped.decode([shipped.token_id(token)], skip_special=False) for token in SPECIALS] == list(
        SPECIALS
    )
    bos, eos, pad = (shipped.token_id(ENCODING.strings.tokens[name]) for name in ("bos", "eos", "pad"))
    assert shipped.special_ids == {bos, eos, pad}
