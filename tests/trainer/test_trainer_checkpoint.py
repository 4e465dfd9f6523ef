"""Checkpoints: complete or not there at all, verified when read, and never more than what was asked for."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiers import cases
from torch import nn

from stoker.trainer.checkpoint.reader import (
    OPTIMIZER,
    WEIGHTS,
    RunState,
    checkpoint_paths,
    find_checkpoint,
    newest_checkpoint,
    open_checkpoint,
)
from stoker.trainer.checkpoint.sharded_safetensors import read_shards
from stoker.trainer.checkpoint.writer import CheckpointContent, apply_retention, remove_temporaries, write_checkpoint
from stoker.trainer.optim.adamw import AdamW
from stoker.trainer.utils import safetensors_io
from stoker.trainer.utils.errors import UserError
from stoker.trainer.utils.local_shard import local_shard
from stoker.trainer.utils.safetensors_io import DamagedFileError, read_json, write_json, write_safetensors

FILES = ["config.json", "manifest.json", "model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json"]


def net(width=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width)).to(torch.bfloat16)


def parts(width=3):
    model = net(width)
    return model, AdamW(model.named_parameters(), lr=0.1, main_weights=True)


def first_weight(model):
    return next(model.parameters())


def state(step, val_loss=None):
    return RunState(
        step=step, consumed_samples=4 * step, val_loss=val_loss, seed=1, global_batch_size=4, micro_batch_size=2,
        sequence_length=8, precision="fp32", optimizer={"lr": 0.1}, data_fingerprint="f", versions={"torch": "2"},
    )  # fmt: skip


def save(directory, step, val_loss=None):
    model, optimizer = parts()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(step)
    return write_checkpoint(
        directory,
        CheckpointContent(
            state(step, val_loss),
            {
                WEIGHTS: {name: local_shard(p) for name, p in model.named_parameters()},
                OPTIMIZER: optimizer.local_shards(),
            },
            {"name": "x"},
            {"tokenizer": "byte"},
        ),
    )


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_round_trip(tmp_path):
    path = save(tmp_path, 7, 1.5)
    assert path == tmp_path / "step-7"
    assert names(path) == FILES
    checkpoint = open_checkpoint(path)
    assert checkpoint.state == state(7, 1.5)
    assert checkpoint.config_document == {"name": "x"}
    assert checkpoint.tokenizer_document == {"tokenizer": "byte"}
    model, optimizer = parts()
    optimizer.local_shards()["0.weight.exp_avg"].local.fill_(3)
    checkpoint.load_weights(model)
    checkpoint.load_optimizer(optimizer)
    assert torch.equal(first_weight(model), first_weight(net()) + 7)
    assert optimizer.local_shards()["0.weight.exp_avg"].local.count_nonzero() == 0
    assert optimizer.step_count == 7
    assert first_weight(model).requires_grad


def test_the_safetensors_library_reads_our_files(tmp_path):
    tensors = {
        "b": torch.randn(3, 5).bfloat16(),
        "a": torch.arange(7, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "view": torch.randn(6, 4).t(),
    }
    record = write_safetensors(tmp_path / "x.safetensors", tensors)
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor)
        assert loaded[name].dtype == tensor.dtype
    assert record.size == (tmp_path / "x.safetensors").stat().st_size
    safetensors_io.verify_file(tmp_path / "x.safetensors", record)


# ---------------------------------------------------------------- damage


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def to_fifo(path):
    path.unlink()
    os.mkfifo(path)


def to_link(path):
    aside = path.with_name("elsewhere")
    path.rename(aside)
    path.symlink_to(aside)


@pytest.mark.parametrize("file", cases(FILES, fast=2))
@pytest.mark.parametrize("damage", [flip, truncate, os.unlink, to_fifo, to_link, lambda path: path.write_bytes(b"")])
def test_any_damage_is_found_and_the_one_before_is_used(tmp_path, file, damage):
    save(tmp_path, 1)
    damage(save(tmp_path, 2) / file)
    checkpoint, complaints = newest_checkpoint(tmp_path)
    assert checkpoint
    assert checkpoint.path.name == "step-1"
    assert len(complaints) == 1
    assert "step-2 is damaged" in complaints[0]
    assert "\n" not in complaints[0]


def test_a_changed_optimizer_does_not_matter_where_it_is_not_read(tmp_path):
    path = save(tmp_path, 1)
    flip(path / "optimizer.safetensors")
    assert open_checkpoint(path, with_optimizer=False).state.step == 1
    with pytest.raises(DamagedFileError, match=r"optimizer\.safetensors does not have the SHA-256"):
        open_checkpoint(path)


def test_swapped_files_of_two_steps_are_found(tmp_path):
    one, two = save(tmp_path, 1), save(tmp_path, 2)
    shutil.copy(one / "model.safetensors", two / "model.safetensors")
    with pytest.raises(DamagedFileError, match="SHA-256"):
        open_checkpoint(two)


def test_two_checkpoints_with_each_others_names_are_found(tmp_path):
    one, two = save(tmp_path, 1), save(tmp_path, 2)
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)
    checkpoint, complaints = newest_checkpoint(tmp_path)
    assert checkpoint is None
    assert "step-2 is damaged (it holds step 1, not the step it is named after)" in complaints[0]
    with pytest.raises(UserError, match=r"no usable checkpoint in .*: all are damaged"):
        find_checkpoint(tmp_path)


def test_a_manifest_cannot_name_other_files(tmp_path):
    path = save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../secret"] = manifest["files"].pop("state.json")
    (path / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    with pytest.raises(DamagedFileError, match="does not list the files"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"step": NaN}', "[" * 70 + "]" * 70, "{", "\udcff".encode("utf-8", "surrogateescape")]
)
def test_hostile_json_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "x.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DamagedFileError, match=r"^x\.json [^\n]+$"):
        read_json(tmp_path / "x.json")


@pytest.mark.parametrize("data", [b"", b"\xff" * 64, (1 << 63).to_bytes(8, "little") + b"{}", b"\x80\x04]."])
def test_what_is_not_safetensors_is_refused(tmp_path, data):
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(DamagedFileError, match="is not a safetensors file"):
        read_shards([tmp_path / "x.safetensors"], {})


def test_other_geometry_is_an_error_that_lists_what_differs(tmp_path):
    checkpoint = open_checkpoint(save(tmp_path, 1))
    with pytest.raises(UserError) as error:
        checkpoint.load_weights(nn.Sequential(nn.Linear(4, 5), nn.Identity()).to(torch.bfloat16))
    text = str(error.value)
    assert "0.weight is bf16 [3, 4], the model needs bf16 [5, 4]" in text
    assert "1.weight does not exist in this model" in text
    with pytest.raises(UserError, match="the model needs f32"):
        checkpoint.load_weights(net().float())
    model = net().float()
    checkpoint.load_weights(model, cast=True)
    assert torch.equal(first_weight(model), (first_weight(net()) + 1).float())


# ---------------------------------------------------------------- on the disk (see test_recovery_saves.py too)


def test_everything_is_on_the_disk_before_it_counts(tmp_path, monkeypatch):
    events = []
    real_sync, real_rename = os.fsync, os.rename

    def fsync(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_sync(descriptor)

    def rename(source, target, **options):
        events.append("rename")
        real_rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    save(tmp_path, 1)
    temporary = tmp_path / f"step-1.tmp-{os.getpid()}"
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    assert set(before) == {str(temporary), *(str(temporary / name) for name in FILES)}
    assert before[-1] == str(temporary)
    assert after == [str(tmp_path)]


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path):
    flip(save(tmp_path, 3) / "model.safetensors")
    save(tmp_path, 3)
    assert open_checkpoint(tmp_path / "step-3")
    assert names(tmp_path) == ["step-3"]


def test_leftovers_go_and_nothing_else(tmp_path):
    save(tmp_path, 1)
    for name in ("step-2.tmp-123", "step-1.tmp-old-9", "steps", "step-x", "notes.tmp-1"):
        (tmp_path / name).mkdir()
    assert {path.name for path in remove_temporaries(tmp_path)} == {"step-2.tmp-123", "step-1.tmp-old-9"}
    assert names(tmp_path) == ["notes.tmp-1", "step-1", "step-x", "steps"]


def test_a_checkpoint_that_was_not_replaced_gets_its_name_back(tmp_path, monkeypatch):
    save(tmp_path, 3, 1.0)
    real, calls = Path.rename, []

    def rename(self, target):
        calls.append(target)
        if len(calls) == 2:  # the old one is aside, the new one has no name yet
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 3, 2.0)
    monkeypatch.undo()
    assert "step-3" not in names(tmp_path)
    assert [path.name for path in remove_temporaries(tmp_path)] == [f"step-3.tmp-{os.getpid()}"]
    assert names(tmp_path) == ["step-3"]
    assert open_checkpoint(tmp_path / "step-3").state.val_loss == 1.0


def test_json_without_finite_numbers_is_never_written(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "x.json", {"loss": float("nan")})


# ---------------------------------------------------------------- which one, and which ones stay


def test_newest_is_by_number_not_by_name(tmp_path):
    for step in (9, 10, 100):
        save(tmp_path, step)
    assert [path.name for path in checkpoint_paths(tmp_path)] == ["step-9", "step-10", "step-100"]
    checkpoint, complaints = newest_checkpoint(tmp_path)
    assert checkpoint
    assert (checkpoint.state.step, complaints) == (100, [])


def test_a_checkpoint_is_found_by_run_directory_checkpoints_or_step(tmp_path):
    save(tmp_path / "checkpoints", 1)
    save(tmp_path / "checkpoints", 2)
    for path in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "step-2"):
        assert find_checkpoint(path)[0].state.step == 2
    with pytest.raises(UserError, match=r"no usable checkpoint.*there is no such folder"):
        find_checkpoint(tmp_path / "nowhere")
    for file, said in (
        (None, "give a run directory"),
        ("model.safetensors", r"a Hugging Face model; convert it to a checkpoint: stoker convert"),
        ("adapter_config.json", r"an adapter in peft format; set model\.peft\.restore_from_path to it"),
    ):
        other = tmp_path / f"other-{file}"
        other.mkdir()
        if file:
            (other / file).write_text("{}")
        with pytest.raises(UserError, match=said):
            find_checkpoint(other)
    flip(tmp_path / "checkpoints" / "step-1" / "state.json")
    with pytest.raises(UserError, match="step-1 cannot be used"):
        find_checkpoint(tmp_path / "checkpoints" / "step-1")


@pytest.mark.parametrize(
    ("top", "last", "kept"),
    [
        (2, True, [1, 3, 5]),
        (2, False, [1, 3]),
        (0, True, [5]),
        (-1, False, [1, 2, 3, 4, 5]),
        (4, False, [1, 2, 3, 5]),
        (9, True, [1, 2, 3, 4, 5]),
    ],
)
def test_retention_keeps_the_best_and_the_last(tmp_path, top, last, kept):
    for step, val_loss in {1: 1.0, 2: 3.0, 3: 2.0, 4: None, 5: None}.items():
        save(tmp_path, step, val_loss)
    apply_retention(tmp_path, save_top_k=top, save_last=last)
    assert [int(path.name.removeprefix("step-")) for path in checkpoint_paths(tmp_path)] == kept
    assert names(tmp_path) == sorted(f"step-{step}" for step in kept)


def test_retention_leaves_alone_what_it_cannot_read(tmp_path):
    (save(tmp_path, 1, 9.0) / "state.json").write_text("?")
    save(tmp_path, 2, 1.0)
    save(tmp_path, 3, 2.0)
    apply_retention(tmp_path, save_top_k=1, save_last=False)
    assert names(tmp_path) == ["step-1", "step-2"]


def test_a_copy_with_a_leading_zero_is_no_checkpoint_of_the_run(tmp_path):
    for step in (1, 2):
        save(tmp_path, step, val_loss=4.0 - step)
    (tmp_path / "step-2").rename(tmp_path / "step-002")
    apply_retention(tmp_path, save_top_k=1, save_last=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-002", "step-1"]
