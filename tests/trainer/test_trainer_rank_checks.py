"""Differences between the machines of a run are told in one line, on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from config_helpers import load

from stoker.trainer.checkpoint.run_directory import open_run_directory
from stoker.trainer.core import rank_checks
from stoker.trainer.distributed.process_group import DistributedContext
from stoker.trainer.utils.errors import EXIT_BAD_INPUT, UserError


class ThreeRanks(DistributedContext):
    """Three ranks, of which the last one gathers something else."""

    def __init__(self, **changed: str) -> None:
        super().__init__(0, 3)
        self._changed = changed

    def all_gather_text(self, text: str) -> list[str]:
        _, values = json.loads(text)
        other = {name: value for name, value in self._changed.items() if name in values}
        return [text, text, json.dumps(["far", values | other])]


def check(ranks: DistributedContext) -> None:
    rank_checks.check_same_setup(ranks, "digest")
    rank_checks.check_same_data(ranks, "fingerprint", 300)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"configuration": "other"}, "the ranks have different configurations; start them with the same files"),
        ({"torch": "0.1"}, "rank 2 on far has torch 0.1, but rank 0 on "),
        ({"stoker": "9.9"}, "rank 2 on far has stoker 9.9, but rank 0 on "),
        ({"data": "feed"}, "rank 2 on far has data feed, but rank 0 on "),
        ({"a vocabulary size of": "7"}, "rank 2 on far has a vocabulary size of 7, but rank 0 on "),
    ],
)
def test_a_rank_that_differs_is_named(changed: dict[str, str], line: str) -> None:
    with pytest.raises(UserError) as caught:
        check(ThreeRanks(**changed))
    assert len(caught.value.lines) == 1
    assert caught.value.lines[0].startswith(line)
    assert caught.value.exit_code == EXIT_BAD_INPUT


def test_equal_ranks_pass() -> None:
    for ranks in (ThreeRanks(), DistributedContext()):
        check(ranks)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_directory_on_another_file_system_is_refused(tmp_path: Path, elsewhere: bool) -> None:
    keys: list[Any] = [f"exp_manager.explicit_log_dir={tmp_path / 'run'}"]
    keys += [f"exp_manager.checkpoint_callback_params.dirpath={tmp_path / 'kept'}"] * elsewhere
    with open_run_directory(load("data=mock", *keys)) as directory:
        token = rank_checks.mark_shared_directory(directory)
        paths = (directory.path, *([directory.checkpoints] if elsewhere else []))
        rank_checks.check_shared_directory(token, *paths)
        rank_checks.check_shared_directory("", tmp_path / "none")  # where files cannot be locked
        for other in (tmp_path / "none", *paths):
            if other in paths:  # the same name on another machine, where an earlier run has left its file
                (other / "run.lock").write_text("stale")
            with pytest.raises(UserError, match="all machines must share it"):
                rank_checks.check_shared_directory(token, other)
