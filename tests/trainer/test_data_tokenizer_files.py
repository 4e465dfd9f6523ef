"""Tokenizers that come in files, against independent oracles: transformers, GPT-2's algorithm, sentencepiece."""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import re
import sys
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples, full_only, looped
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from stoker.trainer.data.tokenizers import gpt2_pretokenizer, sentencepiece_tokenizer
from stoker.trainer.data.tokenizers.gpt2_files import EOS_TOKEN, gpt2_tokenizer_json
from stoker.trainer.data.tokenizers.special_tokens import SpecialTokenIds
from stoker.trainer.data.tokenizers.token_bytes import unicode_to_bytes
from stoker.trainer.data.tokenizers.tokenizer import Tokenizer
from stoker.trainer.data.tokenizers.tokenizer_document import tokenizer_from_dict
from stoker.trainer.data.tokenizers.tokenizer_json import JsonTokenizer, build_json_tokenizer, canonical_json
from stoker.trainer.utils.errors import UserError

SCRIPTS = "naïve café, straße, Ελληνικά, русский, 中文字符, 日本語です, हिन्दी, العربية, 한국어, 👩‍👩‍👧, ﬁ ① Å Å, 1½"
CORPUS = [SCRIPTS, Path(__file__).read_text(), "a\tb\nc", "it's we're I'll don't  \t\n\n  x"] * 2
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.text("abc' \n\t\r1é▁\u00a0\u3000\u200d中👩\x00ﬁ", max_size=12),
        st.sampled_from(
            ["don't", "  ", "\r\n", " the", "def f(x):\n    return x\n", "12345", "…", "e\u0301", "\ufeff"]
        ),
    ),
    max_size=8,
).map("".join)


@cache
def byte_level(**changes: Any) -> dict[str, Any]:
    """A small GPT-2-like tokenizer.json, parsed."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[EOS_TOKEN], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    return json.loads(library.to_str())


def changed(**parts: Any) -> str:
    return canonical_json(json.dumps({**byte_level(), **parts}))


@cache
def gpt2_files() -> tuple[str, str]:
    """vocab.json and merges.txt as GPT-2 has them: the 256 bytes, the merges, and last the end of text."""
    model = byte_level()["model"]
    pieces = [token for token in model["vocab"] if token != EOS_TOKEN]
    merges = "".join(f"{first} {second}\n" for first, second in model["merges"])
    vocabulary = {token: id_ for id_, token in enumerate([*pieces, EOS_TOKEN])}
    return json.dumps(vocabulary), "#version: 0.2\n" + merges


@cache
def gpt2_tables() -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    """The vocabulary, and the rank of each merge."""
    vocab, merges = gpt2_files()
    pairs = (line.split(" ") for line in merges.split("\n")[1:-1])
    return json.loads(vocab), {(first, second): rank for rank, (first, second) in enumerate(pairs)}


@cache
def gpt2() -> JsonTokenizer:
    return build_json_tokenizer(gpt2_tokenizer_json(*gpt2_files()), {})


@cache
def llama_like() -> dict[str, Any]:
    """BPE over characters with bytes for the rest, spaces as "▁" and one before every text, as Llama 2's file."""
    library = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", "<s>", "</s>", *bytes_], limit_alphabet=60, show_progress=False
    )
    words = [word for text in CORPUS for word in text.replace(" ", "▁").replace("▁", " ▁").split()]
    library.train_from_iterator(words, trainer)
    parsed = json.loads(library.to_str())
    parsed["added_tokens"] = [token for token in parsed["added_tokens"] if not token["content"].startswith("<0x")]
    replace, fuse = decoders.Replace("▁", " "), decoders.Fuse()
    library.decoder = decoders.Sequence([replace, decoders.ByteFallback(), fuse, decoders.Strip(" ", 1, 0)])
    parsed["decoder"] = json.loads(library.to_str())["decoder"]
    return parsed


@cache
def sentencepiece_model(**options: Any) -> bytes:
    spm = pytest.importorskip("sentencepiece")
    written = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS for line in text.splitlines() if line]),
        model_writer=written,
        minloglevel=2,
        **{
            "vocab_size": 420,
            "model_type": "bpe",
            "character_coverage": 0.98,
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            **options,
        },
    )
    return written.getvalue()


def sentencepiece(**options: Any) -> sentencepiece_tokenizer.SentencePieceTokenizer:
    return sentencepiece_tokenizer.build_sentencepiece_tokenizer(sentencepiece_model(**options), {})


