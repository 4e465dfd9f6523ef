"""Help, mistyped keys and wrong paths are answered without importing torch, which takes seconds."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fork_server import ForkServer

from stoker.trainer.cli.list_names import TOPICS
from stoker.trainer.cli.main import VERBS, main


@pytest.fixture(scope="module")
def processes() -> Iterator[ForkServer]:
    """Run functions in child processes of one that has imported the command line only."""
    server = ForkServer("stoker.trainer.cli.main")
    yield server
    server.close()


@pytest.fixture
def answers(processes: ForkServer, tmp_path: Path) -> Callable[[list[list[str]]], list[tuple[int, str]]]:
    """Run command lines in `tmp_path`, with their exit codes and standard errors; fail at one that imports torch."""

    def run(arguments: list[list[str]]) -> list[tuple[int, str]]:
        found = processes.call("light_commands", "answers", arguments, str(tmp_path))
        for words, (code, error, heavy) in zip(arguments, found, strict=False):
            assert heavy == [], f"stoker {' '.join(words)} ({code}) imports {', '.join(heavy)}: {error}"
        return [(code, error) for code, error, _ in found]

    return run


def test_help_imports_no_torch(answers):
    assert all(code == 0 for code, _ in answers([[verb, "--help"] for verb in VERBS]))


def test_composition_is_shown_without_torch(answers):
    verbs = ["train", "finetune", "config", "plan", "explain", "explain attention"]
    words = ["--cfg job", "--info", "-c all --resolve hydra/sweeper=optuna", "--info plugins"]
    commands = [f"{verb} {word}".split() for verb in verbs for word in words]
    assert all(code == 0 for code, _ in answers(commands))


@pytest.fixture
def folders(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("x")
    (tmp_path / "run" / "checkpoints" / "step-3").mkdir(parents=True)
    return tmp_path


def test_lists_import_no_torch(answers):
    assert all(code == 0 for code, _ in answers([["list", topic] for topic in TOPICS]))


def test_reports_import_no_torch(answers, tmp_path):
    old = Path(__file__).parents[1] / "data" / "run_0_1_0" / "run"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}')
    commands = [["report", str(old), "--output", "page.html"], ["compare", str(old), "other"]]
    assert [code for code, _ in answers(commands)] == [0, 0]


def test_all_that_keeps_a_run_from_starting_is_told_at_once(folders, monkeypatch, capsys):
    monkeypatch.chdir(folders)
    keys = [
        "train", "data=text", "model.data.path=nowhere", "model.restore_from_path=neither",
        "exp_manager.files_to_copy=[none]", "exp_manager.resume_from_checkpoint=no", "trainer.accelerator=mps",
        "exp_manager.explicit_log_dir=file",
    ]  # fmt: skip
    assert main(keys) == 2
    error = capsys.readouterr().err
    for words in (
        "File exists; set exp_manager.explicit_log_dir", "cannot read nowhere", "no usable checkpoint in neither",
        "`exp_manager.files_to_copy` (none)", "`exp_manager.resume_from_checkpoint` (no)",
        "`trainer.accelerator` (mps)",
    ):  # fmt: skip
        assert words in error, error


def test_wrong_keys_and_paths_are_reported_without_torch(folders, answers):
    cases = {
        "train model.num_layer=3": "did you mean model.num_layers?",
        "train exp_manager.explicit_log_dir=file": "File exists; set exp_manager.explicit_log_dir",
        "train exp_manager.explicit_log_dir=file/run": "Not a directory; set exp_manager.explicit_log_dir",
        "train exp_manager.exp_dir=file": "File exists; set exp_manager.exp_dir",
        "train exp_manager.explicit_log_dir=run": "already holds checkpoints up to step-3",
        "train data=text model.data.path=nowhere": "`model.data.path`: cannot read nowhere: No such file",
        "train model.restore_from_path=nowhere": "`model.restore_from_path`: no usable checkpoint in nowhere",
        "finetune data=text model.data.path=file model.restore_from_path=nowhere": "no usable checkpoint in nowhere",
        "config model.num_layer=3": "did you mean model.num_layers?",
        "explain attention model.num_layer=3": "did you mean model.num_layers?",
        "explain atention": "did you mean `stoker explain attention`?",
        "plan model.num_layer=3": "did you mean model.num_layers?",
        "generate nowhere --prompt a": "no usable checkpoint in nowhere: there is no such folder",
        "generate folder --prompt a": "no usable checkpoint in folder: give a run directory",
        "evaluate nowhere": "no usable checkpoint in nowhere: there is no such folder",
        "evaluate file": "no usable checkpoint in file: give a run directory",
        "convert nowhere new": "nowhere: there is no such folder",
        "convert folder new": "folder holds neither a config.json",
        "convert folder folder": "folder already exists",
        "quickstart model.num_layer=3": "did you mean model.num_layers?",
        "quickstart --dir file": "cannot write the run directory",
        "quickstart --dir run": "already holds checkpoints up to step-3",
        "preprocess nowhere": "missing: --output-prefix",
        "report nowhere": "nowhere is not the directory of a run: there is no such folder",
        "report folder": "it holds neither config.resolved.json nor metrics.jsonl",
        "compare folder nowhere": "folder: neither a run directory nor the directory of a sweep",
        "doctor --nothing": "unknown: --nothing",
        "config --verbose": "fix: `stoker config --help` lists the options",
    }
    found = answers([case.split() for case in cases])
    for (case, message), (code, error) in zip(cases.items(), found, strict=True):
        assert code in (2, 74), f"{case}: {error}"
        assert message in error, f"{case}: {error}"
