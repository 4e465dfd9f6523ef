"""`--import MODULE`: code of the user's own, by their wish on the command line and in no other way."""

import sys

import pytest
from resolved import build_data

import stoker
from stoker.models.config import extensions
from stoker.trainer.cli import main
from stoker.trainer.config.schema.root import RootBlock
from stoker.trainer.utils.errors import UserError
from stoker.trainer.utils.import_modules import import_plugins

MODULE = """
import stoker
from stoker.trainer.data.datasets.samples import MockSamples

@stoker.register("dataset", "my_dice")
def samples(data, split, sequence_length, tokenizer, seed):
    return MockSamples(6, sequence_length, seed, 1000)
"""


@pytest.fixture
def here(tmp_path, monkeypatch, nothing_registered):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if name.startswith("my_"):
            del sys.modules[name]


def test_a_data_set_is_registered_and_found_by_name(here, capsys):
    (here / "my_data.py").write_text(MODULE)
    assert main.main(["config", "model.data.data_impl=my_dice"]) == 2
    assert "must be one of" in capsys.readouterr().err
    assert main.main(["config", "--import", "my_data", "model.data.data_impl=my_dice"]) == 0
    assert extensions.load_extension("dataset", "my_dice") is sys.modules["my_data"].samples
    keys = {"encoder_seq_length": 8, "data": {"data_impl": "my_dice"}}
    assert build_data(RootBlock.model_validate({"model": keys})).train.batch(0, 4).tokens.max() < 6


def test_the_current_directory_stands_in_for_nobody(here):
    (here / "json.py").write_text("raise SystemExit")
    (here / "my_pack").mkdir()
    (here / "my_pack" / "my_part.py").write_text("import json\nVALUE = json.dumps(1)")
    import_plugins(["my_pack.my_part"])
    assert sys.modules["my_pack.my_part"].VALUE == "1"
    assert sys.path[-1] == str(here)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("my_none", None, "--import my_none: there is no such module, neither installed nor in "),
        ("my_none.part", None, "--import my_none.part: there is no such module"),
        ("my_file.py", "", "--import my_file.py: write the name of the module, --import my_file"),
        ("my/file", None, "not a module name"),
        ("", None, "not a module name"),
        ("my_needs", "x = 1\nimport my_missing", "No module named 'my_missing' ({here}/my_needs.py:2)"),
        ("my_bug", "def f():\n    1 / 0\nf()", "ZeroDivisionError: division by zero ({here}/my_bug.py:2)"),
        ("my_typo", "x = (", "SyntaxError: '(' was never closed (my_typo.py, line 1) ({here}/my_typo.py:1)"),
    ],
)  # fmt: skip
def test_what_cannot_be_imported_is_one_line(here, name, text, says):
    if text is not None:
        (here / f"{name.removesuffix('.py')}.py").write_text(text)
    with pytest.raises(UserError) as error:
        import_plugins([name])
    [line] = error.value.lines
    assert says.replace("{here}", str(here)) in line


def test_a_name_has_one_component(here):
    with pytest.raises(ValueError, match="'mock' is already provided by stoker"):
        stoker.register("dataset", "mock")
    with pytest.raises(ValueError, match=r"`kind` \('data_set'\) must be one of activation, "):
        stoker.register("data_set", "mine")  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(ValueError, match="`name` must not be empty"):
        stoker.register("dataset", "")
    stoker.register("dataset", "mine")(test_a_name_has_one_component)
    stoker.register("dataset", "mine")(test_a_name_has_one_component)
    stoker.register("metric", "mine")(len)
    with pytest.raises(ValueError, match=r"the dataset 'mine' is already provided by .*; use another name"):
        stoker.register("dataset", "mine")(len)


def test_other_verbs_take_no_code(here, capsys):
    assert main.main(["doctor", "--import", "x"]) == 2
    assert "stoker doctor: unknown: --import" in capsys.readouterr().err