def document_bytes(tokenizer: Tokenizer, text: str) -> int:
    """Bytes of a document and the eos behind it, as bits per byte count them."""
    assert tokenizer.eos_id is not None
    return int(tokenizer.token_byte_counts()[[*tokenizer.encode(text).tolist(), tokenizer.eos_id]].sum())


# ---------------------------------------------------------------- GPT-2


def gpt2_by_the_paper(text: str, vocabulary: dict[str, int], ranks: dict[tuple[str, str], int]) -> list[int]:
    """Words by GPT-2's expression, bytes as characters, then the earliest merge first, wherever it applies."""
    characters = {byte: character for character, byte in unicode_to_bytes().items()}
    ids: list[int] = []
    for word in regex.findall(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", text):
        parts = [characters[byte] for byte in word.encode()]
        while len(parts) > 1:
            best = min(itertools.pairwise(parts), key=lambda pair: ranks.get(pair, 1 << 30))
            if best not in ranks:
                break
            merged: list[str] = []
            while parts:
                step = 2 if tuple(parts[:2]) == best else 1
                merged.append("".join(parts[:step]))
                parts = parts[step:]
            parts = merged
        ids += [vocabulary[part] for part in parts]
    return ids


@examples(150)
@given(TEXTS)
def test_gpt2_is_the_papers_algorithm(text: str) -> None:
    ids = gpt2().encode(text)
    assert ids.dtype == np.uint16
    assert ids.tolist() == gpt2_by_the_paper(text, *gpt2_tables())
    assert gpt2().decode(ids) == text
    assert document_bytes(gpt2(), text) == len(text.encode())


def test_gpt2_is_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    vocab, merges = gpt2_files()
    (tmp_path / "vocab.json").write_text(vocab)
    (tmp_path / "merges.txt").write_text(merges)
    oracle = transformers.GPT2Tokenizer.from_pretrained(tmp_path)
    for text in [*CORPUS, SCRIPTS * 3, f"a{EOS_TOKEN}b", "\x00\x01", "e\u0301 é"]:
        assert gpt2().encode(text).tolist() == oracle(text)["input_ids"]
    assert gpt2().eos_id == oracle.eos_token_id == gpt2().vocab_size - 1 == gpt2().pad_id


@looped(
    ("vocab", "merges", "problem"),
    [
        ("{", "", "not JSON"),
        ("[]", "", "object of ids"),
        ('{"a": "0"}', "", "object of ids"),
        ('{"a": 0, "b": 1}', "#version: 0.2\na b\n", r"line 2 .* lacks"),
        ('{"a": 0, "b": 1, "ab": 2}', "a b\na  b\n", r"line 2 .* two tokens"),
        ('{"a": 0, "b": 1, "ab": 2}', "ab\n", r"line 1 .* two tokens"),
    ],
)
def test_gpt2_files_that_are_none(vocab: str, merges: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        gpt2_tokenizer_json(vocab, merges)


def test_gpt2_files_of_windows_and_of_newer_tools() -> None:
    vocab, merges = gpt2_files()
    for other in (merges.replace("\n", "\r\n"), merges.removeprefix("#version: 0.2\n")):
        assert gpt2_tokenizer_json(vocab, other) == gpt2_tokenizer_json(vocab, merges)


def test_gpt2_without_an_end_of_text_gets_one() -> None:
    assert build_json_tokenizer(gpt2_tokenizer_json('{"a": 0}', ""), {}).eos_id == 1


# ---------------------------------------------------------------- tokenizer.json


@examples(80)
@given(TEXTS)
def test_byte_level_loses_nothing(text: str) -> None:
    tokenizer = build_json_tokenizer(changed(), {})
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert b"".join(tokenizer.decode_bytes([id_]) for id_ in ids) == text.encode()
    assert document_bytes(tokenizer, text) == len(text.encode())


@pytest.mark.parametrize("kind", ["byte_level", "llama_like"])
def test_ids_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    definition = json.dumps({"byte_level": byte_level, "llama_like": llama_like}[kind]())
    (tmp_path / "tokenizer.json").write_text(definition)
    oracle = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    tokenizer = build_json_tokenizer(canonical_json(definition), {})
    texts = [*CORPUS, "", f"x {EOS_TOKEN} y</s>", "\u2028\u0085 \x1c", " leading", "trailing "]
    expected = [oracle(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == expected
    assert [tokenizer.encode(text).tolist() for text in texts] == expected


@examples(80)
@given(TEXTS.filter(bool))
def test_byte_fallback_counts_the_bytes_of_the_text(text: str) -> None:
    tokenizer = build_json_tokenizer(canonical_json(json.dumps(llama_like())), {})
    ids = tokenizer.encode(text)
    plain = text.replace("▁", " ")
    assert tokenizer.decode(ids) == plain
    assert tokenizer.decode_bytes(ids) == b" " + plain.encode()
    assert document_bytes(tokenizer, text) == len(plain.encode()) <= len(text.encode())


def test_special_tokens_by_their_usual_names() -> None:
    tokenizer = build_json_tokenizer(canonical_json(json.dumps(llama_like())), {})
    assert tokenizer.special == SpecialTokenIds(eos=2, bos=1, pad=None, unk=0)
    assert (tokenizer.eos_id, tokenizer.pad_id) == (2, 2)
    assert tokenizer.decode([1, *tokenizer.encode("a b").tolist(), 2]) == "a b"
    nameless = build_json_tokenizer(changed(added_tokens=[], model=_without(EOS_TOKEN)), {})
    assert (nameless.eos_id, nameless.pad_id) == (None, 0)


def test_named_and_further_tokens_are_added_at_the_end() -> None:
    size = build_json_tokenizer(changed(), {}).vocab_size
    tokenizer = build_json_tokenizer(changed(), {"eos": "<|stop|>", "pad": "!"}, ["<|user|>", EOS_TOKEN, "<|stop|>"])
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (
        size,
        byte_level()["model"]["vocab"]["!"],
        size + 2,
    )
    ids = tokenizer.encode("a<|user|>b<|stop|>").tolist()
    assert ids[1] == size + 1
    assert ids[3] == size
    assert tokenizer.decode(ids) == "a<|user|>b"
    assert tokenizer.token_byte_counts()[size + 1] == len("<|user|>")
    assert tokenizer_from_dict(tokenizer.to_dict()).encode("<|user|>").tolist() == [size + 1]


def _without(token: str) -> dict[str, Any]:
    model = byte_level()["model"]
    return {**model, "vocab": {piece: id_ for piece, id_ in model["vocab"].items() if piece != token}}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPLIT = {"type": "Split", "pattern": {"String": " "}, "invert": False}


@looped(
    "parts",
    [
        {"normalizer": {"type": "NFC"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}},
        {"pre_tokenizer": {**BYTE_LEVEL, "add_prefix_space": True}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{**SPLIT, "behavior": "Removed"}, BYTE_LEVEL]}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"model": _without("!")},
    ],
)
def test_no_bytes_are_claimed_where_text_is_changed(parts: dict[str, Any]) -> None:
    assert not build_json_tokenizer(changed(**parts), {"eos": "<|stop|>"}).token_byte_counts().any()


@pytest.mark.parametrize(
    "steps", [[{**SPLIT, "behavior": "Isolated"}], [{"type": "Digits", "individual_digits": True}]]
)
def test_steps_that_only_cut_keep_the_count(steps: list[Any]) -> None:
    tokenizer = build_json_tokenizer(
        changed(pre_tokenizer={"type": "Sequence", "pretokenizers": [*steps, BYTE_LEVEL]}), {}
    )
    assert document_bytes(tokenizer, SCRIPTS) == len(SCRIPTS.encode())


def test_words_with_marks_are_readable() -> None:
    model = {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
    }
    vocabulary = {"[UNK]": 0, "play": 1, "##ing": 2, "with": 3, "[SEP]": 4}
    tokenizer = build_json_tokenizer(
        changed(
            model={**model, "vocab": vocabulary},
            added_tokens=[],
            pre_tokenizer={"type": "Whitespace"},
            decoder={"type": "WordPiece", "prefix": "##", "cleanup": False},
        ),
        {},
    )
    assert tokenizer.encode("playing with fire").tolist() == [1, 2, 3, 0]
    assert tokenizer.decode([1, 2, 3, 0, 4]) == "playing with"
    assert tokenizer.eos_id == 4
    assert not tokenizer.token_byte_counts().any()


def test_large_ids_need_int32() -> None:
    vocabulary = byte_level()["model"]["vocab"] | {"zz": 70000}
    tokenizer = build_json_tokenizer(changed(model={**byte_level()["model"], "vocab": vocabulary}), {})
    assert tokenizer.encode("ab").dtype == np.int32
    assert tokenizer.vocab_size == 70001
    assert tokenizer.decode([69999, 70000, 70001]) == "zz"


def test_cutting_and_padding_of_the_file_are_left_out() -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    text = json.dumps({**byte_level(), "truncation": truncation}, indent=2)
    assert canonical_json(text) == changed()
    assert len(build_json_tokenizer(canonical_json(text), {}).encode(SCRIPTS)) > 2


@pytest.mark.parametrize(
    ("definition", "problem"),
    [
        ("", "not JSON"),
        ("[]", "no object `model`"),
        ('{"model": 1}', "no object `model`"),
        ('{"model": {}}', "rejects"),
        ("[" * 100_000, "not JSON"),
        (lambda: changed(model={**byte_level()["model"], "dropout": 0.1}), "random"),
        (lambda: changed(model={**byte_level()["model"], "vocab": {"a": 4_000_000_000}, "merges": []}), "below"),
        (lambda: changed(model={**byte_level()["model"], "vocab": {}, "merges": []}, added_tokens=[]), "below"),
        (
            lambda: changed(model={**byte_level()["model"], "vocab": {"a": 0, "b": 1, "c": 1}, "merges": []}),
            r"'b' and 'c' have one id, 1;",
        ),
        (lambda: changed(pre_tokenizer={**SPLIT, "pattern": {"Regex": "("}, "behavior": "Isolated"}), "rejects"),
        (lambda: changed(decoder={"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True}), "CTC"),
        (lambda: changed(padding={"type": "x"}) + " " * (60 << 20), "larger"),
    ],
    ids=range(12),
)
def test_definitions_that_are_refused(definition: Any, problem: str) -> None:
    text = definition if isinstance(definition, str) else definition()
    with pytest.raises(ValueError, match=problem):
        JsonTokenizer(text, SpecialTokenIds())


@examples(200)
@given(st.data())
def test_a_damaged_definition_is_refused_or_works(data: st.DataObject) -> None:
    """Whatever is changed in it, nothing but a ValueError comes out: a checkpoint may come from anywhere."""
    document = {"tokenizer": "huggingface", "definition": changed(), "special": SpecialTokenIds(eos=0).to_dict()}
    parsed = json.loads(document["definition"])
    parsed["model"]["vocab"] = dict(list(parsed["model"]["vocab"].items())[:3])
    parsed["model"]["merges"] = []
    at: Any = parsed
    while True:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if not isinstance(at[key], dict | list) or not at[key] or data.draw(st.booleans()):
            break
        at = at[key]
    junk: Any = st.sampled_from([None, True, -1, 1 << 40, 1.5, "", "\ud800", [], {}, "ByteLevel", {"type": "Fuse"}])
    at[key] = data.draw(junk)
    document["definition"] = json.dumps(parsed)
    try:
        tokenizer = tokenizer_from_dict(document)
    except ValueError:
        return
    with contextlib.suppress(UserError):
        tokenizer.decode(tokenizer.encode("!\n"))


# ---------------------------------------------------------------- words


def by_the_library(tokenizer: JsonTokenizer, text: str) -> list[int]:
    library = tokenizers.Tokenizer.from_str(tokenizer.to_dict()["definition"])
    return library.encode(text, add_special_tokens=False).ids


def check_characters(codes: list[int]) -> None:
    """Each of them after a letter, a number, a mark and a space."""
    for first in range(0, len(codes), 4096):
        text = "".join(f"a{chr(code)}1{chr(code)}.{chr(code)} {chr(code)}" for code in codes[first : first + 4096])
        assert gpt2().encode(text).tolist() == by_the_library(gpt2(), text), hex(codes[first])


def test_characters_are_cut_as_the_library_cuts_them() -> None:
    """Those where a kind of characters begins or ends, for the library or for Python, and some of each plane."""
    kinds = [unicodedata.category(chr(code))[0] for code in range(0x110000)]
    bounds = {code for code in range(1, 0x110000) if kinds[code] != kinds[code - 1]}
    for kind in (r"\p{L}", r"\p{N}", r"\s"):
        bounds |= {
            ord(end)
            for end in re.findall(r"[^-]", gpt2_pretokenizer._character_class(kind).encode().decode("unicode_escape"))
        }
    codes = (
        {code + step for code in bounds for step in (-1, 0, 1)} | set(range(0x300)) | set(range(0, 0x110000, 0x1357))
    )
    check_characters([code for code in sorted(codes) if 0 <= code < 0x110000 and not 0xD800 <= code < 0xE000])


@full_only
def test_every_character_is_cut_as_the_library_cuts_it() -> None:
    check_characters([code for code in range(0x110000) if not 0xD800 <= code < 0xE000])


@examples(150)
@given(TEXTS, st.sampled_from([1, 2, 3, 7]))
def test_long_texts_are_cut_in_slices_without_a_trace(text: str, size: int) -> None:
    text = text * 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt2_pretokenizer, "_SLICE", size)
        found = gpt2().encode(text).tolist()
    assert found == by_the_library(gpt2(), text)


def test_a_full_memory_of_words_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt2_pretokenizer, "_MAX_CACHED_WORDS", 3)
    monkeypatch.setattr(gpt2_pretokenizer, "_MAX_CACHED_WORD_LENGTH", 5)
    tokenizer = build_json_tokenizer(changed(), {})
    assert [tokenizer.encode(text).tolist() for text in CORPUS] == [by_the_library(tokenizer, text) for text in CORPUS]
    assert tokenizer._words is not None
    assert 0 < len(tokenizer._words._ids_of_word) <= 3


def test_tokens_that_text_spells_are_those_of_the_library() -> None:
    tokenizer = build_json_tokenizer(changed(), {}, ["<|user|>", "a b", "<|user|>!", "|"])
    assert tokenizer._words is not None
    for text in ("x<|user|>y", "<|user", "xa by", f"{EOS_TOKEN}{EOS_TOKEN} ", "é a b", "<|user|>!", "<||user|>"):
        assert tokenizer.encode(text).tolist() == by_the_library(tokenizer, text)


@pytest.mark.parametrize("flags", [{"lstrip": True}, {"rstrip": True}, {"single_word": True}, {"normalized": True}])
def test_tokens_that_do_more_are_left_to_the_library(flags: dict[str, bool]) -> None:
    token = {"id": 600, "content": "<|user|>", "special": True, "normalized": False}
    token |= {"single_word": False, "lstrip": False, "rstrip": False, **flags}
    tokenizer = build_json_tokenizer(changed(added_tokens=[*byte_level()["added_tokens"], token]), {})
    assert tokenizer._words is None
    for text in ("x <|user|> y", "x<|user|>y"):
        assert tokenizer.encode(text).tolist() == by_the_library(tokenizer, text)


@pytest.mark.parametrize(
    "pre_tokenizer",
    [{**BYTE_LEVEL, "use_regex": False}, {**BYTE_LEVEL, "add_prefix_space": True}, {"type": "Whitespace"}, None],
    ids=str,
)
def test_other_words_are_left_to_the_library(pre_tokenizer: Any) -> None:
    tokenizer = build_json_tokenizer(changed(pre_tokenizer=pre_tokenizer), {})
    assert tokenizer._words is None
    assert tokenizer.encode(SCRIPTS).tolist() == by_the_library(tokenizer, SCRIPTS)


# ---------------------------------------------------------------- SentencePiece


KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "unigram": {"model_type": "unigram", "vocab_size": 400},
    "no prefix": {"add_dummy_prefix": False},
    "suffix": {"treat_whitespace_as_suffix": True},
    "t5": {"normalization_rule_name": "nmt_nfkc", "byte_fallback": False, "remove_extra_whitespaces": True},
    "symbols": {"user_defined_symbols": "<sep>,abc", "control_symbols": "<mask>", "pad_id": 3},
}


@pytest.mark.parametrize("kind", KINDS)
@examples(60)
@given(text=TEXTS)
def test_sentencepiece_ids_are_its_own(kind: str, text: str) -> None:
    spm = pytest.importorskip("sentencepiece")
    oracle = spm.SentencePieceProcessor(model_proto=sentencepiece_model(**KINDS[kind]))
    tokenizer = sentencepiece(**KINDS[kind])
    ids = tokenizer.encode(text)
    assert ids.tolist() == oracle.encode(text)
    assert tokenizer.encode_batch([text, "a"])[0].tolist() == ids.tolist()
    if kind != "t5" and "▁" not in text and text:
        assert tokenizer.decode(ids) == text
        assert document_bytes(tokenizer, text) == len(text.encode())
    elif kind == "t5":
        assert not tokenizer.token_byte_counts().any()
        assert tokenizer.decode(ids).replace(" ", "") in oracle.decode(ids.tolist()).replace(" ", "").replace("⁇", "")


def test_sentencepiece_special_tokens() -> None:
    tokenizer = sentencepiece(**KINDS["symbols"])
    assert tokenizer.special == SpecialTokenIds(unk=0, bos=1, eos=2, pad=3)
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (2, 3, 420)
    model = sentencepiece_model()
    named = sentencepiece_tokenizer.build_sentencepiece_tokenizer(
        model, {"eos": "<|stop|>"}, ["<extra_id_0>", "</s>", "<extra_id_0>"]
    )
    assert (named.eos_id, named.pad_id, named.vocab_size) == (420, 420, 422)
    assert named.encode("a<extra_id_0></s>").tolist() == sentencepiece().encode("a<extra_id_0></s>").tolist()
    assert named.decode([420, 421, *named.encode("text").tolist()]) == "text"
    again = tokenizer_from_dict(json.loads(json.dumps(named.to_dict())))
    assert again.to_dict() == named.to_dict()


def test_sentencepiece_without_eos_claims_no_bytes() -> None:
    tokenizer = sentencepiece(eos_id=-1, bos_id=-1)
    assert tokenizer.eos_id is None
    assert not tokenizer.token_byte_counts().any()


def test_sentencepiece_models_that_are_none() -> None:
    model = sentencepiece_model()
    for bad in (b"", b"\x00", b"garbage" * 100, model[:1000], model[:-5], bytes(1000)):
        with pytest.raises(ValueError, match="SentencePiece model"):
            sentencepiece_tokenizer.build_sentencepiece_tokenizer(bad, {})
    good = sentencepiece().to_dict()
    assert good["model"] == base64.b64encode(model).decode()
    bad_added = ({"added": tokens} for tokens in (["</s>"], [1], ["x", "x"], None))
    for change in ({"model": "ö"}, {"model": 1}, {"more": 1}, *bad_added):
        with pytest.raises(ValueError):
            tokenizer_from_dict({**good, **change})


def test_sentencepiece_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UserError, match=r"pip install 'sentencepiece>=0\.2\.1'") as caught:
        sentencepiece_tokenizer.build_sentencepiece_tokenizer(b"model", {})
    assert len(caught.value.lines) == 1


# ---------------------------------------------------------------- all of them


@cache
def every_kind() -> list[Tokenizer]:
    found: list[Tokenizer] = [
        gpt2(),
        build_json_tokenizer(changed(), {}),
        build_json_tokenizer(canonical_json(json.dumps(llama_like())), {}),
    ]
    try:
        return [*found, sentencepiece()]
    except pytest.skip.Exception:
        return found


def test_documents_rebuild_them() -> None:
    for tokenizer in every_kind():
        assert isinstance(tokenizer, Tokenizer)
        again = tokenizer_from_dict(json.loads(json.dumps(tokenizer.to_dict())))
        assert again.to_dict() == tokenizer.to_dict()
        assert (again.vocab_size, again.eos_id, again.pad_id) == (
            tokenizer.vocab_size,
            tokenizer.eos_id,
            tokenizer.pad_id,
        )
        assert again.encode(SCRIPTS).tolist() == tokenizer.encode(SCRIPTS).tolist()


def test_special_ids_of_a_document_are_checked() -> None:
    good = gpt2().to_dict()
    for special in (
        None,
        {},
        {"eos": 0},
        *({**SpecialTokenIds().to_dict(), "eos": bad} for bad in (-1, 10**6, "0", 1.0, True)),
    ):
        with pytest.raises(ValueError):
            tokenizer_from_dict({**good, "special": special})


def test_lone_surrogates_and_bad_ids() -> None:
    for tokenizer in every_kind():
        with pytest.raises(UserError, match="lone surrogate at position 1"):
            tokenizer.encode_batch(["fine", "a\udc80"])
        assert tokenizer.decode([tokenizer.vocab_size, tokenizer.eos_id or 0]) == ""
        with pytest.raises(ValueError, match=r"\(-1\)"):
            tokenizer.decode([-1])
        assert tokenizer.encode("").tolist() == []
        assert tokenizer.encode_batch([]) == []


@pytest.mark.parametrize(
    "build", [gpt2, lambda: build_json_tokenizer(canonical_json(json.dumps(llama_like())), {}), sentencepiece]
)
def test_a_word_without_end_is_one_line(build: Callable[[], Tokenizer]) -> None:
    """Of 60 MB, it would take 9 GB of memory."""
    with pytest.raises(UserError, match="more than 4,194,304 characters without white space") as caught:
        build().encode("a " + "b" * ((4 << 20) + 1))
    assert len(caught.value.lines) == 1
