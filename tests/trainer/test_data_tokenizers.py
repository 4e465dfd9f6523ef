import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import looped

from stoker.trainer.data.tokenizers.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer, has_long_word
from stoker.trainer.data.tokenizers.tokenizer_document import tokenizer_from_dict
from stoker.trainer.utils.errors import UserError


@given(st.text())
def test_byte_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_byte_counts()[ids].sum() == len(text.encode())


@given(st.binary())
def test_byte_round_trip_of_any_bytes(data: bytes) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode_bytes(tokenizer.encode_bytes(data)) == data


def test_byte_scheme_is_byt5s() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé").tolist() == [100, 198, 172]
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 259)
    assert tokenizer.encode_bytes(b"\x00\xff").tolist() == [3, 258]


def test_byte_decode_ignores_ids_without_text() -> None:
    assert ByteTokenizer().decode([1, 100, 0, 2, 101, 259, 31999]) == "ab"
    assert ByteTokenizer().decode([198]) == "\ufffd"
    with pytest.raises(ValueError, match=r"\(-1\)"):
        ByteTokenizer().decode([-1])


@given(st.text(min_size=1), st.data())
def test_char_round_trip(text: str, data: st.DataObject) -> None:
    tokenizer = CharTokenizer.from_texts([text])
    other = data.draw(st.text(alphabet=sorted(set(text))))
    ids = tokenizer.encode(other)
    assert tokenizer.decode(ids) == other
    assert tokenizer.decode_bytes(ids) == other.encode()
    assert tokenizer.token_byte_counts()[ids].sum() == len(other.encode())


def test_char_vocabulary_is_sorted() -> None:
    tokenizer = CharTokenizer.from_texts(["hello", "wörld"])
    assert tokenizer.characters == "dehlorwö"
    assert tokenizer.encode("hö").tolist() == [2, 7]
    assert tokenizer.vocab_size == 8


def test_large_char_vocabulary_needs_int32() -> None:
    characters = "".join(map(chr, range(0xE000, 0xE000 + 70000)))
    tokenizer = CharTokenizer(characters)
    assert tokenizer.encode(characters[-1]).tolist() == [69999]


@pytest.mark.parametrize(("text", "position"), [("abzab", 2), ("\U0001f600", 0), ("aab\n", 3)])
def test_char_unknown_character_is_named(text: str, position: int) -> None:
    with pytest.raises(UserError) as caught:
        CharTokenizer("ab").encode(text)
    assert f"character {text[position]!r}" in str(caught.value)
    assert f"position {position} " in str(caught.value)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer("ab")])
def test_lone_surrogate_is_a_user_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="lone surrogate at position 1"):
        tokenizer.encode("a\udc80")


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer("\x00\n é\U0001f600")])
def test_document_round_trip(tokenizer: Tokenizer) -> None:
    document = json.loads(json.dumps(tokenizer.to_dict()))
    again = tokenizer_from_dict(document)
    assert type(again) is type(tokenizer)
    assert again.to_dict() == tokenizer.to_dict()


@looped(
    "document",
    [
        None,
        [],
        {},
        {"tokenizer": "byte-level", "characters": "a"},
        {"tokenizer": "char"},
        {"tokenizer": "char", "characters": ""},
        {"tokenizer": "char", "characters": ["a"]},
        {"tokenizer": "char", "characters": "ba"},
        {"tokenizer": "char", "characters": "aa"},
        {"tokenizer": "char", "characters": "\ud800"},
        {"tokenizer": "char", "characters": "ab", "_target_": "os.system"},
        {"tokenizer": "sentencepiece"},
        {"tokenizer": ["char"]},
        {"tokenizer": {}},
    ],
)
def test_bad_documents_are_refused(document: object) -> None:
    with pytest.raises(ValueError):
        tokenizer_from_dict(document)


@looped("word", [8, 9, 12, 13, 30])
def test_a_long_word_is_found(word: int) -> None:
    for before in range(20):
        text = " a b " + "c" * before + "\n" * (before % 3 + 1) + "x" * word + "\tend" * 5
        assert has_long_word(text, 8) == (max(map(len, text.split())) > 8)
