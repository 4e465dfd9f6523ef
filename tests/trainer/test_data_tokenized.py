"""From `model.data.data_prefix` to samples: prefixes, splits, tokenizers, fingerprints, and what is refused."""

import json
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from config_helpers import load, problems
from resolved import build_data
from tiers import looped

from stoker.models.config import extensions
from stoker.trainer.config.blend_spec import parse_prefixes
from stoker.trainer.config.resolved_run import resolve_run
from stoker.trainer.config.schema.root import RootBlock
from stoker.trainer.core.run_context import build_data_by_rank
from stoker.trainer.data.build_datasets import Data
from stoker.trainer.data.datasets.blend import BlendedSamples
from stoker.trainer.data.datasets.memory_mapped import MappedTraining
from stoker.trainer.data.datasets.samples import IGNORE_INDEX, EodMaskedSamples, MockSamples, Samples
from stoker.trainer.data.sources.indexed_tokens import IndexedWriter
from stoker.trainer.data.tokenizers.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from stoker.trainer.data.tokenizers.tokenizer_json import build_json_tokenizer, canonical_json
from stoker.trainer.distributed.process_group import DistributedContext
from stoker.trainer.utils.errors import UserError
from stoker.trainer.utils.safetensors_io import MAX_JSON_BYTES


def root(
    prefix: Any, trainer: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **data: Any
) -> RootBlock:
    keys = {"data_impl": "mmap", "data_prefix": prefix, **data}
    given = {"encoder_seq_length": 8, "data": keys, **(model or {})}
    return RootBlock.model_validate({"model": given, "trainer": trainer or {}})


def token_set(folder: Path, name: str, documents: int = 40, length: int = 10, first: int = 3) -> str:
    with IndexedWriter(folder / name, np.uint16) as writer:
        for number in range(documents):
            writer.add_document(np.arange(length) + first + number)
        writer.finish()
    return str(folder / name)


def record(prefix: str, made_with: Tokenizer, **more: Any) -> None:
    known = {"format": 1, "tokenizer": made_with.to_dict(), "documents": 40, "tokens": 400}
    Path(prefix + ".json").write_text(json.dumps({**known, **more}))


def labels(samples: Samples | None, count: int | None = None) -> list[int]:
    assert samples is not None
    found = samples.batch(0, samples.samples if count is None else count).labels
    return sorted(found[found != IGNORE_INDEX].tolist())


@pytest.mark.parametrize(
    ("value", "paths", "weights"),
    [
        ("a", ("a",), (1.0,)),
        (["a"], ("a",), (1.0,)),
        (["a", "b"], ("a", "b"), (1.0, 1.0)),
        ([0.3, "a", 2, "b"], ("a", "b"), (0.3, 2.0)),
        (["0.3", "a", "1e-1", "b"], ("a", "b"), (0.3, 0.1)),
    ],
)
def test_forms_of_a_prefix(value: Any, paths: tuple[str, ...], weights: tuple[float, ...]) -> None:
    blends = parse_prefixes(value)
    assert {(blend.paths, blend.weights) for blend in blends.values()} == {(paths, weights)}
    assert parse_prefixes({"train": value, "test": "c", "validation": []})["train"] == blends["train"]
    assert set(parse_prefixes({"train": value, "test": "c", "validation": []})) == {"train", "test"}


