"""Progress bars: the long verbs count to their totals and end at 100 %; nothing appears without a terminal."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from rich.console import Console
from safetensors import safe_open
from tiny_run import tiny_config

from stoker.trainer.cli import main
from stoker.trainer.train import train
from stoker.trainer.utils import progress
from stoker.trainer.utils.progress import Progress, shown

Screen = Callable[[], list[str]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time as the progress bars see it, in seconds; the test moves it."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def fake_console(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> io.StringIO:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=120, color_system=None, legacy_windows=False)
    monkeypatch.setattr(progress, "stderr_console", lambda: console)
    return file


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """A terminal on which every update is drawn; returns what was drawn since the last call, without control codes."""
    file = fake_console(monkeypatch, terminal=True)
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_REDRAW_SECONDS", 0.0)

    def drawn() -> list[str]:
        text = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", file.getvalue())
        file.seek(0)
        file.truncate()
        return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]

    return drawn


def titles(lines: list[str]) -> list[str]:
    """Return the titles of the bars in order; each must end at 100 %."""
    last = {re.split(r"\s+[━╸╺\d]", line)[0]: line for line in lines}
    for line in last.values():
        done, total = re.findall(r"([\d.,]+)/([\d.,]+) \w+", line)[0]
        assert done == total, line
        assert " 100% " in line, line
        assert "left" not in line, line
    return list(last)


def test_a_bar_has_counts_rate_and_remaining_time(clock: list[float], screen: Screen) -> None:
    with shown(), Progress("reading", 8_000_000, "bytes") as bar:
        bar.resume(2_000_000)
        clock[0] += 2
        bar.advance(3_000_000)
        assert "62% 5.0/8.0 MB 1.5 MB/s 2 s 2 s left" in re.sub(" +", " ", screen()[-1])
    assert titles(screen()) == ["reading"]
    with shown(), Progress("counting", 4, "texts") as bar:
        clock[0] += 10
        bar.update(1, "a note")
        assert "1/4 texts a note 10.0 s each 10 s 30 s left" in re.sub(" +", " ", screen()[-1])
        bar.hide()
        screen()
        bar.advance(1)
        assert "2/4 texts" in screen()[-1]


def test_short_work_and_redraws_are_not_shown(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    file = fake_console(monkeypatch, terminal=True)
    with shown(), Progress("short", 3, "texts") as bar:
        clock[0] += 0.4
        bar.advance(3)
    assert file.getvalue() == ""
    with shown(), Progress("long", 1000, "texts") as bar:
        clock[0] += 1
        for _ in range(1000):
            clock[0] += 0.001
            bar.advance()
    assert 5 <= file.getvalue().count("long") <= 13, "ten times a second"


def test_only_the_outermost_is_shown_and_only_where_it_is_asked_for(screen: Screen) -> None:
    with Progress("silent", 1, "texts") as bar:
        bar.advance()
    with shown(), shown(False), Progress("silent", 1, "texts") as bar:
        bar.advance()
    assert screen() == []
    with shown(), Progress("outer", 4, "texts") as outer:
        with Progress("other", 9, "texts") as inner:
            inner.advance(9)
        assert outer.done == 0
        with Progress("outer", 3, "texts") as inner:
            inner.advance(3)
        assert outer.done == 3
    assert titles(screen()) == ["outer"]


def test_threads_count_together(screen: Screen) -> None:
    with shown(), Progress("hashing", 400, "parts") as bar:
        threads = [Thread(target=lambda: [bar.advance() for _ in range(50)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert bar.done == 400
    assert titles(screen()) == ["hashing"]


def test_an_interrupt_leaves_the_terminal_sane(monkeypatch: pytest.MonkeyPatch) -> None:
    file = fake_console(monkeypatch, terminal=True)
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0.0)

    def stopped() -> None:
        with shown(), Progress("working", 3, "texts") as bar:
            bar.advance()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    text = file.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is visible"
    assert text.endswith(("\n", "\x1b[?25h"))
    assert "1/3 texts" in text
    assert "100%" not in text
    with shown(), Progress("next", 1, "texts"):
        pass
    assert "next" in file.getvalue()


def test_without_a_terminal_a_line_every_half_minute(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    file = fake_console(monkeypatch, terminal=False)
    with shown(), Progress("reading", 200, "files") as bar:
        for _ in range(100):
            clock[0] += 1
            bar.advance()
    assert file.getvalue().splitlines() == [
        "reading: 15%  30/200 files  1.0/s  30 s  2:50 left",
        "reading: 30%  60/200 files  1.0/s  1:00  2:20 left",
        "reading: 45%  90/200 files  1.0/s  1:30  1:50 left",
    ]


# ---------------------------------------------------------------- the verbs


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(tiny_config(folder, trainer__max_steps=2, trainer__val_check_interval=2))
    return folder


def test_verbs_count_to_their_totals(
    trained: Path,
    tmp_path: Path,
    screen: Screen,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finish = Progress.__exit__

    def checked_finish(self: Progress, *error: Any) -> None:
        assert self.done == self.total, f"{self.title} counted {self.done} of {self.total}"
        finish(self, *error)

    monkeypatch.setattr(Progress, "__exit__", checked_finish)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "ab"}) + "\n" + json.dumps({"prompt": "c"}) + "\n")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(50)))
    options = ["--prompts-file", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "2", "--temperature", "0"]
    verbs = {
        "generate": ["--checkpoint", str(trained), "--device", "cpu", "--batch-size", "1", *options],
        "evaluate": [str(trained), "--device", "cpu", "--limit-batches", "3", "--json"],
        "convert": [str(trained), str(tmp_path / "hf")],
        "preprocess": [str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "p"), "--workers", "1"],
        "plan": ["--fit", "--gpus", "2", "--device", "h100", "model=gpt_tiny", "data=mock", "model.num_layers=2"],
    }
    found: dict[str, list[str]] = {}
    lines: dict[str, list[str]] = {}
    output: dict[str, tuple[str, str]] = {}
    for verb, arguments in verbs.items():
        capfd.readouterr()
        assert main.main([verb, *arguments]) == 0, capfd.readouterr().err
        output[verb] = capfd.readouterr()
        lines[verb] = screen()
        found[verb] = titles(lines[verb])
    assert found == {
        "generate": ["verifying", "generating"],
        "evaluate": ["verifying", "evaluating"],
        "convert": ["verifying", "writing"],
        "preprocess": ["tokenizing", "joining"],
        "plan": ["searching layouts", "searching settings"],
    }
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as weights:
        num_bytes = sum(weights.get_tensor(name).nbytes for name in weights.keys())  # noqa: SIM118
    assert "2/2 texts" in lines["generate"][-1]
    assert "3/3 batches" in lines["evaluate"][-1]
    assert f"/{num_bytes / 1000:.1f} kB" in lines["convert"][-1]
    assert [json.loads(line)["prompt"] for line in output["generate"][0].splitlines()] == ["ab", "c"]
    assert json.loads(output["evaluate"][0])["tokens"] > 0
    for text, errors in output.values():
        assert "%" not in errors
        assert "\x1b" not in text + errors


def test_verbs_print_nothing_of_it_without_a_terminal(
    trained: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0.0)
    assert main.main(["evaluate", str(trained), "--device", "cpu", "--limit-batches", "3"]) == 0
    output, errors = capfd.readouterr()
    assert errors == ""
    assert "evaluating" not in output


def test_other_ranks_show_nothing(trained: Path, screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert main.main(["evaluate", str(trained), "--device", "cpu", "--limit-batches", "1"]) == 0
    assert screen() == []
