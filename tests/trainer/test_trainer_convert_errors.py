"""`stoker convert` refuses what it cannot do exactly, all reasons at once; no file runs code or leaves its folder."""

from __future__ import annotations

import json
import os
import pickle
import struct
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hf_folders import MODELS, VOCAB, change_config, change_tensors, random_model, save, tensors_of
from torch import Tensor

from stoker.trainer.checkpoint.reader import RunState
from stoker.trainer.checkpoint.writer import write_metadata
from stoker.trainer.cli.main import main
from stoker.trainer.conversion.from_hf import convert_to_stoker
from stoker.trainer.utils.errors import EXIT_BAD_INPUT, EXIT_IO, EXIT_OK
from stoker.trainer.utils.safetensors_io import FileRecord

BYTES = ("--tokenizer", "byte-level")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of each model, written once; tests copy what they change."""
    root = tmp_path_factory.mktemp("saved")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            save(random_model(name), root / name)
        return root / name

    return folder


def copied(folder: Path, target: Path) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def refusal(
    capsys: pytest.CaptureFixture[str],
    *arguments: str | Path,
    code: int = EXIT_BAD_INPUT,
    options: tuple[str, ...] = BYTES,
) -> str:
    """Return what is said of a conversion that is refused; nothing may have been written."""
    target = Path(arguments[1])
    beside = set(target.parent.iterdir())
    capsys.readouterr()
    assert main(["convert", *map(str, arguments), *options]) == code
    assert set(target.parent.iterdir()) == beside
    said = capsys.readouterr()
    assert said.out == ""
    assert "internal error in stoker" not in said.err
    return said.err


# ---------------------------------------------------------------- config.json

FIELDS = {
    "llama": [
        ({"hidden_act": "gelu_10"}, "`hidden_act` (gelu_10) must be one of silu"),
        ({"attention_bias": True}, "`attention_bias` (true) and `mlp_bias` (false) must be equal"),
        ({"num_hidden_layers": "2"}, "`num_hidden_layers` (2) must be a whole number from 1 to 16,777,216"),
        ({"num_hidden_layers": True}, "`num_hidden_layers` (true) must be a whole number"),
        ({"num_hidden_layers": 10**9}, "must be a whole number from 1 to 16,777,216"),
        ({"num_hidden_layers": 10**6}, "there are 1,000,000 layers, but only 21 tensors"),
        ({"vocab_size": ...}, "`vocab_size` is missing"),
        ({"rms_norm_eps": 0}, "`rms_norm_eps` (0) must be a number above 0"),
        ({"attention_dropout": 1.5}, "`attention_dropout` (1.5) must be a number from 0 to below 1"),
        ({"rope_parameters": {"type": "dynamic", "factor": 2.0}}, "(dynamic) must be default, linear, llama3 or yarn"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "`rope_scaling.factor` (null) must be a number above 0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2, "new": 1}}, "`rope_scaling.new` is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "`rope_scaling` and `rope_parameters` contradict"),
        ({"rope_scaling": [1]}, "`rope_scaling` ([1]) must be an object"),
        ({"tie_word_embeddings": True}, "`tie_word_embeddings` (true) contradicts the weights"),
        ({"quantization_config": {"bits": 4}}, "the weights are quantized"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, "remote code, which is never run"),
        ({"architectures": ["LlamaForTokenClassification"]}, "must be LlamaForCausalLM: other model classes are not"),
        ({"is_encoder_decoder": True}, "`is_encoder_decoder` (true) must be false"),
        ({"attn_temperature": 2}, "`attn_temperature` (2) is not supported and may change the results"),
        ({"_target_": "os.system"}, "`_target_` (os.system) is not supported"),
        ({"model_type": "gpt_oss"}, "`model_type` (gpt_oss) is none of llama, mistral, qwen2"),
        ({"num_attention_heads": 5}, "`num_attention_heads` (5) must be a multiple of `num_query_groups` (2)"),
        ({"intermediate_size": 51}, "mlp.down_proj.weight has the shape [36, 50], which must be [36, 51]"),
        ({"num_hidden_layers": 1}, "unknown: model.layers.1.input_layernorm.weight"),
        ({"num_hidden_layers": 3}, "missing: model.layers.2.input_layernorm.weight"),
        ({"vocab_size": 200}, "the tokenizer has 259 tokens, but `vocab_size` is 200"),
    ],
    "qwen2": [
        ({"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 4, "layer_types": None}, "1 of 2 l"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "`layer_types`"),
    ],
    "qwen3": [({"attention_bias": True}, "`attention_bias` (true) must be false")],
    "gpt2": [
        ({"scale_attn_by_inverse_layer_idx": True}, "`scale_attn_by_inverse_layer_idx` (true) must be false"),
        ({"add_cross_attention": True}, "`add_cross_attention` (true) must be false"),
    ],
    "bert": [
        ({"hidden_act": "relu"}, "`hidden_act` (relu) must be gelu"),
        ({"is_decoder": True}, "`is_decoder` (true) must be false"),
        ({"position_embedding_type": "relative_key"}, "`position_embedding_type` (relative_key) must be absolute"),
    ],
    "t5_v1_0": [
        ({"feed_forward_proj": "gated-gelu"}, "`dense_act_fn` and `is_gated_act` must be those of"),
        ({"tie_word_embeddings": False, "scale_decoder_outputs": False}, "missing: lm_head.weight"),
    ],
    "t5_v1_1": [({"scale_decoder_outputs": True}, "`scale_decoder_outputs` (true) must be false")],
    "mt5": [],
}  # fmt: skip
CASES = [(name, changes, says) for name, cases in FIELDS.items() for changes, says in cases]


@pytest.mark.parametrize(("name", "changes", "says"), CASES, ids=[f"{c[0]}-{'-'.join(c[1])}" for c in CASES])
def test_fields_that_change_results_are_refused(
    name: str,
    changes: dict[str, Any],
    says: str,
    saved: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = copied(saved(name), tmp_path / "theirs")
    change_config(folder, **changes)
    assert says in refusal(capsys, folder, tmp_path / "ours")


def test_every_reason_at_once(saved: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied(saved("llama"), tmp_path / "theirs")
    change_config(folder, hidden_act="gelu_10", rms_norm_eps=-1, logit_scale=2.0, quantization_config={})
    told = refusal(capsys, folder, tmp_path / "ours", options=())
    for name in ("hidden_act", "rms_norm_eps", "logit_scale", "quantization_config", "holds no supported tokenizer"):
        assert name in told
    assert len(told.splitlines()) == 6

    change_config(folder, hidden_act="silu", rms_norm_eps=1e-5, quantization_config=...)
    assert "logit_scale" in refusal(capsys, folder, tmp_path / "ours")
    assert main(["convert", str(folder), str(tmp_path / "ours"), *BYTES, "--ignore-field", "logit_scale"]) == EXIT_OK


# ---------------------------------------------------------------- tensors


def test_wrong_tensors_are_one_list(
    saved: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(saved("llama"), tmp_path / "theirs")

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.0.self_attn.k_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(60)
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(49, 36)
        tensors["model.norm.weight"] = torch.zeros(36, dtype=torch.int32)
        tensors["lm_head.weight"] = torch.zeros(VOCAB, 36, dtype=torch.float8_e4m3fn)

    change_tensors(folder, change)
    told = refusal(capsys, folder, tmp_path / "ours").splitlines()
    assert told[0].endswith("the weights do not fit config.json:")
    assert [line.strip() for line in told[1:4]] == [
        "missing: model.layers.0.self_attn.k_proj.weight",
        "unknown: model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.mlp.up_proj.weight has the shape [49, 36], which must be [50, 36]",
    ]
    assert {line.strip() for line in told[4:]} == {
        "lm_head.weight is of dtype F8_E4M3, which is not supported",
        "model.norm.weight is of dtype int32, which is not supported",
    }


def test_copies_must_be_copies(
    saved: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(saved("t5_v1_0"), tmp_path / "theirs")
    name = "encoder.embed_tokens.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: tensors["shared.weight"].clone()}))
    assert main(["convert", str(folder), str(tmp_path / "ours"), *BYTES]) == EXIT_OK
    change_tensors(folder, lambda tensors: tensors.update({name: tensors["shared.weight"] + 1}))
    assert "encoder.embed_tokens.weight must equal shared.weight" in refusal(capsys, folder, tmp_path / "x")


# ---------------------------------------------------------------- wicked files


class _Payload:
    """A pickle that makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