@looped(
    ("value", "words"),
    [
        ([], "empty"),
        ([0.5, "a", "b"], "alternating weights"),
        (["a", 0.5], "alternating weights"),
        ([0.5, "a", 0, "b"], "gives b the weight 0"),
        ([-1.0, "a"], "must be positive"),
        ({"validation": "a"}, "no `train`"),
        ({"train": "a", "valid": "b"}, "'valid'"),
    ],
)
def test_what_is_no_prefix(value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_prefixes(value)


def test_splits_are_ranges_of_documents(tmp_path: Path) -> None:
    data = build_data(root(token_set(tmp_path, "a"), splits_string="50,25,25"))
    assert isinstance(data.train, MappedTraining)
    assert (data.train.source.first, data.train.source.documents) == (0, 20)
    documents = [np.arange(10) + 3 + number for number in range(40)]
    assert labels(data.validation) == sorted(np.concatenate(documents[20:30])[1:].tolist())
    assert labels(data.test) == sorted(np.concatenate(documents[30:])[1:].tolist())
    for words in ("40 documents", "train 200 tokens", "validation 100", data.fingerprint[:12]):
        assert words in data.description
    assert data.token_byte_counts.sum() == 256


def test_a_set_for_each_split(tmp_path: Path) -> None:
    a, b = token_set(tmp_path, "a"), token_set(tmp_path, "b", first=100)
    data = build_data(root({"train": [a], "validation": b}))
    assert min(labels(data.validation)) >= 100 > max(labels(data.train, 100))
    assert len(labels(data.validation)) == 399
    assert data.test is None


def test_sets_without_weights_count_by_their_size(tmp_path: Path) -> None:
    small, large = token_set(tmp_path, "a", 40), token_set(tmp_path, "b", 120)
    listed, weighted = (build_data(root(prefix)) for prefix in ([small, large], [1, small, 1, large]))
    for data, shares in ((listed, [1 / 4, 3 / 4]), (weighted, [1 / 2, 1 / 2])):
        assert isinstance(data.train, BlendedSamples)
        assert [float(share) for share in data.train.schedule.shares] == pytest.approx(shares, abs=0.01)
    assert listed.fingerprint != weighted.fingerprint


def test_a_blend_follows_its_weights(tmp_path: Path) -> None:
    a, b = token_set(tmp_path, "a"), token_set(tmp_path, "b", first=150)
    data = build_data(root([0.1, a, 0.9, b], splits_string="80,20,0"))
    rows = data.train.batch(0, 1000).tokens.amin(1)
    assert int((rows >= 150).sum()) == 900
    assert len(labels(data.validation)) == 2 * 79


def test_the_fingerprint_is_of_everything_that_counts(tmp_path: Path) -> None:
    a, b = token_set(tmp_path, "a"), token_set(tmp_path, "b", first=4)
    roots = [root(a), root(b), root([a, b]), root([0.4, a, 0.6, b]), root(a, splits_string="80,10,10")]
    prints = [build_data(keys).fingerprint for keys in roots]
    assert len(set(prints)) == len(prints)
    assert build_data(root(token_set(tmp_path, "copy"))).fingerprint == prints[0], "the path does not count"


def test_the_tokenizer_beside_the_data(tmp_path: Path) -> None:
    prefix = token_set(tmp_path, "a")
    chars = CharTokenizer("".join(map(chr, range(33, 100))))
    record(prefix, chars)
    data = build_data(root(prefix))
    assert data.tokenizer.to_dict() == chars.to_dict()
    assert data.vocab_size == 67
    assert build_data(root(prefix), chars).tokenizer is chars
    with pytest.raises(UserError, match="tokenizer of the checkpoint is not the tokenizer that made the data"):
        build_data(root(prefix), ByteTokenizer())
    with pytest.raises(UserError, match=r"library.*char.*built from text"):
        build_data(root(prefix, model={"tokenizer": {"library": "char"}}))
    with pytest.raises(UserError, match="needs a tokenizer with an end-of-document token"):
        build_data(root(prefix, eod_mask_loss=True))
    other = token_set(tmp_path, "b")
    assert build_data(root([prefix, other])).vocab_size == 67, "a set of another tool takes the tokenizer it is told"
    record(other, ByteTokenizer())
    with pytest.raises(UserError, match="made with different tokenizers"):
        build_data(root([prefix, other]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, "was not written by `stoker preprocess`"),
        ({"tokenizer": "byte-level"}, "was not written by `stoker preprocess`"),
        ({"documents": 41}, "lists 41 documents"),
        ({"tokens": None}, "lists None tokens"),
        ({"tokenizer": {"tokenizer": "char", "characters": "ba"}}, "sorted"),
    ],
)
def test_a_record_that_is_wrong(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    prefix = token_set(tmp_path, "a")
    record(prefix, ByteTokenizer(), **change)
    with pytest.raises(UserError, match=words) as caught:
        build_data(root(prefix))
    assert len(caught.value.lines) == 1


def test_another_file_of_that_name_is_none_of_ours(tmp_path: Path) -> None:
    prefix = token_set(tmp_path, "a")
    Path(prefix + ".json").write_text('{"text": "a line"}\n{"text": "another"}\n')
    assert isinstance(build_data(root(prefix)).tokenizer, ByteTokenizer)
    Path(prefix + ".json").write_text('{"format": 1, "tokeni')
    with pytest.raises(UserError, match="is not JSON"):
        build_data(root(prefix))


def test_what_cannot_be_trained_on_is_told_in_one_line(tmp_path: Path) -> None:
    prefix = token_set(tmp_path, "corpus")
    token_set(tmp_path, "empty", documents=0)
    token_set(tmp_path, "hollow", length=0)
    token_set(tmp_path, "tiny", documents=1, length=5)
    token_set(tmp_path, "large", first=250)
    (tmp_path / "half.idx").write_bytes(b"")
    cases = {
        prefix + ".bin": f"without its suffix; use {prefix}",
        prefix + ".idx": f"without its suffix; use {prefix}",
        str(tmp_path / "corpsu"): f"did you mean {prefix}",
        str(tmp_path / "none" / "x"): "none does not exist",
        str(tmp_path / "half"): "half.bin is missing",
        str(tmp_path / "empty"): "empty is empty",
        str(tmp_path / "hollow"): "no token in 40 documents",
        str(tmp_path / "tiny"): "5 tokens in 1 document to train on",
        str(tmp_path / "large"): "holds token id 259 at position 9, but the tokenizer has 259",
    }
    for given, words in cases.items():
        with pytest.raises(UserError) as caught:
            build_data(root(given))
        assert len(caught.value.lines) == 1
        assert words in str(caught.value)
        assert caught.value.exit_code == 2
    with pytest.raises(UserError, match=r"validation split is empty.*limit_val_batches=0"):
        build_data(root(prefix, splits_string="999,1,0"))
    assert build_data(root(prefix, {"limit_val_batches": 0}, splits_string="999,1,0")).validation is None


def test_the_end_of_documents_is_masked_in_every_split(tmp_path: Path) -> None:
    data = build_data(root(token_set(tmp_path, "a", first=1), eod_mask_loss=True, splits_string="1,1,1"))
    for samples in (data.train, data.validation, data.test):
        assert isinstance(samples, EodMaskedSamples)


# ---------------------------------------------------------------- configuration


def test_the_configuration_names_what_is_wrong() -> None:
    at = "model.data.data_prefix"
    assert "needs the path" in problems("model.data.data_impl=mmap")[at].rule
    assert "`data_impl: mmap` only" in problems(f"{at}=x")[at].rule
    assert "alternating weights" in problems("data=mmap", f"{at}=[0.5,a,b]")[at].rule
    assert "'valid'" in problems("data=mmap", f"{at}.train=a", f"{at}.valid=b")[at].rule
    assert "no `validation`" in problems("data=mmap", f"{at}.train=a")[at].rule
    assert problems("data=mmap", f"{at}={{train: {{a: b}}}}")
    assert problems("data=mmap", f"{at}=true")
    assert (
        "end-of-document token"
        in problems("tokenizer=char", "model.data.eod_mask_loss=true")["model.data.eod_mask_loss"].rule
    )
    loaded = load("data=mmap", f"{at}={{train: [0.5, a, 0.5, b], validation: c}}").root.model.data.data_prefix
    assert loaded == {"train": [0.5, "a", 0.5, "b"], "validation": "c"}
    assert load("data=mmap", f"{at}=[1,/a,2,/b]").root.model.data.data_prefix == [1, "/a", 2, "/b"]
    assert load("data=mock", f"{at}=[]").root.model.data.data_impl == "mock", "as NeMo's files have it"


# ---------------------------------------------------------------- data of other packages


def samples_of_a_package(
    data: Any, split: str, sequence_length: int, tokenizer: Tokenizer, seed: int
) -> Samples | None:
    wrong = data["dataset_kwargs"].get("wrong")
    if wrong == "value":
        raise ValueError("no such corpus")
    if wrong == "samples":
        return object()  # pyrefly: ignore[bad-return]
    return MockSamples(tokenizer.vocab_size, sequence_length, seed, 10, rng_stream=1) if split != "test" else None


def mine(**kwargs: Any) -> Data:
    return build_data(root(None, data_impl="mine", dataset_kwargs=kwargs))


GROUP = extensions.entry_point_group("dataset")


def test_an_installed_dataset_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("mine", f"{__name__}:samples_of_a_package", GROUP)]
    points.append(EntryPoint("gone", "no_such_package_anywhere:samples", GROUP))
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points if group == GROUP else [])
    monkeypatch.setattr(extensions, "_entry_points", extensions._entry_points.__wrapped__)
    data = mine()
    assert isinstance(data.train, MockSamples)
    assert data.train.sequence_length == 8
    assert data.test is None
    assert mine(a=1).fingerprint != data.fingerprint
    assert load("model.data.data_impl=mine").root.model.data.data_impl == "mine"
    assert "model.data.data_impl=mine?" in problems("model.data.data_impl=mien")["model.data.data_impl"].fix
    with pytest.raises(UserError, match=r"\(mine\), train: no such corpus"):
        mine(wrong="value")
    with pytest.raises(UserError, match=r"train: it returned object, which is neither"):
        mine(wrong="samples")
    with pytest.raises(UserError, match=r"no_such_package_anywhere:samples\) cannot be imported"):
        build_data(root(None, data_impl="gone"))
    with pytest.raises(UserError, match="no dataset 'other' is installed or registered"):
        build_data(root(None, data_impl="other"))


