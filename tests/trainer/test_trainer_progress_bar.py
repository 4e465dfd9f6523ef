"""Terminal output: aligned lines, or a live progress bar where there is a terminal."""

import io
import re

import pytest
from rich.console import Console
from tiers import looped

from stoker.trainer.loggers.progress_bar import ProgressDisplay, format_step, format_validation
from stoker.trainer.loggers.run_logger import RunLogger
from stoker.trainer.loggers.step_report import StepReport
from stoker.trainer.utils.text import format_duration

REPORT = StepReport(
    step=120, loss=2.34567, grad_norm=0.5, lr=2e-4, consumed_samples=960, step_seconds=0.25, tokens_per_second=65536.0,
    mfu=0.5234, memory_gib=33.1,
)  # fmt: skip


def test_lines_align_and_leave_out_what_was_not_measured():
    line = format_step(REPORT, 10_000, 2470.0)
    assert line == (
        "step   120/10000  loss  2.3457  lr 2.00e-04  grad norm  0.500    250.0 ms/step     65,536 tokens/s  "
        "MFU 52.3%  33.10 GiB  41:10 left"
    )
    first = StepReport(step=1, loss=5.0, grad_norm=1.0, lr=0.1, consumed_samples=8)
    assert format_step(first, 10_000, None) == "step     1/10000  loss  5.0000  lr 1.00e-01  grad norm  1.000"
    assert format_validation(5, 10, {"val_loss": 1.25, "bits_per_byte": 1.8}) == (
        "step  5/10  val loss 1.2500  bits per byte 1.8000"
    )


@looped(
    ("seconds", "text"), [(0, "0 s"), (59.4, "59 s"), (60, "1:00"), (3599, "59:59"), (7380, "2:03:00"), (-1, "0 s")]
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


def shown(*, live, terminal):
    panel = ProgressDisplay(10_000, live=live, title="name")
    output = io.StringIO()
    panel._console = Console(file=output, force_terminal=terminal, width=100, soft_wrap=True, highlight=False)
    panel._use_live = live and terminal
    panel.print("a [plain] line")
    panel.show_step(REPORT)
    panel.show_validation(120, {"val_loss": 2.5})
    panel.close()
    return output.getvalue()


def test_a_terminal_gets_the_panel_below_the_lines():
    text = shown(live=True, terminal=True)
    assert "step   120/10000  loss  2.3457" in text
    assert "step   120/10000  val loss 2.5000" in text
    for part in (
        "a [plain] line",
        "step 120 / 10,000",
        "val loss 2.5000",
        "65,536 tokens/s",
        "MFU 52.3%",
        "41:10 left",
    ):
        assert part in text


@pytest.mark.parametrize(("live", "terminal"), [(True, False), (False, True), (False, False)])
def test_everything_else_gets_lines(live, terminal):
    text = shown(live=live, terminal=terminal)
    assert "a [plain] line\nstep   120/10000" in text
    assert "val loss 2.5000" in text


def test_the_panel_leaves_room_for_an_echoed_interrupt_and_keeps_the_cursor():
    """A full line would wrap at the ^C, and the next redraw would leave the top border behind."""
    text = shown(live=True, terminal=True)
    borders = re.findall("[╭╰][^╮╯]*[╮╯]", text)
    assert borders
    assert max(map(len, borders)) <= 100 - len("^C") - 1
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert text.index("\x1b[?25h") < text.index("╭")


def test_the_estimate_is_the_time_of_the_steps_that_are_left():
    panel = ProgressDisplay(200, live=False)
    assert panel.remaining_seconds() is None
    panel.show_step(REPORT)
    assert panel.remaining_seconds() == 80 * 0.25


@pytest.mark.parametrize("live", [False, True])
def test_run_log_has_the_same_lines(tmp_path, live):
    progress = ProgressDisplay(10_000, live=False)
    progress._console = Console(file=io.StringIO(), force_terminal=True)
    progress._use_live = live
    with RunLogger(tmp_path, progress) as logger:
        logger.log_step(REPORT)
        logger.log_validation(120, {"val_loss": 2.5})
    step, validation = (tmp_path / "run.log").read_text().splitlines()
    assert step.endswith(format_step(REPORT, 10_000, 2470.0))
    assert validation.endswith("step   120/10000  val loss 2.5000")
