"""Saves that are killed or fail at any call, full and read-only disks: an older checkpoint stays, a run goes on."""

import contextlib
import errno
import json
import os
import subprocess
import sys
import tempfile

import pytest
from interrupted_runs import FIGURES, arguments, figures
from kill_during_save import count_calls, problems_after, replace_calls, save
from tiers import TIER, extra, full_only
from tiny_run import final_hashes, tiny_config

from stoker.trainer.checkpoint.reader import newest_checkpoint, open_checkpoint
from stoker.trainer.checkpoint.run_directory import open_run_directory
from stoker.trainer.cli.main import main
from stoker.trainer.loggers.run_logger import RunLogger
from stoker.trainer.train import run_training
from stoker.trainer.utils.errors import EXIT_IO, EXIT_OK, UserError

# ---------------------------------------------------------------- at any call


@full_only
@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_kill_at_any_call_of_a_save_leaves_a_whole_checkpoint(tmp_path, forks, how, ranks):
    result = forks.call("kill_during_save", "killed", str(tmp_path), how == "async", ranks, 1)
    assert result["calls"] >= 40
    assert result["deaths"] == result["kills"] >= 5
    assert result["problems"] == {}


@pytest.mark.parametrize("code", [errno.ENOSPC, *extra(errno.EIO, errno.EROFS, errno.EACCES)])
@pytest.mark.parametrize(("how", "ranks"), [("async", 2), *extra(("sync", 1), ("sync", 2), ("async", 1))])
def test_an_error_of_any_call_of_a_save_is_told_once_and_leaves_a_whole_checkpoint(tmp_path, how, ranks, code):
    is_async = how == "async"
    calls = count_calls(tmp_path / "counted", is_async=is_async, world_size=ranks)
    tried = range(1, calls + 1, 3 if TIER == "fast" else 1)
    told = 0

    def fail(number, name, real, args):
        if number == wanted:
            raise OSError(code, os.strerror(code))

    for wanted in tried:
        directory = tmp_path / str(wanted)
        save(directory, 2, is_async=is_async, world_size=ranks)
        restore = replace_calls(fail)
        try:
            raised = save(directory, 3, is_async=is_async, world_size=ranks)
        finally:
            restore()
        if raised:  # an unreadable directory that is about to be deleted is no error, nor is a `mkdir` of what exists
            told += 1
            assert len(raised) == ranks, wanted
            for error in raised:
                assert isinstance(error, UserError), (wanted, error)
                assert error.exit_code == EXIT_IO
                assert os.strerror(code) in error.lines[0]
                assert len(error.lines) == 2
        assert problems_after(directory, is_async=is_async, world_size=ranks) == [], wanted
    assert told >= 0.8 * len(tried)


# ---------------------------------------------------------------- disks


@contextlib.contextmanager
def mounted(path, *options):
    """A tmpfs; only root may have one."""
    path.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(path)], capture_output=True, check=False
    ) if sys.platform == "linux" else None  # fmt: skip
    if done is None or done.returncode:
        pytest.skip("cannot mount a tmpfs here (needs root on Linux)")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def remount(path, *options):
    subprocess.run(["mount", "-o", ",".join(["remount", *options]), str(path)], check=True)


def train(directory, *changes, steps=12):
    return main(arguments(directory, steps, *changes))


@pytest.fixture(scope="module")
def peace(tmp_path_factory):
    directory = tmp_path_factory.mktemp("peace")
    assert train(directory) == EXIT_OK
    return final_hashes(directory, 12)


def sizes(count):
    """From too small for the first checkpoint (248 KiB with its files) to large enough for two and a half."""
    return [100 + 25 * number for number in range(count)]


@pytest.mark.parametrize(
    ("kib", "how"),
    [(300, "sync"), *extra((550, "async"), (300, "async"), (550, "sync"))]
    + [(size, how) for size in extra(*sizes(20)) if size not in (300, 550) for how in ("sync", "async")],
)
def test_a_full_disk_ends_the_run_in_a_line_and_it_goes_on_with_more_space(tmp_path, peace, capsys, kib, how):
    change = f"exp_manager.checkpoint_callback_params.async_save={how == 'async'}"
    with mounted(tmp_path / "disk", f"size={kib}k") as disk:
        directory = disk / "run"
        code = train(directory, change)
        error = capsys.readouterr().err.splitlines()
        assert code == EXIT_IO
        assert "No space left on device" in error[0]
        assert len(error) <= 2
        checkpoint, complaints = newest_checkpoint(directory / "checkpoints")
        assert not complaints
        if checkpoint is not None:
            assert str(checkpoint.path) in error[-1]
        remount(disk, "size=64m")
        assert train(directory, change) == EXIT_OK
        assert final_hashes(directory, 12) == peace


def test_a_read_only_disk_ends_the_run_in_a_line(tmp_path, peace, capsys):
    directory, change = tmp_path / "run", "exp_manager.checkpoint_callback_params.dirpath={}"
    with mounted(tmp_path / "disk", "size=16m") as disk:
        assert train(directory, change.format(disk / "kept"), steps=10) == EXIT_OK
        (disk / "kept" / "step-11.tmp-1").mkdir()
        remount(disk, "ro")
        capsys.readouterr()
        for place, what in ((disk / "kept", "kept"), (disk / "new", "new")):
            assert train(directory, change.format(place)) == EXIT_IO
            error = capsys.readouterr().err.splitlines()
            assert len(error) == 1
            assert "Read-only file system" in error[0]
            assert str(disk / what) in error[0]
        assert open_checkpoint(disk / "kept" / "step-10")
        remount(disk, "rw")
        assert train(directory, change.format(disk / "kept")) == EXIT_OK
        manifest = json.loads((disk / "kept" / "step-12" / "manifest.json").read_text())
        assert {name: manifest["files"][name]["sha256"] for name in peace} == peace