def test_built_in_components_look_for_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "_entry_points", None)
    assert load("data=mock").root.model.data.data_impl == "mock"


def test_a_record_of_very_many_inputs_is_read(tmp_path):
    prefix = token_set(tmp_path, "many")
    record(prefix, ByteTokenizer(), inputs=["x" * (1 << 20)] * 65)
    assert Path(prefix + ".json").stat().st_size > MAX_JSON_BYTES
    assert build_data(root(prefix)).train.samples == 45


def test_the_first_process_of_a_machine_makes_the_index_for_the_others(tmp_path):
    class OfTwo(DistributedContext):
        @contextmanager
        def raise_on_all_ranks(self):
            yield

    made = {}
    for number in (0, 1):
        folder = tmp_path / str(number)
        run = resolve_run(root(token_set(tmp_path, "set"), index_mapping_dir=str(folder)))
        build_data_by_rank(run, OfTwo(number, 2, number))
        made[number] = folder.is_dir()
    assert made == {0: True, 1: False}


def test_what_would_stand_around_a_text_makes_no_other_tokenizer(tmp_path: Path) -> None:
    """Transformers writes a post-processor that adds nothing into a tokenizer.json that has none."""
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(70)} | {"?": 70}, "?"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    plain = build_json_tokenizer(canonical_json(library.to_str()), {})
    library.post_processor = tokenizers.processors.TemplateProcessing(single="$A", pair="$A $B:1")
    framed = build_json_tokenizer(canonical_json(library.to_str()), {})
    library.normalizer = tokenizers.normalizers.Lowercase()
    lowered = build_json_tokenizer(canonical_json(library.to_str()), {})
    assert plain.to_dict() != framed.to_dict()
    prefix = token_set(tmp_path, "a")
    record(prefix, plain)
    assert build_data(root(prefix), framed).tokenizer is framed
    with pytest.raises(UserError, match="is not the tokenizer that made the data"):
        build_data(root(prefix), lowered)


@pytest.mark.parametrize("definition", [None, 7, "no JSON", "[]", "[" * 100_000])
def test_documents_that_describe_no_tokenizer_are_refused_in_a_line(tmp_path: Path, definition: Any) -> None:
    """Whoever wrote the .json files beside two sets."""
    sets = [token_set(tmp_path, name) for name in "ab"]
    for prefix in sets:
        record(prefix, ByteTokenizer())
        path = Path(f"{prefix}.json")
        document: dict[str, Any] = {"tokenizer": "huggingface", "special": {}}
        if definition is not None:
            document["definition"] = definition
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer": document}))
    with pytest.raises(UserError, match=r"the tokenizer in the \.json file of the data"):
        build_data(root(sets))


def test_a_tokenizer_that_nobody_vouches_for_is_told(tmp_path: Path) -> None:
    prefix = token_set(tmp_path, "a")
    assert "assumed; the data do not record theirs" in build_data(root(prefix)).description
    record(prefix, ByteTokenizer())
    assert "do not say" not in build_data(root(prefix)).description
