"""Files from anywhere: no code in them runs, nothing outside the target is written, and a line or a few say why.

Each wicked file goes through every verb that reads it; `audit_hook` sees what the process does meanwhile.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from audit_hook import watched
from hf_folders import change_config, change_tensors, letter_tokenizer, random_model, save, tensors_of
from safetensors.torch import save_file
from tiers import extra

from stoker.trainer.checkpoint import sharded_safetensors
from stoker.trainer.checkpoint.reader import RunState
from stoker.trainer.checkpoint.writer import write_metadata
from stoker.trainer.cli.main import main
from stoker.trainer.data.preprocess import journal
from stoker.trainer.data.sources.index_cache import IndexCache
from stoker.trainer.loggers import logger_backends, run_logger
from stoker.trainer.utils.errors import EXIT_BAD_INPUT, EXIT_OK
from stoker.trainer.utils.safetensors_io import DamagedFileError, FileRecord

MIB = 1 << 20
LONGEST = 12
"""Lines of a refusal, that of a configuration with its origins."""


class Payload:
    """A pickle that makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (str(self.marker),)


class Place(NamedTuple):
    """Where a test happens.

    Attributes:
        folder: of a good model of Hugging Face's; tests change it.
        target: the only place that may be written to.
        marker: is there when code in a file has run.
    """

    folder: Path
    target: Path
    marker: Path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer, and the same as a stoker checkpoint in `ours`."""
    root = tmp_path_factory.mktemp("saved")
    save(random_model("llama"), root / "theirs")
    letter_tokenizer(root / "theirs")
    (root / "theirs" / "chat_template.jinja").unlink()
    assert main(["convert", str(root / "theirs"), str(root / "ours")]) == EXIT_OK
    return root


@pytest.fixture
def place(saved: Path, tmp_path: Path) -> Place:
    shutil.copytree(saved / "theirs", tmp_path / "theirs")
    (tmp_path / "target").mkdir()
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"input": "abc", "output": "def"}) + "\n")
    return Place(tmp_path / "theirs", tmp_path / "target", tmp_path / "marker")


@pytest.fixture
def refused(place: Place, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a verb that must refuse what it reads; gives what it says."""

    def run(*arguments: str | Path, may_start: str = "") -> str:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        capsys.readouterr()
        with watched() as seen:
            code = main([str(argument) for argument in arguments])
        told = capsys.readouterr().err
        assert code == EXIT_BAD_INPUT, told
        assert "internal error in stoker" not in told
        assert "Traceback" not in told
        assert "Re-running" not in told, "torch's advice is to trust the file"
        assert 1 <= len(told.splitlines()) <= LONGEST, told
        assert not place.marker.exists(), "code in a file has run"
        assert seen.forbidden == []
        assert seen.written_outside(place.target) == []
        assert [line for line in seen.started if not may_start or may_start not in " ".join(line)] == []
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MIB, "in KiB: a GiB"
        return told

    return run


def fine_tuning(place: Place, *more: str) -> list[str]:
    """A command that would train one step of the model, were there nothing wrong with it."""
    keys = {
        "model.restore_from_path": place.folder,
        "model.data.path": place.folder.parent / "pairs.jsonl",
        "model.data.splits_string": "'1,0,0'",
        "model.encoder_seq_length": 16,
        "model.micro_batch_size": 1,
        "model.global_batch_size": 1,
        "trainer.max_steps": 1,
        "trainer.limit_val_batches": 0,
        "exp_manager.explicit_log_dir": place.target / "run",
    }
    given = {word.partition("=")[0] for word in more}
    own = [f"{key}={value}" for key, value in keys.items() if key not in given]
    return ["finetune", "trainer=cpu", *(["data=sft"] if "data" not in given else []), *own, *more]


def both(place: Place) -> list[list[str]]:
    """The two verbs that read a folder of Hugging Face's."""
    return [["convert", str(place.folder), str(place.target / "converted")], fine_tuning(place)]


