"""Help, mistyped keys and wrong paths are answered without importing torch, which takes seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.trainer.cli.list_names import TOPICS
from stoker.trainer.cli.main import VERBS, main

CHILD = """
import contextlib, io, json, sys
from stoker.trainer.cli.main import main

found = []
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code
    heavy = sorted({"torch", "transformers", "lightning", "lm_eval", "pytorch_lightning"} & set(sys.modules))
    found.append([code, err.getvalue(), heavy])
    if heavy:
        break
print(json.dumps(found))
"""


def answers(arguments: list[list[str]], folder) -> list[tuple[int, str]]:
    """Return exit code and standard error of each command line; fail at the first that imports torch."""
    command = [sys.executable, "-c", CHILD, json.dumps(arguments)]
    found = json.loads(subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout)
    for words, (code, error, heavy) in zip(arguments, found, strict=False):
        assert heavy == [], f"stoker {' '.join(words)} ({code}) imports {', '.join(heavy)}: {error}"
    return [(code, error) for code, error, _ in found]


def test_help_imports_no_torch(tmp_path):
    assert all(code == 0 for code, _ in answers([[verb, "--help"] for verb in VERBS], tmp_path))


def test_composition_is_shown_without_torch(tmp_path):
    verbs = ["train", "finetune", "config", "plan", "explain", "explain attention"]
    words = ["--cfg job", "--info", "-c all --resolve hydra/sweeper=optuna", "--info plugins"]
    commands = [f"{verb} {word}".split() for verb in verbs for word in words]
    assert all(code == 0 for code, _ in answers(commands, tmp_path))


@pytest.fixture
def folders(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("x")
    (tmp_path / "run" / "checkpoints" / "step-3").mkdir(parents=True)
    return tmp_path


def test_lists_import_no_torch(tmp_path):
    assert all(code == 0 for code, _ in answers([["list", topic] for topic in TOPICS], tmp_path))


def test_reports_import_no_torch(tmp_path):
    old = Path(__file__).parents[1] / "data" / "run_0_1_0" / "run"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}')
    commands = [["report", str(old), "--output", "page.html"], ["compare", str(old), "other"]]
    assert [code for code, _ in answers(commands, tmp_path)] == [0, 0]


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


def test_wrong_keys_and_paths_are_reported_without_torch(folders):
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
    found = answers([case.split() for case in cases], folders)
    for (case, message), (code, error) in zip(cases.items(), found, strict=True):
        assert code in (2, 74), f"{case}: {error}"
        assert message in error, f"{case}: {error}"
