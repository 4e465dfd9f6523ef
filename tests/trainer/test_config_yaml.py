"""YAML is read within bounds, as plain values, with the line of every key."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from tiers import looped

from stoker.trainer.config import yaml_reader
from stoker.trainer.config.schema.key_index import format_value
from stoker.trainer.config.yaml_reader import YamlError, parse_scalar, parse_yaml

HERE = Path("x.yaml")


def refused(text: str) -> YamlError:
    with pytest.raises(YamlError) as caught:
        parse_yaml(text, HERE)
    return caught.value


@looped(
    "text",
    [
        "1",
        "-3",
        "0x1f",
        "017",
        "1_000",
        "1.5",
        "1e-5",
        "2E3",
        "-1.e+2",
        ".5",
        "true",
        "No",
        "off",
        "null",
        "~",
        "word",
        "1e5x",
        "12:30",
        ".inf",
        "'quoted'",
        "[1,a]",
        "{a:1}",
        "08",
    ],
)
def test_values_are_those_of_omegaconf(text: str) -> None:
    ours = parse_yaml(f"k: {text}", HERE).tree["k"]
    if text == "12:30":
        assert ours == "12:30"  # base 60 is not read, unlike YAML 1.1
        return
    theirs = OmegaConf.to_container(OmegaConf.create(f"k: {text}"))["k"]  # pyrefly: ignore[bad-index, unsupported-operation]
    assert (ours, type(ours)) == (theirs, type(theirs))


def test_dates_and_times_stay_text() -> None:
    tree = parse_yaml("a: 6:11:00:00\nb: 2026-01-01\nc: .nan", HERE).tree
    assert (tree["a"], tree["b"]) == ("6:11:00:00", "2026-01-01")
    assert tree["c"] != tree["c"]


def test_every_key_has_its_line() -> None:
    file = parse_yaml("# head\na:\n  b: 1\n\n  c:\n    d: [1,\n 2]\ne: 2\n", HERE)
    assert file.lines == {"a": 2, "a.b": 3, "a.c": 5, "a.c.d": 6, "e": 8}


def test_merge_keys_and_aliases() -> None:
    file = parse_yaml("base: &b {x: 1, y: 2}\nuse:\n  <<: *b\n  y: 3\nsame: *b\n", HERE)
    assert file.tree["use"] == {"x": 1, "y": 3}
    assert file.tree["same"] == {"x": 1, "y": 2}
    assert file.tree["same"] is not file.tree["base"]


def test_package_and_defaults_are_taken_out() -> None:
    file = parse_yaml("# a comment\n# @package model.data\ndefaults:\n  - .@model.encoder: base\nk: 1\n", HERE)
    assert (file.package, file.defaults, file.tree) == ("model.data", [{".@model.encoder": "base"}], {"k": 1})


@looped(
    ("text", "says", "line"),
    [
        ("a: 1\nb: 2\na: 3", "`a` is given twice", 3),
        ("m:\n  a: 1\n  a: 3", "`m.a` is given twice", 3),
        ("a: !!python/object/apply:os.system [ls]", "not objects", 1),
        ("a: !mine x", "not objects", 1),
        ("a: !!binary aGk=", "not objects", 1),
        ("a: 1\n---\nb: 2", "more than one document", 2),
        ("- 1\n- 2", "must hold keys", 1),
        ("a: [1", "is not YAML", 2),
        ("a:\n  {b: ${c}}", 'write "${name}"', 2),
        ("a: {b: [1, ${multiply:2, 3}]}", 'write "${name}"', 1),
        ("a: {b: ???, c: 1}", 'and "???" in quotes', 1),
        ("a: &x [*x]", "is inside its own anchor", 1),
        ("trainer.max_steps: 3", "must be one name", 1),
        ("? [a, b]\n: 1", "must be a name", 1),
        ("a: *nowhere", "has no anchor `&nowhere` before it", 1),
        ("a: 1\nb: !!int secret", "written as an integer that is none", 2),
        ("a: !!float x", "written as a number that is none", 1),
        ("a: 0x_", "written as an integer that is none", 1),
        ("a: 1\n\tb: 2", "is not YAML", 2),
        ("a:\n\tb: 2", "there is a tab in column 1; indent with spaces", 2),
        ("defaults: 3", "`defaults` must be a list", 1),
        ("a: \x00", "is not YAML", None),
        ("<<: 3", "`<<` must name a block", 1),
    ],
)
def test_refusals_name_the_line(text: str, says: str, line: int | None) -> None:
    error = refused(text)
    assert says in error.message, error.message
    assert "secret" not in error.message
    if line is not None:
        assert error.line == line


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [" + ", ".join([f"*a{i - 1}"] * 9) + "]" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (bomb(9), "values, aliases expanded"),
        ("a: " + "[" * 100_000, "nested deeper than 64"),
        ("a: " + "[" * 65 + "]" * 65, "nested deeper than 64"),
        ("a: &x 1\nb: [" + ", ".join(["*x"] * 101) + "]", "more than 100 aliases"),
        ("a: [" + "1," * 50_000 + "]", "more than 50000 values"),
    ],
)
def test_bounds_hold_before_anything_is_built(text: str, says: str) -> None:
    assert says in refused(text).message


def test_bounds_leave_room() -> None:
    parse_yaml("a: " + "[" * 63 + "]" * 63, HERE)
    parse_yaml("a: &x 1\nb: [" + ", ".join(["*x"] * 100) + "]", HERE)


def test_size_and_encoding(tmp_path: Path) -> None:
    large = tmp_path / "large.yaml"
    large.write_text("a: 1\n" + "#" * yaml_reader.MAX_BYTES)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"a: \xff")
    for path, says in (
        (large, "larger than 1024 KiB"),
        (binary, "not UTF-8"),
        (tmp_path / "none.yaml", "cannot be read"),
    ):
        with pytest.raises(YamlError, match=says):
            yaml_reader.read_yaml(path)


@pytest.mark.parametrize(("text", "value"), [("8", 8), ("1e-3", 1e-3), ("yes", True), ("a b", "a b"), ("[", "[")])
def test_scalar(text: str, value: Any) -> None:
    assert parse_scalar(text) == value


@looped(
    "value",
    ["word", "a b", "a: b", "a # c", "", " x ", "7", "true", "null", "1e-3", "it's", "a\nb", "tab\t", "${a:${b},1}",
     "- a", "[x", "é", "*a", "&a", "!t", "%x", "@x", "6:11:00:00", None, True, 1.5e-7, -3,
     [1, "a,b", "c"], ["x: y", None], {"a": "b}"}],
)  # fmt: skip
def test_shown_values_read_back(value: Any) -> None:
    shown = format_value(value)
    assert "\n" not in shown
    assert parse_yaml(f"k: {shown}", HERE).tree["k"] == value


def test_a_value_replaces_a_merged_block_and_its_lines() -> None:
    file = parse_yaml("base: &b {x: {y: 1}, z: 2}\nuse:\n  <<: *b\n  x: 3\nk:\n  use:\n    <<: *b\n", HERE)
    assert file.tree["use"] == {"x": 3, "z": 2}
    assert "use.x.y" not in file.lines
    assert file.lines["use.x"] == 4
    assert file.lines["k.use.x.y"] == 1