def test_a_disk_that_becomes_read_only_ends_the_run_in_two_lines(tmp_path, capsys, monkeypatch):
    from stoker.trainer.checkpoint import async_saver

    directory, real = tmp_path / "run", async_saver.write_checkpoint
    directory.mkdir()
    with mounted(directory / "checkpoints", "size=16m") as disk:

        def write_checkpoint(path, content, ranks):
            if content.state.step == 10:
                remount(disk, "ro")
            return real(path, content, ranks)

        monkeypatch.setattr(async_saver, "write_checkpoint", write_checkpoint)
        assert train(directory) == EXIT_IO
        assert capsys.readouterr().err.splitlines() == [
            f"cannot write checkpoint {disk}/step-10: Read-only file system",
            f"the newest checkpoint on disk is {disk}/step-5",
        ]
        assert open_checkpoint(disk / "step-5")


def test_temporary_files_are_never_used(tmp_path, peace, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with mounted(tmp_path / "disk", "size=16m") as disk:
        assert train(disk / "run") == EXIT_OK
        assert final_hashes(disk / "run", 12) == peace


def test_a_full_disk_that_takes_no_log_line_still_names_the_checkpoint(tmp_path, capsys, monkeypatch):
    def refuse(self, text):
        raise UserError("cannot write the run's logs", EXIT_IO)

    def fail(self):
        monkeypatch.setattr(RunLogger, "log_to_file", refuse)
        raise UserError("cannot write checkpoint", EXIT_IO)

    monkeypatch.setattr("stoker.trainer.callbacks.train_loop.TrainLoopCallback._reduce_flags", fail)
    assert train(tmp_path / "run") == EXIT_IO
    assert capsys.readouterr().err.splitlines() == ["cannot write checkpoint"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a device on which every write fails")
@pytest.mark.parametrize(("step", "of"), [(8, "validation"), *extra((6, "training"), (8, "training"))])
def test_a_run_whose_logs_cannot_be_written_saves_the_last_finished_step(tmp_path, capsys, monkeypatch, step, of):
    """Also in the middle of the report of a step; resumed, the run is the same as one without the fault."""
    changes = {
        "trainer__max_steps": 12,
        "trainer__log_every_n_steps": 1,
        "trainer__val_check_interval": 4,
        "exp_manager__checkpoint_callback_params": {"every_n_train_steps": 50},
    }
    assert run_training(tiny_config(tmp_path / "peace", **changes)).exit_code == EXIT_OK
    directory, name = tmp_path / "run", "log_step" if of == "training" else "log_validation"
    log = getattr(RunLogger, name)

    def fail(self, *args):
        if self._metrics is not None and step == (args[0] if of == "validation" else args[0].step):
            with open("/dev/full", "w") as full:
                for file in (self._metrics, self._log):
                    os.dup2(full.fileno(), file.fileno())
        log(self, *args)

    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(RunLogger, name, fail)
        with pytest.raises(UserError, match=r"^cannot write the run's logs: No space left on device$") as error:
            run_training(tiny_config(directory, **changes))
    assert error.value.exit_code == EXIT_IO
    checkpoint = open_checkpoint(directory / "checkpoints" / f"step-{step}")
    assert checkpoint.state.loop.validation_due == (step % 4 == 0)
    assert f"stopped by logs that cannot be written after step {step}; checkpoint" in capsys.readouterr().out
    assert run_training(tiny_config(directory, **changes)).exit_code == EXIT_OK
    assert final_hashes(directory, 12) == final_hashes(tmp_path / "peace", 12)
    lost = {(step, figure) for figure in FIGURES if figure != "val_loss"} if of == "training" else set()
    assert figures(directory) == {key: value for key, value in figures(tmp_path / "peace").items() if key not in lost}


# ---------------------------------------------------------------- two runs, one place


def test_two_runs_cannot_save_to_one_place(tmp_path):
    place = {"exp_manager__checkpoint_callback_params": {"dirpath": str(tmp_path / "shared")}}
    with (
        open_run_directory(tiny_config(tmp_path / "a", **place)),
        pytest.raises(UserError, match=r"another process saves its checkpoints in .*/shared;.*params\.dirpath"),
    ):
        open_run_directory(tiny_config(tmp_path / "b", **place))
    # The refused call has let go of its own directory, and the first run of both.
    with open_run_directory(tiny_config(tmp_path / "b", **place)):
        pass


def test_a_run_that_saves_nothing_leaves_alone_what_another_one_is_saving(tmp_path):
    shared = tmp_path / "shared"
    (shared / "step-3.tmp-9").mkdir(parents=True)
    run_training(
        tiny_config(
            tmp_path / "run",
            trainer__max_steps=1,
            exp_manager__checkpoint_callback_params={"dirpath": str(shared)},
            exp_manager__create_checkpoint_callback=False,
        )
    )
    assert [path.name for path in shared.iterdir()] == ["step-3.tmp-9"]
