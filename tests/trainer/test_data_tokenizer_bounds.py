"""Tokenizer files of unknown cost run in a separate process, with the same tokens; those of the usual models do not."""

from __future__ import annotations

import base64
import io
import json
import os
import threading
from functools import cache
from typing import Any

import pytest
from tiers import looped

from stoker.trainer.data.tokenizers import isolated_encoder, sentencepiece_tokenizer, token_bytes, tokenizer_json
from stoker.trainer.data.tokenizers.definition_bounds import longest_replacement, unbounded_part
from stoker.trainer.data.tokenizers.tokenizer_json import JsonTokenizer, build_json_tokenizer, canonical_json
from stoker.trainer.utils.errors import UserError

tokenizers = pytest.importorskip("tokenizers")

MODEL: dict[str, Any] = {"type": "BPE", "vocab": {chr(code): code - 32 for code in range(32, 127)}, "merges": []}
TEXT = "a  b 'cc' 123\n\n  x"
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace("{1,3}", "")
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def split(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def sequence(name: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {name: {"type": "Sequence", {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}[name]: [*steps]}}


def template(*names: str) -> dict[str, Any]:
    pieces = [{"Sequence": {"id": name, "type_id": 0}} for name in names]
    return {"type": "TemplateProcessing", "single": pieces, "pair": [*pieces, *pieces], "special_tokens": {}}


def definition(**parts: Any) -> str:
    added = [tokenizer_json.added_token(95, "<s>")]
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return canonical_json(json.dumps({"version": "1.0", "added_tokens": added, **empty, "model": MODEL, **parts}))


def part(**parts: Any) -> str | None:
    return unbounded_part({"model": MODEL, **parts})


@cache
def charsmap() -> bytes:
    """A map of `a` to `b`: the root at 0 has its letters at 256 ^ letter, and `a` its value 0 at 256."""
    units = [0] * 512
    units[0] = 256 << 10
    units[256 ^ 97] = 97 << 10 | 0x100 | 97
    return (4 * len(units)).to_bytes(4, "little") + b"".join(unit.to_bytes(4, "little") for unit in units) + b"b\0"


@looped(
    "parts",
    [
        {"pre_tokenizer": split(LLAMA_3)},
        {"pre_tokenizer": split(QWEN_2)},
        {"pre_tokenizer": split(GPT_4O)},
        sequence("pre_tokenizer", split(r"\p{N}{1,3}"), split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+")),
        sequence("normalizer", {"type": "Prepend", "prepend": "\u2581"}, replace(" ", "\u2581")),
        sequence("normalizer", {"type": "NFKC"}, {"type": "Lowercase"}, replace(" {2,}", " ", "Regex")),
        {"normalizer": replace("\n", "<n>")},
        {"post_processor": template("A")},
        {"model": {"type": "WordPiece", "max_input_chars_per_word": 100}},
        {"model": {"type": "Unigram", "vocab": [["a" * 16, -1.0]]}},
    ],
)
def test_usual_parts_are_bounded(parts: dict[str, Any]) -> None:
    assert part(**parts) is None


@looped(
    ("parts", "field"),
    [
        ({"pre_tokenizer": split(r"(\d+)+x")}, "pre_tokenizer"),
        ({"pre_tokenizer": split(r"a*a*b")}, "pre_tokenizer"),
        ({"pre_tokenizer": {"type": "Unheard"}}, "pre_tokenizer"),
        (sequence("normalizer", *[replace("a", "aa")] * 6), "normalizer"),
        (sequence("normalizer", *[{"type": "NFC"}] * 17), "normalizer"),
        (sequence("normalizer", *[{"type": "Sequence", "normalizers": []}] * 40), "normalizer"),
        ({"normalizer": replace("", "a")}, "normalizer"),
        ({"normalizer": replace("x", "a" * 40, "Regex")}, "normalizer"),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 17}}, "normalizer"),
        ({"normalizer": "NFC"}, "normalizer"),
        ({"post_processor": template("A", "A")}, "post_processor"),
        ({"post_processor": {"type": "Sequence", "processors": [template("A")] * 2}}, "post_processor"),
        ({"model": {"type": "WordPiece", "max_input_chars_per_word": 1 << 40}}, "model"),
        ({"model": {"type": "Unigram", "vocab": [["a" * 1001, -1.0]]}}, "model"),
    ],
)
def test_parts_without_a_known_bound(parts: dict[str, Any], field: str) -> None:
    assert part(**parts) == field


def test_a_tokenizer_of_unknown_cost_makes_the_same_tokens() -> None:
    """Tokens, offsets and the tokens of the post-processor, also from several threads and in a fork."""
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    post: dict[str, Any] = {"type": "TemplateProcessing", "single": single}
    post["pair"] = [*single, {"Sequence": {"id": "B", "type_id": 0}}]
    post["special_tokens"] = {"<s>": {"id": "<s>", "ids": [95], "tokens": ["<s>"]}}
    text = definition(pre_tokenizer=split("(?: ?[a-z])+|[0-9]"), normalizer=replace("x", "yz"), post_processor=post)
    ours, theirs = build_json_tokenizer(text, {}), tokenizers.Tokenizer.from_str(text)
    assert ours._isolated is not None
    encoding = theirs.encode(TEXT, add_special_tokens=False)
    ids, offsets = ours.encode_with_offsets(TEXT)
    assert ids.dtype == ours._dtype
    assert (ids.tolist(), offsets.tolist()) == (encoding.ids, [list(place) for place in encoding.offsets])
    assert [found.tolist() for found in ours.encode_batch([TEXT, "", "b"])] == [encoding.ids, [], [66]]
    assert ours.post_processor_tokens() == ([95], [])
    with pytest.raises(UserError, match="lone surrogate"):
        ours.encode("a\ud800")
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(ours.encode(TEXT).tolist())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [encoding.ids] * 4
    isolated = ours._isolated._process
    assert isolated is not None
    isolated._owner = os.getppid()  # as in a fork, which must leave its parent's process alone
    assert ours.encode(TEXT).tolist() == encoding.ids
    assert ours._isolated._process is not isolated
    assert isolated.process.poll() is None
    isolated.close()