def header(document: dict[str, Any], data: bytes, length: int | None = None) -> bytes:
    """A safetensors file with any header."""
    text = json.dumps(document).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def span(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


NORM = "model.norm.weight"
LYING = {
    "overlapping": header({NORM: span([36], 0, 144), "b": span([36], 72, 216)}, bytes(216)),
    "a gap": header({NORM: span([36], 0, 144), "b": span([36], 200, 344)}, bytes(344)),
    "beyond the end": header({NORM: span([36], 0, 1 << 40)}, bytes(144)),
    "a shape that is not its span": header({NORM: span([1 << 20], 0, 144)}, bytes(144)),
    "a shape that overflows": header({NORM: span([1 << 40, 1 << 40], 0, 144)}, bytes(144)),
    "a huge header": header({}, b"", length=1 << 60),
    "no JSON": struct.pack("<Q", 8) + b"{{{{{{{{",
    "nothing": b"",
}


@pytest.mark.parametrize("kind", LYING)
def test_lying_safetensors(
    kind: str, saved: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(saved("llama"), tmp_path / "theirs")
    (folder / "model.safetensors").write_bytes(LYING[kind])
    told = refusal(capsys, folder, tmp_path / "ours")
    assert len(told.splitlines()) == 1
    assert "model.safetensors is not a safetensors file" in told


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_torch_file_is_not_run(
    legacy: bool, saved: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(saved("llama"), tmp_path / "theirs")
    (folder / "model.safetensors").unlink()
    marker = tmp_path / "marker"
    wicked = {"model.norm.weight": _Payload(marker)}
    torch.save(wicked, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    told = refusal(capsys, folder, tmp_path / "ours")
    assert len(told.splitlines()) == 1
    assert "torch cannot load tensors from it (UnpicklingError" in told
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(wicked))
    assert len(refusal(capsys, folder, tmp_path / "ours").splitlines()) == 1
    assert not marker.exists()
    torch.save({"a": [torch.zeros(2)]}, folder / "pytorch_model.bin")
    assert "must hold a dictionary of tensors" in refusal(capsys, folder, tmp_path / "ours")


def test_a_tar_archive_is_refused_before_torch_makes_a_directory(
    saved: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The format of torch before 0.1.10; also an empty archive, of zeros only."""
    folder = copied(saved("llama"), tmp_path / "theirs")
    (folder / "model.safetensors").rename(folder / "storages")
    made: list[object] = []
    mkdtemp = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda *a, **k: made.append(a) or mkdtemp(*a, **k))
    with tarfile.open(folder / "pytorch_model.bin", "w") as archive:
        archive.add(folder / "storages", "storages")
    for content in ((folder / "pytorch_model.bin").read_bytes(), bytes(2 * tarfile.BLOCKSIZE)):
        (folder / "pytorch_model.bin").write_bytes(content)
        told = refusal(capsys, folder, tmp_path / "ours")
        assert len(told.splitlines()) == 1
        assert made == []
        assert "pytorch_model.bin is a tar archive, the format of torch before 0.1.10" in told


def test_an_index_names_files_of_its_folder_only(
    saved: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(saved("llama"), tmp_path / "theirs")
    weights = (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = folder / "model.safetensors.index.json"
    names = list(tensors_of(saved("llama")))
    for name, says in (
        ("../outside.safetensors", "is not the plain name of a file"),
        (str(weights), "is not the plain name of a file"),
        (".hidden.safetensors", "is not the plain name of a file"),
        ("absent.safetensors", "which is not a .safetensors file in this folder"),
        ("config.json", "which is not a .safetensors file in this folder"),
        (3, "has no `weight_map`"),
    ):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(names, name)}))
        told = refusal(capsys, folder, tmp_path / "ours")
        assert says in told
        assert len(told.splitlines()) == 1
    (folder / "link.safetensors").symlink_to(weights)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "link.safetensors")}))
    assert "is a link that leads out of its folder" in refusal(capsys, folder, tmp_path / "ours")
    (folder / "link.safetensors").unlink()
    weights.rename(folder / "part.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*names, "more"], "part.safetensors")}))
    assert "the index lists more, which the files do not contain" in refusal(capsys, folder, tmp_path / "ours")


def test_a_snapshot_of_the_hub_is_read_through_its_links(saved: Callable[[str], Path], tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(saved("llama").iterdir())):
        (repository / "blobs" / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert main(["convert", str(snapshot), str(tmp_path / "ours"), *BYTES]) == EXIT_OK


def test_a_tokenizer_that_leads_elsewhere(
    saved: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(saved("llama"), tmp_path / "theirs")
    secret = tmp_path / "secret"
    secret.write_text("{}")
    (folder / "tokenizer.json").symlink_to(secret)
    told = refusal(capsys, folder, tmp_path / "ours", options=())
    assert "tokenizer.json is a link that leads out of its folder" in told
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("tokenizer.json")
    told = refusal(capsys, folder, tmp_path / "ours", options=())
    assert "tokenizer.json is a link that leads back to itself" in told


def _words(folder: Path, *special: str, **settings: str) -> None:
    """A tokenizer of whole words, as many as the model has tokens."""
    import tokenizers

    names = ["[PAD]", "[UNK]", "[SEP]", *special]
    names += [f"word{number}" for number in range(VOCAB - len(names))]
    model = tokenizers.models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]")
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[SEP]", "pad_token": "[PAD]", **settings}))


@pytest.mark.parametrize("settings", [{}, {"mask_token": "[HIDE]"}])
def test_a_tokenizer_without_a_mask(
    saved: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, str]
) -> None:
    folder = copied(saved("bert"), tmp_path / "theirs")
    _words(folder, **settings)
    told = refusal(capsys, folder, tmp_path / "ours", options=())
    assert "the tokenizer has no mask token: neither [MASK] nor <mask>; set the one that it has" in told
    assert "belongs to another model" not in told


def test_a_mask_of_another_name(saved: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied(saved("bert"), tmp_path / "theirs")
    _words(folder, "[HIDE]", mask_token="[HIDE]")
    assert main(["convert", str(folder), str(tmp_path / "ours")]) == EXIT_OK
    text = (tmp_path / "ours" / "conf" / "tokenizer" / "converted.yaml").read_text()
    assert yaml.safe_load(text)["special_tokens"] == {"mask_token": "[HIDE]"}


def test_a_tokenizer_without_room_for_sentinels(
    saved: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(saved("t5_v1_1"), tmp_path / "theirs")
    _words(folder)
    told = refusal(capsys, folder, tmp_path / "ours", options=())
    assert "the tokenizer lacks 100 of the sentinels <extra_id_0>" in told


# ---------------------------------------------------------------- places


def test_what_is_there_is_not_touched(
    saved: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = saved("llama")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    assert "already exists" in refusal(capsys, theirs, tmp_path / "full")
    assert "there is no such folder" in refusal(capsys, tmp_path / "nowhere", tmp_path / "ours")
    (tmp_path / "empty").mkdir()
    assert "holds neither a config.json with weights nor" in refusal(capsys, tmp_path / "empty", tmp_path / "ours")
    assert "already has that format" in refusal(capsys, theirs, tmp_path / "ours", "--to", "hf")
    assert main(["convert", str(theirs), str(tmp_path / "empty"), *BYTES]) == EXIT_OK
    assert "--model-type x is none of llama" in refusal(
        capsys, tmp_path / "empty", tmp_path / "back", "--model-type", "x", options=()
    )


def test_a_full_disk_leaves_nothing(
    saved: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written, real = 0, os.write

    def write(descriptor: int, data: bytes) -> int:
        nonlocal written
        written += len(data)
        if written > 50_000:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr("stoker.trainer.utils.safetensors_io.os.write", write)
    assert "No space left on device" in refusal(capsys, saved("llama"), tmp_path / "ours", code=EXIT_IO)


def test_memory_is_that_of_one_parameter(
    saved: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor is read once, and the one before it is no longer held."""
    from stoker.trainer.conversion import hf_folder as module

    alive: list[Any] = []
    most = 0
    real = module.FolderTensors.read

    def read(self: Any, name: str) -> Tensor:
        nonlocal most
        import weakref

        tensor = real(self, name)
        alive.append(weakref.ref(tensor))
        most = max(most, sum(ref() is not None for ref in alive))
        return tensor

    monkeypatch.setattr(module.FolderTensors, "read", read)
    convert_to_stoker(saved("llama"), tmp_path / "ours", tokenizer="byte-level")
    assert len(alive) == 21
    assert most <= 4, "q, k and v of one layer, and the one that is read"


def test_a_wicked_checkpoint(saved: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint whose configuration names code, with a manifest that says it is as written."""
    assert main(["convert", str(saved("llama")), str(tmp_path / "ours"), *BYTES]) == EXIT_OK
    step = tmp_path / "ours" / "checkpoints" / "step-0"
    document = json.loads((step / "config.json").read_text())
    document["model"]["_target_"] = "os.system"
    files = json.loads((step / "manifest.json").read_text())["files"]
    records = {path.name: FileRecord(**files[path.name]) for path in step.glob("*.safetensors")}
    state = RunState.model_validate(json.loads((step / "state.json").read_text()))
    tokenizer = json.loads((step / "tokenizer.json").read_text())
    for name in ("state.json", "config.json", "tokenizer.json", "manifest.json"):
        (step / name).unlink()
    write_metadata(step, records, state, document, tokenizer)
    told = refusal(capsys, tmp_path / "ours", tmp_path / "back", options=())
    assert "model._target_ = os.system" in told
    assert "a configuration must not name code to run" in told

    (step / "config.json").write_text("{}")
    assert "config.json has 2 bytes instead of" in refusal(capsys, step, tmp_path / "back", options=())


def test_an_id_of_the_hub(
    saved: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def snapshot_download(model: str, **options: Any) -> str:
        asked.append(SimpleNamespace(model=model, **options))
        if model == "org/absent":
            raise OSError("no such model\nand more")
        return str(saved("llama"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert main(["convert", "org/name@v1", str(tmp_path / "ours"), *BYTES]) == EXIT_OK
    assert (asked[0].model, asked[0].revision) == ("org/name", "v1")
    assert "*.py" in asked[0].ignore_patterns
    told = refusal(capsys, "org/absent", tmp_path / "x", code=EXIT_IO)
    why = "cannot be downloaded from the hub (OSError: no such model)"
    assert told.strip() == f"org/absent is not a local folder, and {why}"


def test_a_whole_model_has_no_base(
    saved: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved("llama")
    told = refusal(capsys, folder, tmp_path / "x", options=("--merge", "--base", "other"))
    assert told.strip() == f"--merge, --base other: {folder} is not an adapter; leave them out"


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ((), ("--merge",), ("--base", str(tmp_path))):
        told = refusal(capsys, tmp_path / "nowhere", tmp_path / "x", options=options)
        assert told.strip() == f"{tmp_path / 'nowhere'}: there is no such folder"


def test_all_models_are_in_the_table() -> None:
    import transformers

    from stoker.models.hf.architectures import ARCHITECTURES

    kinds = {getattr(transformers, kind).config_class.model_type for kind, _ in MODELS.values()}
    assert kinds == {architecture.model_type for architecture in ARCHITECTURES}
