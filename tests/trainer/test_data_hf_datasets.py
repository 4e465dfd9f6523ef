"""Data sets of Hugging Face's: splits, names, folders, what goes wrong; the package itself where it is installed."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from config_helpers import load, problems
from resolved import build_data, data_spec
from tiers import full_only

from stoker.trainer.config.schema.root import RootBlock
from stoker.trainer.core.run_checks import check_splits
from stoker.trainer.data.datasets.samples import IGNORE_INDEX
from stoker.trainer.data.sources.hf_datasets import read_dataset
from stoker.trainer.utils.errors import UserError

ROWS = [{"input": f"question {n}", "output": f"answer {n}", "id": n} for n in range(40)]
PATH = "model.data.path"


class Stub(ModuleType):
    """Stand-in for the package: it records what it is asked for."""

    def __init__(self, found: Any) -> None:
        super().__init__("datasets")
        self.found = found
        self.asked: list[Any] = []

    def load_dataset(self, path: str, name: str | None, revision: str | None) -> Any:
        self.asked.append((path, name, revision))
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    def load_from_disk(self, path: str) -> Any:
        self.asked.append(path)
        return self.found


def stub(monkeypatch: pytest.MonkeyPatch, found: Any) -> Stub:
    module = Stub(found)
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def inputs(found: Any, **options: str) -> dict[Any, list[str]]:
    shares = (0.5, 0.25, 0.25)
    return dict(read_dataset(found, options, shares, lambda row, where: row["input"], lambda text: text)[0])


def test_splits_are_those_of_the_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    module = stub(monkeypatch, {"train": ROWS[:30], "dev": ROWS[30:35], "test": ROWS[35:]})
    found = inputs("org/name", name="part", revision="main", validation="dev")
    assert [len(found[split]) for split in ("train", "validation", "test")] == [30, 5, 5]
    assert module.asked == [("org/name", "part", "main")]
    assert [len(rows) for rows in inputs("org/name").values()] == [30, 0, 5]


def test_training_data_alone_are_divided_by_their_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, {"train": ROWS})
    found = inputs("org/name")
    assert sorted(itertools.chain.from_iterable(found.values())) == sorted(row["input"] for row in ROWS)
    assert all(found.values())
    stub(monkeypatch, ROWS[::-1])  # a data set without splits
    assert {split: sorted(rows) for split, rows in inputs("org/name").items()} == {
        split: sorted(rows) for split, rows in found.items()
    }


def test_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = stub(monkeypatch, {"train": ROWS})
    inputs(str(tmp_path))
    (tmp_path / "dataset_dict.json").write_text("{}")
    inputs(str(tmp_path))
    assert module.asked == [(str(tmp_path), None, None), str(tmp_path)]


@pytest.mark.parametrize(
    ("found", "options", "says"),
    [
        ({"train": ROWS}, {"nme": "x"}, r"dataset_kwargs` \(nme\) must be of name, revision"),
        ({"validation": ROWS}, {}, "no split `train`; it has validation"),
        ({"train": ROWS}, {"test": "held"}, r"no split `held`; it has train; set .*kwargs\.test"),
        (
            ConnectionError("no\nnetwork"),
            {},
            "datasets package cannot read org/name: no network$",
        ),
    ],
)
def test_what_cannot_be_read(found: Any, options: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, found)
    with pytest.raises(UserError, match=says):
        inputs("org/name", **options)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"needs the `datasets` package: pip install 'stoker\[hf\]'"):
        inputs("org/name")


def test_a_gpt_and_a_t5_are_trained_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, {"train": ROWS})
    data = {"data_impl": "huggingface", "path": "org/name", "splits_string": "1"}
    for family, length in (("gpt", "encoder_seq_length"), ("t5", "seq_length")):
        model = {"family": family, length: 64, "data": data}
        built = build_data(RootBlock.model_validate({"model": model, "trainer": {"limit_val_batches": 0}}))
        batch: Any = built.train.batch(0, 40)
        assert (batch["labels"] != IGNORE_INDEX).any(dim=1).all()
        assert "40" in built.description
    stub(monkeypatch, {"train": [{"input": "x"}]})
    model = {"encoder_seq_length": 64, "data": data}
    with pytest.raises(UserError, match="row 1 of `train` of org/name must have a text `output`"):
        build_data(RootBlock.model_validate({"model": model, "trainer": {"limit_val_batches": 0}}))


def test_splits_string_that_divides_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    held_out: dict[str, Any] = {"train": ROWS[:30], "validation": ROWS[30:]}
    for found, shares, told in ((held_out, "1,1,0", 1), (held_out, "900,50,50", 0), ({"train": ROWS}, "1,1,0", 0)):
        stub(monkeypatch, found)
        data = {"data_impl": "huggingface", "path": "org/name", "splits_string": shares}
        for family, length in (("gpt", "encoder_seq_length"), ("t5", "seq_length")):
            root = RootBlock.model_validate({"model": {"family": family, length: 64, "data": data}})
            warnings = check_splits(data_spec(root), build_data(root))
            assert len(warnings) == told
            assert all("`model.data.splits_string` (1,1,0) has no effect: org/name has" in line for line in warnings)


def test_keys() -> None:
    of = ["data=sft", "model.data.data_impl=huggingface"]
    assert "a name on the hub" in problems(*of)[PATH].rule
    assert not load(*of, f"{PATH}=org/name", "model.data.dataset_kwargs.validation=dev").findings
    assert not load(*of, f"{PATH}=org/name", "model.data.chat=true").findings


@full_only
@pytest.mark.filterwarnings("ignore")  # of how the package hashes functions
def test_the_package_itself(tmp_path: Path) -> None:
    datasets: Any = pytest.importorskip("datasets")
    pyarrow: Any = pytest.importorskip("pyarrow")
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    tables = tmp_path / "tables"
    tables.mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tables / "train.parquet")
    found = inputs(str(tables))
    assert sorted(itertools.chain.from_iterable(found.values())) == sorted(row["input"] for row in ROWS)
    datasets.load_dataset(str(tables)).save_to_disk(str(tmp_path / "saved"))
    assert inputs(str(tmp_path / "saved")) == found
    with pytest.raises(UserError, match="cannot read"):
        inputs(str(tmp_path / "nothing"))