def test_a_text_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is ended, and another encodes the next text."""
    tokenizer = build_json_tokenizer(definition(pre_tokenizer=split("(?:a|b|ab)+c|.")), {})
    assert isinstance(tokenizer, JsonTokenizer)
    assert tokenizer._isolated is not None
    monkeypatch.setattr(isolated_encoder, "ENCODE_TIMEOUT", 0.0)
    monkeypatch.setattr(isolated_encoder, "BYTES_PER_SECOND", 1 << 60)
    with pytest.raises(UserError, match=r"exceeded the limits of 0 seconds .* simplify its `pre_tokenizer`"):
        tokenizer.encode("ab" * 2000)
    monkeypatch.undo()
    assert tokenizer.encode("ab").tolist() == [65, 66]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x01", "header"),
        (b"\xff\xff\xff\xff" + bytes(1024), "header names a trie of 4,294,967,295 bytes"),
        (charsmap()[:300], "header"),
        (charsmap()[:4] + b"\0\xfe\xff\x7f" + charsmap()[8:], "leads outside"),
        (charsmap()[:-2] + b"\x80\0", "leads outside"),
        (charsmap()[:-2] + b"b\xff\0", "not UTF-8"),
    ],
    ids=range(6),
)
def test_damaged_character_maps(data: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        part(normalizer={"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()})


def test_good_character_maps() -> None:
    step = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap()).decode()}
    assert part(normalizer=step) is None
    assert build_json_tokenizer(definition(normalizer=step), {}).encode("aab").tolist() == [66, 66, 66]
    assert part(**sequence("normalizer", step, step)) == "normalizer"
    long = base64.b64encode(charsmap()[:-2] + b"b" * 65 + b"\0").decode()
    assert part(normalizer={**step, "precompiled_charsmap": long}) == "normalizer"


def test_padding_in_a_checkpoint_is_refused() -> None:
    parsed = json.loads(definition()) | {"padding": {"strategy": {"Fixed": 10**12}}}
    with pytest.raises(ValueError, match="`padding` must be null"):
        JsonTokenizer(json.dumps(parsed), build_json_tokenizer(definition(), {}).special)


def test_many_added_tokens_are_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A regular expression of all of them takes a second and 100 MB for each 20,000."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    vocabulary = {character: id_ for id_, character in enumerate(token_bytes.unicode_to_bytes())}
    added = [tokenizer_json.added_token(256 + number, f"<t{number}>") for number in range(3)]
    parts = {"pre_tokenizer": byte_level, "decoder": byte_level, "model": {**MODEL, "vocab": vocabulary}}
    text = definition(**parts, added_tokens=added)
    few = build_json_tokenizer(text, {})
    monkeypatch.setattr(tokenizer_json, "_MAX_CACHED_ADDED_TOKENS", 2)
    many = build_json_tokenizer(text, {})
    assert few._words is not None
    assert many._words is None
    assert few.encode("a <t2>b<t0>").tolist() == many.encode("a <t2>b<t0>").tolist()


def test_a_definition_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []
    load = tokenizer_json._load
    monkeypatch.setattr(tokenizer_json, "_load", lambda text, parsed: loads.append(text) or load(text, parsed))
    build_json_tokenizer(definition(), {})
    assert len(loads) == 1


def test_the_character_map_of_sentencepiece_is_good() -> None:
    spm = pytest.importorskip("sentencepiece")
    written = io.BytesIO()
    lines = [f"hello world {number} the quick brown fox" for number in range(100)]
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=written, vocab_size=40, minloglevel=2,
        normalization_rule_name="nmt_nfkc",
    )  # fmt: skip
    (rules,) = [value for field, value in sentencepiece_tokenizer._fields(written.getvalue()) if field == 3]
    assert isinstance(rules, bytes)
    (charsmap,) = [value for field, value in sentencepiece_tokenizer._fields(rules) if field == 2]
    assert isinstance(charsmap, bytes)
    assert longest_replacement(charsmap) == 33


@looped("names", [(), ("A", "A"), ("A", "B", "A")])
def test_templates_that_drop_or_repeat_the_text(names: tuple[str, ...]) -> None:
    """Also behind another post-processor; no special token is asked for, but the library applies its sequences."""
    for post_processor in (template(*names), {"type": "Sequence", "processors": [template("A"), template(*names)]}):
        with pytest.raises(ValueError, match="`post_processor` drops or repeats the text"):
            build_json_tokenizer(definition(post_processor=post_processor), {})
    whole = build_json_tokenizer(definition(post_processor=template("A")), {})
    assert whole.encode(TEXT).tolist() == build_json_tokenizer(definition(), {}).encode(TEXT).tolist()


def test_an_integer_of_thousands_of_digits() -> None:
    huge = definition().replace('"id":95', f'"id":{"9" * 5000}').replace('"id": 95', f'"id": {"9" * 5000}')
    with pytest.raises(ValueError, match=r"^it holds an integer of thousands of digits$"):
        build_json_tokenizer(huge, {})
