"""The page of a run and the comparison of runs: what is in them, what must not be, and what cannot break them."""

from __future__ import annotations

import base64
import fcntl
import json
import random
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from run_files import EVIL, FOLDER, HOST, TOKEN, write_run
from tiers import extra, looped
from tiny_run import tiny_config

from stoker.trainer.cli.main import main
from stoker.trainer.config.load import config_from_document, load_run_config
from stoker.trainer.core import report_writer, run_report
from stoker.trainer.report.curves import MAX_POINTS, Curve
from stoker.trainer.report.page import MAX_BYTES, run_page, write_report
from stoker.trainer.report.public_text import PublicText
from stoker.trainer.report.run_data import read_run
from stoker.trainer.train import run_training
from stoker.trainer.utils.errors import UserError

OLD_RUN = Path(__file__).parents[1] / "data" / "run_0_1_0" / "run"


class Page(HTMLParser):
    """A page as a browser reads it: its elements, its text, the text of its scripts, and the headings."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.scripts, self.headings = "", [], []
        self._open = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self._open == "script":
            self.scripts[-1] += data
        elif self._open != "style":
            self.text += data
        if self._open in ("h1", "h2"):
            self.headings.append(data.strip())
        self._open = self._open if self._open in ("script", "style") else ""

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])


def test_a_page_holds_every_section_and_nothing_of_the_machine(tmp_path: Path) -> None:
    html = run_page(read_run(write_run(tmp_path / "run")))
    page = Page(html)
    sections = ("Warnings", "Curves", "Memory", "Attention", "Expert load", "Pipeline", "Sample", "Configuration")
    assert page.headings[1:] == [*sections, "Events", "Environment"]
    for text in ("finished after step 40", "1 values not finite", "refused because", "a note", "1.0 GiB", "1 save in"):
        assert text in page.text, text
    for text in (
        "model.hidden_size",
        ".../my runs/conf/a.yaml:3",
        "a finding of",
        "the dense bf16 peak",
        "9.9",
        "1 on 1 machine",
    ):
        assert text in page.text, text
    assert page.text.count("warning") == 0
    assert page.text.count("cannot read") == 1  # though logged twice
    timeline = re.findall(r"data:image/svg\+xml;base64,[\w+/=]+", html)
    assert len(timeline) == 1
    for secret in (HOST, "node17", FOLDER, "alice", TOKEN, str(tmp_path)):
        assert secret not in html.replace(timeline[0], ""), secret
    charts = {chart["title"]: chart for chart in page.data["charts"]}
    assert {"Loss", "Learning rate", "Gradient norm", "Throughput", "Peak memory"} < set(charts)
    assert [len(line["x"]) for line in charts["Loss"]["series"]] == [39, 1]
    cells = base64.b64decode(page.data["experts"][0]["cells"])
    assert list(cells[:4]) == [round(127.5 * n / 2.5) for n in (1, 2, 3, 4)]


def test_no_text_of_a_run_becomes_markup(tmp_path: Path) -> None:
    page = Page(run_page(read_run(write_run(tmp_path / "run"))))
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == len(page.scripts) == 3
    assert tags.count("img") == 1  # the timeline, as an image: scripts in it do not run
    assert f"upon {EVIL}" in page.text
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert not [value for _, given in page.elements if (value := given.get("src")) and not value.startswith("data:")]
    assert not [tag for tag in tags if tag in ("link", "iframe", "object", "base", "form")]
    (policy,) = [given["content"] for _, given in page.elements if given.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-")


def test_every_image_of_data_has_a_name_and_every_table_a_caption(tmp_path: Path) -> None:
    page = Page(run_page(read_run(write_run(tmp_path / "run"))))
    drawn = [given for tag, given in page.elements if given.get("role") == "img" or tag == "canvas"]
    assert len(drawn) > 6
    assert all(given.get("aria-label") for given in drawn)
    tags = [tag for tag, _ in page.elements]
    assert tags.count("table") == tags.count("caption") > 4


def test_a_page_has_at_most_a_megabyte(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1800, metrics=16, experts=1500)
    (run / "timeline.svg").write_text("<svg>" + "x" * 290_000 + "</svg>")
    (run / "run.log").write_text("".join(f"2026-01-01 00:00:00 warning: {n} {'w' * 900}\n" for n in range(5000)))
    html = run_page(read_run(run))
    assert 300_000 < len(html.encode()) <= MAX_BYTES
    assert all(len(line["x"]) > 60 for chart in Page(html).data["charts"] for line in chart["series"][:1])


def test_thinning_keeps_ends_and_extremes() -> None:
    rng, curve = random.Random(0), Curve()
    for step in range(50_000):
        curve.add(step, 100.0 if step == 31_234 else -100.0 if step == 777 else rng.random())
    curve.add(50_000, float("nan"))
    steps, values = curve.thinned()
    assert MAX_POINTS / 2 < len(steps) <= MAX_POINTS
    assert steps == sorted(set(steps))
    assert {0, 777, 31_234, 49_999} <= set(steps)
    assert all(abs(curve.values[step] - value) < 1e-5 for step, value in zip(steps, values, strict=True))
    assert curve.not_finite == 1
    assert curve.summary().endswith("least -100, most 100; 1 values not finite")
    few = Curve([1, 2], [0.1, 0.2])
    assert few.thinned() == ([1, 2], [0.1, 0.2])


@looped(
    ("text", "shown"),
    [
        ("run directory /tmp/a b", "run directory .../a b"),
        ("1/6 tokens/s and/or ./runs/x conf/a.yaml:12", "1/6 tokens/s and/or ./runs/x conf/a.yaml:12"),
        ("of=/a/b (line)", "of=.../b (line)"),
        ("'/data/my dir/f.txt'", "'.../f.txt'"),
        ("file:///a/b ~/x/y ~john/z", ".../b .../y .../z"),
        ("['/a/b', '/c/d'] /a/b:/c/d", "['.../b', '.../d'] .../b:.../d"),
        ("https://hub.co/a/b?token=abc", "https://hub.co/a/b?token=***"),
        ("/home/John Smith/x/a.bin and /home/John Smith/xy", ".../x/a.bin and .../John Smith/xy"),
        ("lost node1, node1.corp.example and node11", "lost (host), (host) and node11"),
        ("cpu / gpu", "cpu / gpu"),
    ],
)
def test_public_text(text: str, shown: str) -> None:
    assert PublicText(["node1.corp.example"], [Path("/home/John Smith/x")])(text) == shown


@looped(
    "name", ["config.resolved.json", "environment.json", "report.json", "expert_load.json", "events.jsonl", "run.log"]
)
def test_a_damaged_file_costs_its_section_only(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = write_run(tmp_path_factory.mktemp("damaged") / "run")
    for content in ('{"a', "[1]", '{"rows": 3, "attention": 1, "keys": "x", "plan": [], "packages": 7}', "\0", "\xff"):
        (run / name).write_text(content)
        assert {"Curves", "Pipeline"} < set(Page(run_page(read_run(run))).headings)
    (run / name).unlink()
    assert "Curves" in run_page(read_run(run))


def test_damaged_metrics_are_skipped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for key, value in (
        ("step", "1e999"),
        ("loss", f"1{'0' * 400}"),
        ("time", "NaN"),
        ("time", "1e300"),
        ("loss", "[]"),
    ):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(
                json.dumps({"step": 41, "loss": 1, "time": 5000}).replace(f'"{key}": ', f'"{key}": {value}, "_": ')
            )
            file.write('\n{"step": 1, "lo\n7\n')
    assert read_run(run).curves["loss"].steps[-2:] == [41, 41]
    assert "finished after step 40" in run_page(read_run(run))
    (run / "config.resolved.json").unlink()
    (run / "events.jsonl").unlink()
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(UserError):
        read_run(tmp_path)
    assert "Memory" in run_page(read_run(run))


def test_a_run_writes_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_report, "_SAMPLE_SECONDS", 60.0)
    run = tmp_path / "run"
    changes = {"exp_manager__create_report": True, "exp_manager__report_sample_tokens": 5}
    result = run_training(tiny_config(run, **changes))
    page = Page((run / "report.html").read_text())
    assert "finished after step 8" in page.text
    assert {"Curves", "Memory", "Attention", "Sample", "Environment"} < set(page.headings)
    assert result.model.training
    record = json.loads((run / "report.json").read_text())
    assert record["sample"]["step"] == 8
    assert 0 < len(record["sample"]["text"].encode()) <= 3 * 5  # of a byte each, or U+FFFD
    backends = [row[0] for row in record["attention"][0]["rows"]]
    assert {"triton", "te_fused", "unfused"} < set(backends)


@pytest.mark.parametrize("error", [UserError("a reason"), *extra(ZeroDivisionError("a reason"))])
def test_a_run_that_fails_writes_its_page(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("stoker.trainer.train.fit", fail)
    with pytest.raises(type(error)):
        run_training(tiny_config(tmp_path / "run", exp_manager__create_report=True))
    page = Page((tmp_path / "run" / "report.html").read_text())
    assert re.search(r"failed: (ZeroDivisionError: )?a reason", page.text)


def test_a_report_that_cannot_be_written_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report_writer, "atomic_write", full)
    assert run_training(tiny_config(tmp_path / "run", exp_manager__create_report=True)).exit_code == 0
    assert capsys.readouterr().out.count("warning: no report: OSError: [Errno 28] No space left on device") == 1


def test_origins_and_differences_reach_the_ranks() -> None:
    words = ["model=gpt_tiny", "model.num_layers=2", "model.bias=false", "model.optim.lr=1e-4", "trainer.max_steps=7"]
    config = load_run_config(overrides=words)
    assert config.preset.name == "gpt_tiny"
    assert list(run_report._differences(config)) == [
        ("model.num_layers", "4", "2"),
        ("model.bias", "true", "false"),
    ]
    keys = {path: (value, origin) for path, value, origin in run_report._keys(config)}
    assert keys["model.num_layers"] == ("2", "model.num_layers=2 (command line)")
    assert re.fullmatch(r".*conf/model/gpt_tiny\.yaml:\d+", keys["model.hidden_size"][1])
    assert "model.layernorm_epsilon" not in keys
    sent = json.loads(json.dumps([config.document, config.provenance()]))
    assert config_from_document(sent[0], trusted=True).findings != config.findings
    arrived = config_from_document(sent[0], trusted=True).with_provenance(sent[1])
    assert (arrived.findings, arrived.preset_keys) == (config.findings, config.preset_keys)
    assert list(run_report._keys(arrived)) == list(run_report._keys(config))
    assert list(run_report._differences(arrived)) == list(run_report._differences(config))


def test_outcomes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert (read_run(run).outcome(), read_run(run).seconds()) == ("finished after step 40", 41.0)
    start = {"time": 2000.0, "event": "start", "step": 40}
    events = (run / "events.jsonl").read_text() + json.dumps(start) + "\n"
    (run / "events.jsonl").write_text(events)
    assert read_run(run).outcome() == "ended without a record of how, at step 40 or later"
    with (run / "run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(run).outcome() == "running, step 40"
    stop = {"time": 2003.0, "event": "stop", "step": 50, "reason": f"SIGTERM on {HOST}"}
    (run / "events.jsonl").write_text(events + json.dumps(stop) + "\n")
    assert (read_run(run).outcome(), read_run(run).seconds()) == ("stopped by SIGTERM on (host) after step 50", 44.0)
    refused = {"time": 2004.0, "event": "refused", "reason": "a key", "exit_code": 2}
    of_agents = {"time": 2005.0, "event": "end", "step": 0, "exit_code": 2}
    rows = [json.dumps(row) + "\n" for row in (stop, refused, of_agents)]
    (run / "events.jsonl").write_text(events + "".join(rows))
    assert read_run(run).outcome() == "stopped by SIGTERM on (host) after step 50"
    (run / "events.jsonl").write_text(rows[1])
    assert read_run(run).outcome() == "failed: a key"


def test_a_start_that_trains_nothing_leaves_the_record(tmp_path: Path) -> None:
    """Neither a finished run started again nor a refused resume changes what the report says of the run."""
    run = tmp_path / "run"
    files = [run / name for name in ("config.resolved.json", "environment.json", "report.json")]
    run_training(tiny_config(run, exp_manager__create_report=True, trainer__max_steps=4))
    before = [file.read_bytes() for file in files]
    other: dict[str, Any] = {"exp_manager__create_report": True, "model__seed": 5}
    assert run_training(tiny_config(run, **other, trainer__max_steps=4)).step == 4
    with pytest.raises(UserError, match="does not fit"):
        run_training(tiny_config(run, **other, model__num_layers=2))
    assert [file.read_bytes() for file in files] == before
    found = read_run(run)
    assert (found.outcome(), found.warnings) == ("finished after step 4", [])
    assert [event["event"] for event in found.events if event["event"] != "save"][-4:] == [
        *("start", "resume", "end", "refused")
    ]
    assert "refused" in Page(run_page(found)).text
    result = run_training(tiny_config(run, **other, trainer__max_steps=5))
    assert (result.step, read_run(run).value("model.seed")) == (5, 5)
    assert any("`model.seed` was 1234 in step-4" in warning for warning in read_run(run).warnings)


def test_a_resumed_run_that_fails_before_its_first_step_keeps_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a reason")

    run = tmp_path / "run"
    run_training(tiny_config(run, exp_manager__create_report=True, trainer__max_steps=4, model__seed=4))
    monkeypatch.setattr("stoker.trainer.train.fit", fail)
    with pytest.raises(ZeroDivisionError):
        run_training(tiny_config(run, exp_manager__create_report=True, model__seed=5))
    found = read_run(run)
    assert (found.outcome(), found.value("model.seed")) == ("failed: ZeroDivisionError: a reason", 4)
    assert "plan" in found.record


def test_a_record_that_cannot_be_written_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise UserError("no space", 74)

    run_training(tiny_config(tmp_path, trainer__max_steps=1))
    monkeypatch.setattr("stoker.trainer.train.save_run_record", full)
    with pytest.raises(UserError, match="no space"):
        run_training(tiny_config(tmp_path))
    assert (tmp_path / "checkpoints" / "step-2").is_dir()


def test_the_verb_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old"
    shutil.copytree(OLD_RUN, old)
    assert main(["report", str(old)]) == 0
    page = Page((old / "report.html").read_text())
    assert {"Curves", "Environment"} < set(page.headings)
    assert "4.976 at step 2" in page.text
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "outside").write_text("precious")
    (old / "report.html").unlink()
    (old / "report.html").symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match="is a link"):
        write_report(old)
    assert main(["report", str(old), "--output", str(tmp_path / "outside")]) == 2
    assert (tmp_path / "outside").read_text() == "precious"
    assert main(["report", str(old), "--output", str(tmp_path / "nowhere" / "page.html")]) == 74


def test_the_verb_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [str(write_run(tmp_path / name, steps=steps, bias=bias)) for name, steps, bias in
             (("a", 30, True), ("b", 40, False), ("c", 40, False))]  # fmt: skip
    document = json.loads(Path("c/config.resolved.json").read_text())
    del document["model"]["bias"]  # of an older version, whose default is true
    Path("c/config.resolved.json").write_text(json.dumps(document))
    assert main(["compare", *paths]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == re.findall(r"\S+", "run outcome step loss lowest val loss lowest tokens/s MFU GiB time")
    assert " ".join(lines[1].split()).startswith(
        "1 a: max_steps=30, bias=true finished after step 30 30 0.3667 0.3667 0.5 0.5 116 40.0 % 1.50 31 s"
    )
    assert "trainer.max_steps  30 (1)  40 (2, 3)" in lines
    assert "model.bias         true (1, 3)  false (2)" in lines
    assert not any("explicit_log_dir" in line or "hidden_size" in line for line in lines)
    page = Page(Path("compare.html").read_text())
    titles = {chart["title"]: [line["label"] for line in chart["series"]] for chart in page.data["charts"]}
    assert titles["Loss, training"] == [
        "1 a: max_steps=30, bias=true",
        "2 b: max_steps=40, bias=false",
        "3 c: max_steps=40, bias=true",
    ]
    assert "Loss, validation" in titles
    assert FOLDER not in page.text
    assert main(["compare", *paths]) == 0  # over its own page
    Path("mine.html").write_text("precious")
    assert main(["compare", *paths, "--output", "mine.html"]) == 2
    assert "is not a page of stoker" in capsys.readouterr().err
    assert Path("mine.html").read_text() == "precious"
    assert main(["compare", *paths, "--output", "mine.html", "--force"]) == 0
    assert main(["compare", "a", "a"]) == 2


def test_a_sweep_stands_for_its_jobs_also_where_it_was_moved_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("0", "lr=1/1"):
        write_run(tmp_path / "sweep" / name, hidden_size=len(name))
    jobs = [{"directory": f"/elsewhere/sweep/{name}"} for name in ("0", "lr=1/1", "not_started", "../../etc")]
    Path("sweep/multirun.json").write_text(json.dumps({"jobs": jobs}))
    assert main(["compare", "sweep"]) == 0
    printed = capsys.readouterr().out
    assert "model.hidden_size  1 (1)  6 (2)" in printed
    assert "2 1: hidden_size=6" in printed
    for number in (0, 2):
        write_run(tmp_path / "grid" / str(number), hidden_size=4 + number)
        file = tmp_path / "grid" / str(number) / "config.resolved.json"
        document = json.loads(file.read_text())
        document.setdefault("exp_manager", {})["resume_if_exists"] = number == 2
        file.write_text(json.dumps(document))
    Path("grid/multirun.json").write_text(json.dumps({"jobs": [{"directory": f"grid/{n}"} for n in (0, 2)]}))
    assert main(["compare", "grid"]) == 0
    printed = capsys.readouterr().out
    assert "\nmodel.hidden_size  4 (0)  6 (2)\n" in printed
    assert "\njob 0: hidden_size=4 " in printed
    assert "\njob 2: hidden_size=6 " in printed
    assert "resume_if_exists" not in printed
    Path("sweep/multirun.json").write_text("{")
    assert main(["compare", "sweep"]) == 2
    assert "multirun.json: cannot be read" in capsys.readouterr().err