def test_a_good_model_is_taken(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Files of the other tests are wrong in nothing but the changes."""
    with watched() as seen:
        for command in both(place):
            assert main(command) == EXIT_OK, capsys.readouterr().err
    assert seen.forbidden == []
    assert seen.written_outside(place.target) == []


# ---------------------------------------------------------------- weights


def _as_index(place: Place, name: str) -> None:
    """An index of all tensors that names one file."""
    names = list(tensors_of(place.folder))
    (place.folder / "model.safetensors").rename(place.folder.parent / "outside.safetensors")
    (place.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, name)}))


def _torch_file(place: Place, content: Any, *, legacy: bool = False) -> Path:
    (place.folder / "model.safetensors").unlink()
    path = place.folder / "pytorch_model.bin"
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    return path


def _packed(place: Place) -> None:
    """The archive of a torch file whose numbers unpack to 64 MiB."""
    path = _torch_file(place, tensors_of(place.folder))
    stored = path.rename(place.folder.parent / "stored.bin")
    with zipfile.ZipFile(stored) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for record in source.infolist():
            is_first = record.filename.endswith("data/0")
            archive.writestr(record.filename, bytes(64 * MIB) if is_first else source.read(record))
    assert path.stat().st_size < MIB


def _safetensors(place: Place, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    (place.folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def _span(begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}


def _code_beside(place: Place) -> None:
    change_config(place.folder, auto_map={"AutoModelForCausalLM": "evil.Model"})
    (place.folder / "evil.py").write_text(f"import os\nos.mkdir({str(place.marker)!r})\n")


def _many_names(place: Place, count: int, length: int) -> None:
    names = (f"{number}{'x' * length}" for number in range(count))
    _safetensors(place, {name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}, b"")


WEIGHTS: dict[str, tuple[Callable[[Place], object], str]] = {
    "pickle_in_bin": (
        lambda place: _torch_file(place, {"model.norm.weight": Payload(place.marker)}),
        "torch cannot load tensors from it (UnpicklingError: ",
    ),
    "pickle_in_old_bin": (
        lambda place: _torch_file(place, {"model.norm.weight": Payload(place.marker)}, legacy=True),
        "torch cannot load tensors from it (UnpicklingError: ",
    ),
    "pickle_in_safetensors": (
        lambda place: (place.folder / "model.safetensors").write_bytes(pickle.dumps(Payload(place.marker))),
        "is not a safetensors file",
    ),
    "no_values": (
        lambda place: _torch_file(
            place, {**tensors_of(place.folder), "model.norm.weight": torch.zeros(12, device="meta")}
        ),
        "is of dtype meta, which is not supported",
    ),
    "zip_bomb": (_packed, "is compressed, which torch.save never does"),
    "overlapping_spans": (
        lambda place: _safetensors(place, {"a": _span(0, 144), "b": _span(72, 216)}, bytes(216)),
        "is not a safetensors file",
    ),
    "span_beyond_the_end": (
        lambda place: _safetensors(place, {"a": _span(0, 1 << 40)}, bytes(216)),
        "is not a safetensors file",
    ),
    "many_tensors": (lambda place: _many_names(place, 1001, 0), "model.safetensors has 1,001 tensors in its header"),
    "long_names": (lambda place: _many_names(place, 9, 1 << 18), "model.safetensors has 2 MiB of names in its header"),
    "path_in_a_tensors_name": (
        lambda place: change_tensors(place.folder, lambda tensors: tensors.update({"../../evil": torch.zeros(2)})),
        "unknown: ../../evil",
    ),
    "index_leads_out": (lambda place: _as_index(place, "../outside.safetensors"), "is not the plain name of a file"),
    "code_beside": (_code_beside, "remote code, which is never run"),
    "a_million_layers": (
        lambda place: change_config(place.folder, num_hidden_layers=10**6),
        "there are 1,000,000 layers, but only 21 tensors",
    ),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_wicked_weights(kind: str, place: Place, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    if kind in ("many_tensors", "long_names"):
        monkeypatch.setattr("stoker.trainer.utils.safetensors_io.MAX_TENSORS", 1000)
        monkeypatch.setattr("stoker.trainer.utils.safetensors_io.MAX_HEADER_BYTES", 2 * MIB)
    change, says = WEIGHTS[kind]
    change(place)
    for command in both(place):
        assert says in refused(*command)


def test_a_gguf_that_claims_more_than_it_has(place: Place, refused: Callable[..., str]) -> None:
    pytest.importorskip("gguf")
    file = place.folder / "model.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 62, 1 << 62))
    assert "is not a GGUF file, or damaged" in refused("convert", file, place.target / "converted")


# ---------------------------------------------------------------- adapters in the format of peft


def test_wicked_adapters(place: Place, refused: Callable[..., str]) -> None:
    adapter = place.folder.parent / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    config |= {"base_model_name_or_path": "../../../etc/passwd", "auto_mapping": {"parent_library": "os"}}
    described, weights = adapter / "adapter_config.json", adapter / "adapter_model.safetensors"
    described.write_text(json.dumps(config))
    command = fine_tuning(place, f"model.peft.restore_from_path={adapter}")
    torch.save({"a": Payload(place.marker)}, adapter / "adapter_model.bin")
    assert "holds no adapter_model.safetensors" in refused(*command)
    weights.write_bytes(pickle.dumps(Payload(place.marker)))
    assert "is not a safetensors file" in refused(*command)
    save_file({"../../evil": torch.zeros(2)}, weights)
    described.write_text(json.dumps(config | {"r": 10**9}))
    assert "../../evil" in refused(*command)


# ---------------------------------------------------------------- configurations


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("_target_: os.system", "a configuration must not name code to run"),
        ("seed: !!python/object/apply:os.mkdir [MARKER]", "only plain values are supported, not objects"),
        ("a: &a [1, 1]\nb: &b [*a, *a]\nc: &c [*b, *b]\n" + "d: [" + ", ".join(["*c"] * 120) + "]", "alias"),
    ],
    ids=["target", "tag", "aliases"],
)
def test_wicked_yaml_of_a_checkpoint(
    line: str, says: str, saved: Path, place: Place, refused: Callable[..., str]
) -> None:
    """The folder `conf` that a converted model brings along."""
    conf = place.folder.parent / "conf"
    shutil.copytree(saved / "ours" / "conf", conf)
    with (conf / "model" / "converted.yaml").open("a") as file:
        file.write(line.replace("MARKER", str(place.marker)) + "\n")
    choices = ["--config-dir", str(conf), "model=converted", "tokenizer=converted"]
    command = fine_tuning(place)
    assert says in refused("train", *choices, *command[1:])
    assert says in refused("config", *choices, *command[1:])


def _resealed(saved: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The checkpoint with changed documents, and a manifest that says that they are as written."""
    shutil.copytree(saved / "ours", folder)
    step = folder / "checkpoints" / "step-0"
    documents = {name: json.loads((step / f"{name}.json").read_text()) for name in ("config", "state", "tokenizer")}
    change(documents)
    files = json.loads((step / "manifest.json").read_text())["files"]
    records = {path.name: FileRecord(**files[path.name]) for path in step.glob("*.safetensors")}
    for name in ("config", "state", "tokenizer", "manifest"):
        (step / f"{name}.json").unlink()
    state = RunState.model_validate(documents["state"])
    write_metadata(step, records, state, documents["config"], documents["tokenizer"])
    return folder


CHECKPOINTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "target": (
        lambda documents: documents["config"]["model"].update({"_target_": "os.system"}),
        "a configuration must not name code to run",
    ),
    "environment": (
        lambda documents: documents["config"]["model"].update({"encoder_seq_length": "${oc.env:HOME}"}),
        "environment variables are not resolved here",
    ),
    "a_lone_surrogate": (
        lambda documents: documents["config"]["model"].update({"encoder_seq_length": "\ud800"}),
        "must be an integer >= 1 and <= 16777216, but is text",
    ),
    "a_table_of_positions_larger_than_memory": (
        lambda documents: documents["config"]["model"].update({"encoder_seq_length": 10**9}),
        "must be an integer >= 1 and <= 16777216",
    ),
    "a_million_layers": (
        lambda documents: documents["config"]["model"].update({"num_layers": 10**6}),
        "which has 11,232,036,900 parameters: its weights have 238,888 bytes",
    ),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_wicked_checkpoints(kind: str, saved: Path, place: Place, refused: Callable[..., str]) -> None:
    change, says = CHECKPOINTS[kind]
    checkpoint = _resealed(saved, place.folder.parent / "wicked", change)
    for command in (
        ["generate", "--checkpoint", checkpoint, "--prompt", "a", "--device", "cpu"],
        ["evaluate", "--checkpoint", checkpoint, "--data-path", place.folder / "config.json", "--device", "cpu"],
        ["convert", checkpoint, place.target / "converted"],
        fine_tuning(place, f"model.restore_from_path={checkpoint}"),
    ):
        assert says in refused(*command)


def test_a_tokenizer_with_an_id_of_2_to_the_48(saved: Path, place: Place, refused: Callable[..., str]) -> None:
    def change(documents: dict[str, Any]) -> None:
        tokenizer = documents["tokenizer"]
        tokenizer["definition"] = tokenizer["definition"].replace('"id":28', f'"id":{1 << 48}')

    checkpoint = _resealed(saved, place.folder.parent / "wicked", change)
    told = refused("generate", "--checkpoint", checkpoint, "--prompt", "a", "--device", "cpu")
    assert "the tokenizers library rejects it" in told


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _split(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


TOKENIZERS: dict[str, tuple[dict[str, Any], str]] = {
    "growth": (
        {"normalizer": {"type": "Sequence", "normalizers": [_replace({"String": "a"}, "a" * 1000)] * 6}},
        "it exceeded the limits of 30 seconds and 128 MiB of memory; simplify its `normalizer`",
    ),
    "backtracking": ({"pre_tokenizer": _split("(a+)+$")}, "simplify its `pre_tokenizer`, or use another tokenizer"),
    "character_map": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP///38="}},
        "the character map of its normalizer is damaged: its trie leads outside",
    ),
    "decoder": (
        {"decoder": {"type": "Sequence", "decoders": [_replace({"String": "a"}, "a" * 1000)] * 6}},
        "a `Replace` of its decoder makes tokens many times longer; remove it",
    ),
    "digits": ({"version": "DIGITS"}, "an integer of thousands of digits"),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_wicked_tokenizers(
    kind: str, saved: Path, place: Place, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work that may take long or much memory runs in a process of its own; nothing else is started."""
    monkeypatch.setattr(
        "stoker.trainer.data.tokenizers.isolated_encoder.MAX_MEMORY", (128 if kind == "growth" else 1024) * MIB
    )
    parts, says = TOKENIZERS[kind]
    file = place.folder / "tokenizer.json"
    text = json.dumps(json.loads(file.read_text()) | parts).replace('"DIGITS"', "9" * 5000)
    file.write_text(text)
    commands: list[list[Any]] = [["convert", place.folder, place.target / "converted"]]
    if kind == "growth":
        checkpoint = _resealed(
            saved, place.folder.parent / "wicked", lambda documents: documents["tokenizer"].update(definition=text)
        )
        commands += [
            fine_tuning(place),
            ["preprocess", file, "--tokenizer", file, "--output-prefix", place.target / "data"],
            ["generate", "--checkpoint", checkpoint, "--prompt", "a", "--device", "cpu"],
        ]
    for command in commands:
        told = refused(*command, may_start="encoder_process.py")
        assert says in told
        assert len(told.splitlines()) == 1
        assert "tokenizer" in told


def test_a_tokenizer_that_leads_out(place: Place, refused: Callable[..., str]) -> None:
    (place.folder / "tokenizer.json").unlink()
    (place.folder / "tokenizer.json").symlink_to("/etc/passwd")
    for command in both(place):
        assert "root:" not in refused(*command)


def test_a_checkpoint_does_not_choose_where_is_written(saved: Path, place: Place) -> None:
    """Its configuration has the folder of the run that made it."""
    evil = place.folder.parent / "evil"
    checkpoint = _resealed(
        saved,
        place.folder.parent / "wicked",
        lambda documents: documents["config"].setdefault("exp_manager", {}).update({"explicit_log_dir": str(evil)}),
    )
    with watched() as seen:
        assert main(fine_tuning(place, f"model.restore_from_path={checkpoint}")) == EXIT_OK
    assert not evil.exists()
    assert seen.written_outside(place.target) == []


# ---------------------------------------------------------------- chat templates

TEMPLATES = {
    "classes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "access to attribute '__class__'"),
    "globals": ("{{ cycler.__init__.__globals__.os.mkdir('MARKER') }}", "access to attribute '__init__'"),
    "changes": ("{{ messages.append(1) }}", "access to attribute 'append'"),
    "file": ("{% include '/etc/passwd' %}", "no loader for this environment"),
    "memory": ("{{ 'a' * 10**11 }}", "of memory"),
    "output": ("{% for i in range(9999) %}{{ 'aaaaaaaaaa' * 9999 }}{% endfor %}", "characters"),
    "time": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "it exceeded the limit"),
    "no_template": ("{% for %}", "it is not a valid template"),
}


@pytest.mark.parametrize("kind", [kind for kind in TEMPLATES if kind in ("globals", "file", "output") or extra(kind)])
def test_wicked_chat_templates(
    kind: str, place: Place, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are rendered in a process of their own, which is all that is started."""
    pytest.importorskip("jinja2")
    monkeypatch.setattr("stoker.trainer.data.tasks.chat_template.RENDER_TIMEOUT", 1.0 if kind == "time" else 20.0)
    template, says = TEMPLATES[kind]
    (place.folder / "chat_template.jinja").write_text(template.replace("MARKER", str(place.marker)))
    chat = place.folder.parent / "chat.jsonl"
    turns = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "def"}]
    chat.write_text(json.dumps({"messages": turns}) + "\n")
    command = fine_tuning(place, "data=chat", f"model.data.path={chat}")
    assert says in refused(*command, may_start="template_process.py")


# ---------------------------------------------------------------- data

LINES = {
    "deep": b'{"input":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "no_number": b'{"input": NaN, "output": "b"}',
    "no_text": b'{"input": {"__class__": "os"}, "output": "b"}',
    "no_utf8": b'{"input": "\xff", "output": "b"}',
    "zeros": bytes(10_000),
    "digits": b'{"input": ' + b"9" * 5000 + b', "output": "b"}',
}


@pytest.mark.parametrize("kind", LINES)
def test_wicked_lines(kind: str, place: Place, refused: Callable[..., str]) -> None:
    file = place.folder.parent / "wicked.jsonl"
    file.write_bytes(LINES[kind] + b"\n")
    told = refused(*fine_tuning(place, f"model.data.path={file}"))
    assert f"line 1 of {file}" in told
    assert len(told.splitlines()) == 1


# ---------------------------------------------------------------- records of earlier runs


def test_deep_records_are_damaged_ones(tmp_path: Path) -> None:
    """JSON nested too deep to read, in the files of a run directory and in the header of a sharded checkpoint."""
    deep = "[" * 100_000
    path = tmp_path / "loggers.json"
    path.write_text(f"{deep}\n")
    with pytest.raises(DamagedFileError, match="the rows in its header cannot be read"):
        sharded_safetensors._read_row_metadata(path, SimpleNamespace(metadata=lambda: {"rows": deep}))
    assert journal._entries(path) == ([], 0)
    assert IndexCache(None)._read(tmp_path, "loggers", {}) is None
    run_logger._drop_lines_after(path, 5, validates_again=False)
    assert path.read_text() == ""
    path.write_text(deep[:1000])
    assert logger_backends._read_run_id(tmp_path, "wandb") is None


@pytest.mark.parametrize("name", ["tokenizer.json", "a.jsonl"])
def test_pipes_and_devices_are_not_read(name: str, place: Place, refused: Callable[..., str]) -> None:
    """A pipe without a writer would be waited for, a device read until memory ends."""
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        path = place.target / name
        make(path)
        prefix, text = place.target / "p", place.target / "a.txt"
        text.write_text("a")
        words = {
            "tokenizer.json": ["preprocess", str(text), "--tokenizer", str(path), "--output-prefix", str(prefix)],
            "a.jsonl": ["preprocess", str(path), "--output-prefix", str(prefix)],
        }
        assert "not a regular file" in refused(*words[name])
        path.unlink()
