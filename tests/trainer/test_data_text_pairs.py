"""Pairs of texts: JSONL files, and functions of the standard library with their docstrings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from resolved import build_data
from tiers import full_only

from stoker.trainer.config.schema.root import RootBlock
from stoker.trainer.data.datasets.samples import IGNORE_INDEX
from stoker.trainer.data.datasets.seq2seq import PairShape
from stoker.trainer.data.sources.docstrings import (
    MAX_TARGET_CHARACTERS,
    docstring_pairs,
    documented_functions,
    read_docstrings,
)
from stoker.trainer.data.sources.text_pairs import TextPair, TokenPairs, read_text_pairs
from stoker.trainer.data.sources.text_sources import Corpus
from stoker.trainer.data.tokenizers.tokenizer import ByteTokenizer, CharTokenizer
from stoker.trainer.utils.errors import UserError

SHARES = (0.6, 0.2, 0.2)


def write(path: Path, pairs: list[tuple[str, str]], names: tuple[str, str] = ("input", "output")) -> Path:
    path.write_text("".join(json.dumps(dict(zip(names, pair, strict=True))) + "\n\n" for pair in pairs))
    return path


PAIRS = [(f"what is {n} + {n}?", f"{2 * n}") for n in range(60)]


def root(path: Path, **data: Any) -> RootBlock:
    data = {"data_impl": "jsonl", "dataset_type": "seq2seq", "path": str(path), "splits_string": "60,20,20", **data}
    return RootBlock.model_validate({"model": {"family": "t5", "seq_length": 32, "data": data}})


def test_equal_inputs_are_on_one_side_and_lines_stay_there(tmp_path: Path) -> None:
    first = read_text_pairs(write(tmp_path / "a.jsonl", [*PAIRS, *PAIRS]), SHARES, "input", "output").pairs
    more = [("one more", "line"), *PAIRS]
    second = read_text_pairs(write(tmp_path / "b.jsonl", more), SHARES, "input", "output").pairs
    for split in ("train", "validation", "test"):
        assert len(first[split]) > 6
        assert first[split] == 2 * [pair for pair in second[split] if pair.input != "one more"]


def test_files_named_by_split_are_the_splits(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", PAIRS[:40])
    write(tmp_path / "validation.jsonl", PAIRS[40:])
    pairs = read_text_pairs(tmp_path, SHARES, "input", "output").pairs
    assert [len(pairs[split]) for split in ("train", "validation", "test")] == [40, 20, 0]
    (tmp_path / "train.jsonl").rename(tmp_path / "other.jsonl")
    with pytest.raises(UserError, match=r"holds validation\.jsonl, but no train\.jsonl"):
        read_text_pairs(tmp_path, SHARES, "input", "output")
    assert len(read_text_pairs(tmp_path, (0.0, 1.0, 0.0), "input", "output").pairs["validation"]) == 60
    (tmp_path / "validation.jsonl").rename(tmp_path / "more.jsonl")
    pairs = read_text_pairs(tmp_path, SHARES, "input", "output").pairs
    assert sum(map(len, pairs.values())) == 60
    assert pairs["test"]


def test_the_fingerprint_is_that_of_the_pairs(tmp_path: Path) -> None:
    prints = [
        read_text_pairs(write(tmp_path / "a.jsonl", pairs), SHARES, "input", "output").fingerprint
        for pairs in (PAIRS, PAIRS, [*PAIRS[:-1], ("what is 59 + 59?", "0")])
    ]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[1]", "line 2 of .* must be a JSON object; each line must be one"),
        ("[", r"line 2 of .* is not JSON \(Expecting value at column 3\); each line must be one object"),
        ('{"input": "x"', "line 2 of .* is not JSON"),
        ('{"input": "x", "label": "y"}', "must have a text `output`; it has `input`, `label`.*label_key=label"),
        (
            '{"completion": "x", "prompt": "y"}',
            r"`; set model\.data\.context_key=prompt model\.data\.label_key=completion$",
        ),
        ('{"input": "x"}', r"it has `input` \(`model\.data\.label_key` names it\)"),
        ('{"input": 3, "output": "y"}', r"line 2 of .*: `input` is a number \(3\), not a text"),
        ('{"input": "x", "output": null}', "`output` is null, not a text"),
        ('{"input": "x", "output": ["y"]}', "`output` is a list, not a text"),
        ('{"input": "x", "output": "\\ud800"}', "line 2 of .*`output`: .* lone surrogate"),
        (json.dumps({"x" * 5000: "x"}), "must have a text `input`; it has `x{40}`"),
        ("[" * 100_000, "line 2 of .* is not JSON"),
    ],
)
def test_bad_lines_are_told_with_their_place(line: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"input": "a", "output": "b"}\n' + line + "\n")
    with pytest.raises(UserError, match=says) as caught:
        read_text_pairs(file, SHARES, "input", "output")
    assert len(caught.value.lines) == 1
    assert len(caught.value.lines[0]) < 700


def test_another_encoding_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"input": "é", "output": "b"}'.encode("latin-1"))
    with pytest.raises(UserError, match=r"line 1 of .* is not UTF-8: bad byte at offset 11"):
        read_text_pairs(tmp_path / "a.jsonl", SHARES, "input", "output")


def test_missing_and_empty_places_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        read_text_pairs(tmp_path / "none.jsonl", SHARES, "input", "output")
    with pytest.raises(UserError, match=r"holds no \.jsonl"):
        read_text_pairs(tmp_path, SHARES, "input", "output")
    with pytest.raises(UserError, match=r"validation split of .* is empty: 1 example, 1 distinct input, and equal"):
        build_data(root(write(tmp_path / "one.jsonl", PAIRS[:1]), splits_string="100,0.001,0"))
    with pytest.raises(UserError, match=r"is empty: 40 examples, 1 distinct input, .* more examples or a larger share"):
        build_data(root(write(tmp_path / "equal.jsonl", 40 * PAIRS[:1]), splits_string="100,0.001,0"))
    (tmp_path / "blank.jsonl").write_text("\n \n")
    with pytest.raises(UserError, match=r"^`model\.data\.path`: .*blank\.jsonl holds no example$"):
        read_text_pairs(tmp_path / "blank.jsonl", SHARES, "input", "output")


def test_pairs_become_rows_and_long_ones_are_cut() -> None:
    tokenizer = ByteTokenizer(3)
    pairs = TokenPairs([TextPair("abc", "de"), TextPair("abcdefgh", "ijklm")], tokenizer, PairShape(5, 4, 0))
    rows = [pairs.pair(number, None) for number in range(2)]  # pyrefly: ignore[bad-argument-type]
    assert [tokenizer.decode(row.encoder) for row in rows] == ["abc", "abcd"]
    assert [tokenizer.decode(row.decoder) for row in rows] == ["de", "ijk"]
    assert all(row.encoder[-1] == row.decoder[-1] == 1 for row in rows)
    assert pairs.num_truncated == (1, 1)
    assert [side.tolist() for side in pairs.lengths()] == [[4, 5], [3, 4]]


def test_a_text_that_has_no_tokens_is_told_with_its_pair() -> None:
    pairs = [TextPair("ab", "b"), TextPair("a", "abc")]
    with pytest.raises(UserError, match="the target of pair 2: "):
        TokenPairs(pairs, CharTokenizer("ab"), PairShape(5, 4, 0))


@pytest.mark.parametrize("packs", [False, True])
def test_an_epoch_shows_every_pair_once(packs: bool, tmp_path: Path) -> None:
    data = build_data(root(write(tmp_path / "a.jsonl", PAIRS), packed_sequence=packs, seq_length_dec=16))
    assert data.pairs is not None
    assert data.vocab_size == 384
    epochs = []
    for epoch in range(2):
        batch = data.train.batch(epoch * data.train.samples, data.train.samples)
        real = batch["labels"] != IGNORE_INDEX
        text = data.tokenizer.decode(torch.where(batch["labels"] == 1, ord("|") + 3, batch["labels"])[real].numpy())
        epochs.append(text.split("|")[:-1])
        assert sorted(epochs[epoch]) == sorted(pair.target for pair in data.pairs.pairs["train"])
    assert epochs[0] != epochs[1]


def test_other_names_of_the_keys(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", PAIRS, ("question", "answer"))
    data = build_data(root(file, context_key="question", label_key="answer"))
    assert data.pairs is not None
    assert any(TextPair(*PAIRS[0]) in of_split for of_split in data.pairs.pairs.values())


MODULE = '''
def one(a):
    """Do one thing.

    More about it.
    """
    text = """
    kept as it is
    """
    return text


class Thing:
    @property
    def two(self):
        "Tell\\n   two things."
        def inner():
            r"""Be inside."""
            return 2
        return inner()

    def nothing(self):
        """Only a docstring."""

    def same_line(self): "Too short."; return 1

    def silent(self):
        return 0
'''


def test_functions_and_what_they_say() -> None:
    found = dict(documented_functions(MODULE))
    assert list(found) == ["one", "two", "inner"]
    assert found["one"] == (
        'def one(a):\n    text = """\n    kept as it is\n    """\n    return text\n',
        "Do one thing.",
    )
    assert found["two"].input.startswith("def two(self):\n    def inner():")
    assert found["two"].target == "Tell two things."
    assert found["inner"] == ("def inner():\n    return 2\n", "Be inside.")
    assert list(documented_functions("def broken(:\n")) == []
    assert list(documented_functions("x = '\\d'\n\f\ndef f():\n    'Say.'\n    return x\n")) == [
        ("f", ("def f():\n    return x\n", "Say."))
    ]


def test_nothing_held_out_was_trained_on() -> None:
    copy = MODULE.replace("return text", "return text + ''").replace("More about it", "Less about it")
    other = "def three():\n    '''Tell\n    two things.'''\n    return 3\n"
    texts = {"train": [MODULE], "validation": [copy, other], "test": [MODULE]}
    pairs = docstring_pairs(Corpus("modules", texts, "", 3)).pairs  # pyrefly: ignore[bad-argument-type]
    assert len(pairs["train"]) == 3
    assert [pair.input for pair in pairs["validation"]] == ["def three():\n    return 3\n"]
    assert pairs["test"] == []


@full_only
def test_the_standard_library_has_thousands() -> None:
    pairs = read_docstrings((0.9, 0.05, 0.05))
    assert read_docstrings((0.9, 0.05, 0.05)) == pairs
    inputs = [pair.input for of_split in pairs.pairs.values() for pair in of_split]
    assert len(inputs) == len(set(inputs)) > 3000
    assert min(map(len, pairs.pairs.values())) > 100
    for of_split in pairs.pairs.values():
        assert all(0 < len(pair.target) <= MAX_TARGET_CHARACTERS and "\n" not in pair.target for pair in of_split)
        assert all("def " in pair.input for pair in of_split)
