"""Interpolations mean what they mean in OmegaConf with NeMo's resolvers, within bounds, and never leave the set."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tiers import looped

from stoker.trainer.config.interpolation import InterpolationError, Resolver
from stoker.trainer.config.resolvers import RESOLVERS

pytestmark = pytest.mark.filterwarnings("ignore:register_new_resolver")

TREE: dict[str, Any] = {
    "n": 12,
    "x": 0.5,
    "text": "word",
    "yes": True,
    "none": None,
    "list": [1, "${n}", 3],
    "model": {"hidden": 768, "heads": 12, "inner": {"a": 4, "up": "${..hidden}", "same": "${.a}"}},
    "ref": "${model.hidden}",
    "block": "${model.inner}",
}


@pytest.fixture(autouse=True)
def _nemo_resolvers() -> Iterator[None]:
    for name, function in RESOLVERS.items():
        OmegaConf.register_new_resolver(name, function, replace=True)
    yield
    OmegaConf.clear_resolvers()


def ours(text: str, environ: dict[str, str] | None = None) -> Any:
    return Resolver({**TREE, "probe": text}, environ or {}).resolve("probe").value


def theirs(text: str) -> Any:
    value = OmegaConf.create({**TREE, "probe": text})["probe"]
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


EXPRESSIONS = [
    "${n}",
    "${model.hidden}",
    "${.n}",
    "${model.inner.up}",
    "${model.inner.same}",
    "${ref}",
    "${block}",
    "${block.a}",
    "${list}",
    "${list.1}",
    "${list[1]}",
    "${model[heads]}",
    "${none}",
    "${yes}",
    "a-${n}-${x}-${yes}-${none}",
    "${text}${text}",
    "${multiply:4,${n}}",
    "${multiply:4, ${.n}}",
    "${multiply: 4 , ${ n } }",
    "${multiply:${model.hidden},${x}}",
    "${sum:${n},-1}",
    "${sum:1,2,3,4.5}",
    "${divide_ceil:${n},5}",
    "${divide_floor:${n},5}",
    "${multiply:${divide_floor:${model.hidden},${model.heads}},${sum:1,1}}",
    "${oc.select:nothing,7}",
    "${oc.select:nothing}",
    "${oc.select:n,7}",
    "${oc.select:'model.hidden',7}",
    "\\${n}",
    "\\\\${n}",
    "a\\b${n}",
    "\\${n} ${n}",
    "plain",
    "$n {n}",
    "${mo${none_}del.hidden}".replace("${none_}", ""),
    "${${text_ref}}".replace("${text_ref}", "n"),
]


@looped("text", EXPRESSIONS)
def test_as_omegaconf(text: str) -> None:
    expected = theirs(text)
    assert (ours(text), type(ours(text))) == (expected, type(expected))


@given(st.text(alphabet="${}.:,n\\'x m", max_size=12))
def test_never_another_value_than_omegaconf(text: str) -> None:
    """Where both give a value it is the same; what one refuses the other may, but nothing else is raised."""
    try:
        mine = ours(text)
    except InterpolationError:
        return
    try:
        expected = theirs(text)
    except (OmegaConfBaseException, ValueError, TypeError):
        return
    assert mine == expected or str(mine).strip() == str(expected).strip()


@looped(
    ("text", "says"),
    [
        ("${nothing}", "`nothing`, which does not exist"),
        ("${model.nothing}", "`model.nothing`"),
        ("${probe}", "refers to itself"),
        ("${n", "without `}`"),
        ("${}", "empty"),
        ("${....n}", "goes above the root"),
        ("${eval:1}", "use one of multiply"),
        ("${multiply:a,2}", "takes numbers"),
        ("${multiply:${yes},2}", "takes numbers"),
        ("${divide:1,0}", "divide by zero"),
        ("${divide_floor:1,2,3}", "takes 2 numbers"),
        ("a ${block}", "inserts a list or a block into text"),
        ("${oc.env:NOT_SET}", "`NOT_SET`, which is not set"),
        ("${multiply:" + "9" * 400 + ",2}", "64 bits"),
        ("${sum:'a}", "an unterminated quote"),
        ("${int:word}", "`int` takes numbers, but was given 'word'"),
        ("${int:1,2}", "`int` takes one number, but was given 2"),
        ("${int:1e400}", "infinity"),
        ("${int:1e300}", "beyond 128 bits"),
        ("${not:1}", "`not` takes true or false, but was given 1"),
        ("${not:true,false}", "`not` takes true or false"),
        ("${gpu_name:0}", "`gpu_name`, which is not supported"),
    ],
)
def test_refusals(text: str, says: str) -> None:
    with pytest.raises(InterpolationError, match=r".") as caught:
        ours(text)
    assert says in str(caught.value)


def test_circles_name_the_way() -> None:
    resolver = Resolver({"a": "${b.c}", "b": {"c": "${d}"}, "d": "${a}"}, {})
    with pytest.raises(InterpolationError, match=r"`a` -> `b\.c` -> `d` -> `a`"):
        resolver.resolve("a")


@pytest.mark.parametrize(
    "tree",
    [
        {f"k{i}": f"${{k{i + 1}}}${{k{i + 1}}}" for i in range(40)} | {"k40": "x" * 40},
        {f"k{i}": {"l": f"${{k{i + 1}}}", "r": f"${{k{i + 1}}}"} for i in range(40)} | {"k40": 1},
        {f"k{i}": f"${{k{i + 1}}}" for i in range(500)} | {"k500": 1},
        {"k0": "${" * 5000},
        {"k0": "${sum:" * 500 + "1" + "}" * 500},
    ],
    ids=["text", "blocks", "chain", "open", "nested"],
)
def test_expansion_is_bounded(tree: dict[str, Any]) -> None:
    with pytest.raises(InterpolationError):
        Resolver(tree, {}).resolve("k0")


def test_environment_is_known_and_typed() -> None:
    tree = {"a": "${oc.env:W}", "b": "${multiply:2,${a}}", "c": "${oc.env:W}/x", "d": "${oc.env:NO,7}", "e": 1}
    resolver = Resolver(tree, {"W": "64"}, is_text=lambda path: path == "c")
    assert [resolver.resolve(key).value for key in "abcde"] == [64, 128, "64/x", 7, 1]
    assert [resolver.resolve(key).from_environment for key in "abcde"] == [True, True, True, True, False]


def test_missing_stays_missing() -> None:
    resolver = Resolver({"a": "???", "b": "${a}", "c": "${sum:${a},1}", "d": "x${a}"}, {})
    assert {resolver.resolve(key).value for key in "bcd"} == {"???"}


def test_division() -> None:
    assert RESOLVERS["divide"](4096, 32) == 128
    assert isinstance(RESOLVERS["divide"](4096, 32), int)
    assert math.isclose(RESOLVERS["divide"](1, 4), 0.25)
    assert (RESOLVERS["divide_ceil"](7, 2), RESOLVERS["divide_floor"](-7, 2), RESOLVERS["subtract"](1, 3)) == (
        4,
        -4,
        -2,
    )
    whole = [ours("${divide_ceil:7.5,2}"), ours("${divide_floor:7.5,2}"), ours("${int_div:7,2}")]
    assert (whole, {type(number) for number in whole}) == ([4, 3, 3], {int})


def test_resolvers_that_nemo_registers() -> None:
    environ = {"NODES": "4"}
    assert (ours("${int:7.9}"), ours("${int:${oc.env:NODES}}", environ)) == (7, 4)
    assert (ours("${not:${yes}}"), ours("${not:false}")) == (False, True)
    assert ours("${gpu_name:}") is None  # NeMo's on a machine without A100 or H100


def test_reference_in_the_model_may_start_at_the_model() -> None:
    """NeMo passes `model` on as a configuration of its own; the root has precedence, as in the whole file."""
    data = {"train_ds": {"eos": False}, "test_ds": {"eos": "${data.train_ds.eos}", "name": "${name}"}}
    tree = {"name": "root", "data_dir": "${data.train_ds.eos}", "model": {"name": "model", "data": data}}
    resolver = Resolver(tree, {})
    assert resolver.resolve("model.data.test_ds").value == {"eos": False, "name": "root"}
    with pytest.raises(InterpolationError, match=r"`data\.train_ds\.eos`, which does not exist"):
        resolver.resolve("data_dir")


def test_sources_are_all_values_on_the_way() -> None:
    resolver = Resolver({"a": "${b}/${c.d}", "b": 1, "c": {"d": ["${e}"], "f": 2}, "e": 3, "g": ["${b}", 7]}, {})
    assert resolver.resolve("g").sources == {"g", "g.0", "g.1", "b"}
    assert resolver.resolve("c").sources == {"c", "c.d", "c.d.0", "c.f", "e"}


def test_expanded_text_is_bounded() -> None:
    tree = {f"k{i}": f"${{k{i + 1}}}${{k{i + 1}}}" for i in range(60)} | {"k60": "${oc.env:EMPTY}"}
    resolver = Resolver(tree, {"EMPTY": ""})
    assert resolver.resolve("k0").value == ""
    with pytest.raises(InterpolationError, match="64 KiB"):
        resolver.expand("k0", lambda path: False)


def test_call_without_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(*arguments: Any) -> int:
        return len(arguments)

    OmegaConf.register_new_resolver("count", count)
    monkeypatch.setattr("stoker.trainer.config.interpolation.RESOLVERS", {"count": count})
    for text in ("${count:}", "${count: }", "${count:''}", "${count:${n}}"):
        assert ours(text) == theirs(text), text
    with pytest.raises(InterpolationError, match="--import MODULE"):
        ours("${eval:1}")
