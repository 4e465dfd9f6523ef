"""`stoker preprocess`: what is bad is counted, any number of workers gives the same bytes, a kill loses nothing."""

import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tiers import extra, full_only

from stoker.trainer.cli.main import main
from stoker.trainer.data.preprocess import partition, read_documents, train_tokenizer
from stoker.trainer.data.preprocess.read_documents import ReadOptions, RejectedDocument, read_lines, split_into_chunks
from stoker.trainer.data.sources.indexed_tokens import IndexedReader
from stoker.trainer.data.tokenizers.tokenizer import ByteTokenizer
from stoker.trainer.data.tokenizers.tokenizer_document import tokenizer_from_dict
from stoker.trainer.data.tokenizers.tokenizer_files import SpecialTokens, load_tokenizer
from stoker.trainer.utils.signals import EXIT_CODES


def texts_of(prefix: Path) -> list[str]:
    data = IndexedReader(prefix)
    tokenizer = tokenizer_from_dict(json.loads(prefix.with_name(prefix.name + ".json").read_text())["tokenizer"])
    ends = np.cumsum(data.lengths)
    return [tokenizer.decode(data.ids[end - length : end]) for end, length in zip(ends, data.lengths, strict=True)]


def digest(prefix: Path) -> list[str]:
    names = (prefix.name + end for end in (".bin", ".idx", ".json"))
    return [hashlib.sha256(prefix.with_name(name).read_bytes()).hexdigest() for name in names]


def write_lines(path: Path, count: int, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    texts = [f"{n} " + "".join(chance.choices("ab cé\n€😀", k=chance.randint(1, 300))) for n in range(count)]
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=n % 2 == 0) + "\n" for n, text in enumerate(texts)))
    return texts


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "_SMALLEST_PART", 20_000)
    monkeypatch.setattr(partition, "_SMALLEST_CHUNK", 10_000)


def test_documents_are_those_of_the_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = write_lines(tmp_path / "a.jsonl", 50)
    prefix = tmp_path / "new" / "p"
    assert main(["preprocess", str(tmp_path / "a.jsonl"), "--output-prefix", str(prefix), "--workers", "1"]) == 0
    assert texts_of(prefix) == texts
    data = IndexedReader(prefix)
    assert data.documents == 50
    assert (data.ids[np.cumsum(data.lengths) - 1] == ByteTokenizer.eos_id).all()
    summary = json.loads((tmp_path / "new" / "p.json").read_text())
    assert (summary["format"], summary["documents"], summary["skipped"]) == (1, 50, {})
    assert summary["bytes"] == sum(len(text.encode()) for text in texts) == summary["tokens"] - 50
    assert summary["inputs"][0]["path"] == str(tmp_path / "a.jsonl")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["p.bin", "p.idx", "p.json"]
    before = digest(prefix)
    capsys.readouterr()
    assert main(["preprocess", str(tmp_path / "a.jsonl"), "--output-prefix", str(prefix)]) == 0
    assert "nothing to do" in capsys.readouterr().out
    command = ["preprocess", str(tmp_path / "a.jsonl"), "--output-prefix", str(prefix), "--no-append-eod"]
    assert main(command) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert digest(prefix) == before
    prefix.with_name("p.bin").rename(tmp_path / "moved")
    prefix.with_name("p.bin").mkdir()
    assert main([*command, "--overwrite"]) == 2
    assert "p.bin is a folder and is not replaced" in capsys.readouterr().err
    prefix.with_name("p.bin").rmdir()
    assert main([*command, "--overwrite", "--workers", "1"]) == 0
    assert IndexedReader(prefix).tokens == summary["bytes"]


def test_any_number_of_workers_gives_the_same_bytes(tmp_path: Path, small_parts: None) -> None:
    texts = write_lines(tmp_path / "a.jsonl", 500)
    packed = write_lines(tmp_path / "c.jsonl", 300, seed=1)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "c.jsonl").read_bytes()))
    (tmp_path / "c.jsonl").unlink()
    (tmp_path / "d.txt").write_text("\ufeffthe end\r\n")
    seen = []
    for workers in (1, 3):
        prefix = tmp_path / str(workers) / "p"
        assert main(["preprocess", str(tmp_path), "--output-prefix", str(prefix), "--workers", str(workers)]) == 0
        seen.append(digest(prefix))
        assert texts_of(prefix) == [*texts, *packed, "the end\r\n"]
        for path in (tmp_path / str(workers)).iterdir():
            path.rename(tmp_path / f".{workers}-{path.name}")  # hidden: not an input of the next
    assert seen[0] == seen[1]


BAD = {
    b'{"text": "\xff"}': "invalid UTF-8",
    b'{"text": "a"': "not JSON",
    b"\x00": "not JSON",
    b"[" * 100_000: "not JSON",
    b"[1]": "not a JSON object",
    b'{"other": 1}': "no key 'text'",
    b'{"text": 1}': "text is not a string",
    b'{"text": null}': "text is not a string",
    b'{"text": ""}': "empty text",
    b'{"text": " \\n"}': "only white space",
    b'{"text": "a\\u0000b"}': "NUL character in the text",
    b'{"text": "\\ud800"}': "lone surrogate in the text",
    b"": "blank line",
}


def test_each_kind_of_bad_line_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = b'{"text": "fine"}'
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([good, *BAD, good]))
    assert main(["preprocess", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "p"), "--workers=1"]) == 0
    assert texts_of(tmp_path / "p") == ["fine", "fine"]
    skipped = json.loads((tmp_path / "p.json").read_text())["skipped"]
    kinds = list(BAD.values())
    assert skipped == {kind: kinds.count(kind) for kind in kinds}
    printed = capsys.readouterr().out
    for kind in kinds:
        there = "; set --json-key to one of 'other'" if kind == "no key 'text'" else ""
        assert f"{kind}: {kinds.count(kind)}, first at {tmp_path}/a.jsonl:{kinds.index(kind) + 2}{there}\n" in printed


@pytest.mark.parametrize("packed", [*extra(False), True])
def test_the_first_bad_line_can_end_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], packed: bool, small_parts: None
) -> None:
    write_lines(tmp_path / "a.jsonl", 300)
    lines = (tmp_path / "a.jsonl").read_bytes().split(b"\n")
    lines[250] = b"oops"
    data = b"\n".join(lines)
    path = tmp_path / ("b.jsonl.gz" if packed else "b.jsonl")
    path.write_bytes(gzip.compress(data) if packed else data)
    command = ["preprocess", str(path), "--output-prefix", str(tmp_path / "p"), "--workers", "2"]
    assert main([*command, "--on-error", "stop"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"{path}:251: not JSON"
    assert not (tmp_path / "p.bin").exists()
    assert main(command) == 0
    captured = capsys.readouterr()
    assert "resuming from" in captured.err
    assert f"not JSON: 1, first at {path}:251" in captured.out


def test_a_file_without_any_good_line_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "a.jsonl", 3)
    (tmp_path / "b.jsonl").write_text('{"content": "x"}\n' * 4)
    command = ["preprocess", str(tmp_path), "--output-prefix", str(tmp_path / "p"), "--workers", "1"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}/b.jsonl: none of 4 is a usable document" in error
    assert f"no key 'text': 4, first at {tmp_path}/b.jsonl:1; set --json-key to one of 'content'" in error
    assert not list(tmp_path.glob("p*"))
    (tmp_path / "a.jsonl").unlink()
    assert main([*command, "--on-error", "stop"]) == 2
    assert f"{tmp_path}/b.jsonl:1: no key 'text'; set --json-key to one of 'content'" in capsys.readouterr().err
    assert main([*command, "--train-tokenizer", "300"]) == 2
    assert "holds no document; no key 'text'; set --json-key to one of 'content'" in capsys.readouterr().err
    assert not list(tmp_path.glob("p*"))
    write_lines(tmp_path / "b.jsonl", 3)
    assert main(command) == 0


@pytest.mark.parametrize("kept_by_earlier_version", [False, True])
def test_a_failed_command_does_not_block_its_correction(tmp_path: Path, kept_by_earlier_version: bool) -> None:
    (tmp_path / "a.jsonl").write_text('{"input": "a", "output": "b"}\n')
    command = ["preprocess", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "p"), "--workers", "1"]
    assert main(command) == 2
    assert not (tmp_path / "p.parts").exists()
    if kept_by_earlier_version:
        (tmp_path / "p.parts").mkdir()
        (tmp_path / "p.parts" / "journal.jsonl").write_text('{"command": {}}\n{"part": [0, 0], "documents": 0}\n')
    assert main([*command, "--json-key", "input"]) == 0
    assert texts_of(tmp_path / "p") == ["a"]


def test_damaged_compression_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = write_lines(tmp_path / "a.jsonl", 3000)
    data = gzip.compress((tmp_path / "a.jsonl").read_bytes())
    (tmp_path / "b.jsonl.gz").write_bytes(data[: len(data) // 2])
    command = ["preprocess", str(tmp_path / "b.jsonl.gz"), "--output-prefix", str(tmp_path / "p"), "--workers", "1"]
    assert main(command) == 0
    found = texts_of(tmp_path / "p")
    assert 0 < len(found) < 3000
    assert found == texts[: len(found)]
    assert f"damaged compressed data: 1, first at {tmp_path}/b.jsonl.gz:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.jsonl"], "no file or folder none.jsonl"),
        (["a.jsonl", "--tokenizer", "byte"], "for a token per byte, set --tokenizer byte-level"),
        (["*.jsonl.gz"], "matches no file"),
        (["a.jsonl", "a.jsonl"], "named twice"),
        (["a.pdf"], "reads .txt"),
        (["a.jsonl", "--workers=0"], "--workers (0)"),
        (["a.jsonl", "--train-tokenizer=10"], "--train-tokenizer (10) must be 257"),
        (["a.jsonl", "--tokenizer=gpt2"], "downloads no tokenizers"),
        (["a.jsonl", "--eod-token=x"], "its own end-of-document token"),
        (["a.jsonl", "--output-prefix=folder/"], "is a folder"),
    ],
)
def test_bad_arguments(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "a.jsonl", 1)
    (tmp_path / "a.pdf").write_text("x")
    assert main(["preprocess", "--output-prefix", "p", *arguments]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert len(printed.splitlines()) == 1
    assert not list(tmp_path.glob("p*"))


def test_a_place_that_cannot_be_written_is_exit_74(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "a.jsonl", 1)
    assert main(["preprocess", str(tmp_path / "a.jsonl"), "--output-prefix", "/proc/p"]) == 74
    assert "cannot write /proc/p.parts" in capsys.readouterr().err


def test_a_tokenizer_is_trained_and_used(tmp_path: Path) -> None:
    texts = ["the cat and the dog and the cat " * 5] * 20
    (tmp_path / "a.txt").write_text("\n".join(texts))
    command = ["preprocess", str(tmp_path / "a.txt"), "--text-lines", "--workers", "1", "--output-prefix"]
    assert main([*command, str(tmp_path / "p"), "--train-tokenizer", "270"]) == 0
    assert texts_of(tmp_path / "p") == texts
    data = IndexedReader(tmp_path / "p")
    assert data.tokens < len("".join(texts)) / 2
    again = [*command, str(tmp_path / "q"), "--tokenizer", str(tmp_path / "p-tokenizer.json")]
    assert main(again) == 0
    assert digest(tmp_path / "p")[:2] == digest(tmp_path / "q")[:2]


@full_only
def test_parquet_and_zstandard(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    zstandard = pytest.importorskip("zstandard")
    texts = write_lines(tmp_path / "a.jsonl", 100)
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress((tmp_path / "a.jsonl").read_bytes()))
    table = pyarrow.table({"text": [*texts, None, ""], "n": list(range(102))})
    parquet.write_table(table, tmp_path / "b.parquet", row_group_size=30)
    assert main(["preprocess", str(tmp_path), "--output-prefix", str(tmp_path / "p"), "--workers", "2"]) == 0
    assert texts_of(tmp_path / "p") == texts * 3
    skipped = json.loads((tmp_path / "p.json").read_text())["skipped"]
    assert skipped == {"text is not a string": 1, "empty text": 1}


ENDLESS = """
import sys
from dataclasses import asdict
from stoker.trainer.data.preprocess.read_documents import ReadOptions
from stoker.trainer.data.preprocess.worker_pool import WorkerPool, Task
from stoker.trainer.data.tokenizers.tokenizer import ByteTokenizer

if __name__ == "__main__":
    settings = {"tokenizer": ByteTokenizer().to_dict(), "reading": asdict(ReadOptions("text", False)), "stop": False}
    settings |= {"eod_id": None, "imports": [], "paths": [sys.argv[1] + "/fifo"], "kinds": ["text"]}
    task = Task((0, 0), {"prefix": sys.argv[1] + "/part", "spans": [(0, 0, 9)]}, None, 0)
    with WorkerPool(1, settings) as pool:
        pool.run(iter([task]), print, lambda: print(pool._workers[0].process.pid, flush=True))
"""


def test_workers_end_with_a_main_process_that_is_killed(tmp_path: Path) -> None:
    """Also in the middle of a part: this one reads a pipe that nobody writes to."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "main.py").write_text(ENDLESS)
    command = [sys.executable, str(tmp_path / "main.py"), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as main_process:
        assert main_process.stdout is not None
        number = main_process.stdout.readline().strip()
        assert number
        worker = Path("/proc") / number
        writer = os.open(tmp_path / "fifo", os.O_WRONLY)  # waits for the worker to read
        assert worker.exists()
        main_process.kill()
    deadline = time.monotonic() + 600
    while worker.exists() and "zombie" not in (worker / "status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.close(writer)


@full_only
def test_a_killed_run_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", 3000)
    program = (
        "import sys; from stoker.trainer.data.preprocess import partition; partition._SMALLEST_PART = 20000\n"
        "from stoker.trainer.cli.main import main\n"
        "if __name__ == '__main__': sys.exit(main(sys.argv[1:]))\n"
    )
    (tmp_path / "run.py").write_text(program)
    command = [sys.executable, str(tmp_path / "run.py"), "preprocess", str(tmp_path / "a.jsonl"), "--workers", "2"]
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    assert subprocess.run([*command, "--output-prefix", str(tmp_path / "whole")], **quiet).returncode == 0
    journal = tmp_path / "p.parts" / "journal.jsonl"
    killed = 0
    for number in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM, *extra(signal.SIGUSR1)):
        done = len(journal.read_bytes().splitlines()) if journal.exists() else 0
        process = subprocess.Popen([*command, "--output-prefix", str(tmp_path / "p")], **quiet)
        while process.poll() is None:
            if journal.exists() and len(journal.read_bytes().splitlines()) >= done + 4:
                process.send_signal(number)
                break
            time.sleep(0.002)
        _, printed = process.communicate()
        if process.returncode:
            killed += 1
            assert process.returncode == {signal.SIGKILL: -9, **EXIT_CODES}[number], printed
            assert not (tmp_path / "p.bin").exists()
            if number != signal.SIGKILL:
                assert "the same command resumes" in printed
    assert killed >= 2
    with journal.open("ab") as file:
        file.write(b'{"part": [1')  # torn
    (tmp_path / "p.parts" / ".0000001.bin.1-x.tmp").write_text("left over")
    last = subprocess.run([*command, "--output-prefix", str(tmp_path / "p"), "--workers", "1"], **quiet)
    assert last.returncode == 0, last.stderr
    assert "resuming from" in last.stderr
    assert digest(tmp_path / "p") == digest(tmp_path / "whole")
    assert not (tmp_path / "p.parts").exists()


def test_parts_of_another_command_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], small_parts: None
) -> None:
    write_lines(tmp_path / "a.jsonl", 300)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("oops\n")
    command = ["preprocess", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "p"), "--workers", "1"]
    assert main([*command, "--on-error", "stop"]) == 2
    capsys.readouterr()
    assert main([*command, "--no-append-eod"]) == 2
    assert "append_eod was True, now False" in capsys.readouterr().err
    os.utime(tmp_path / "a.jsonl", (1, 1))
    assert main(command) == 2
    assert "was changed" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0


def test_a_word_without_end_is_a_bad_line_only_for_a_tokenizer_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("fine", "x" * (5 << 20))))
    command = ["preprocess", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "p"), "--workers=1"]
    assert main([*command, "--train-tokenizer", "300"]) == 0
    assert texts_of(tmp_path / "p") == ["fine"]
    kind = "more than 4,194,304 characters without white space"
    assert f"{kind}: 1, first at {tmp_path}/a.jsonl:2; break it into lines" in capsys.readouterr().out
    assert main([*command, "--overwrite"]) == 0
    assert list(IndexedReader(tmp_path / "p").lengths) == [5, (5 << 20) + 1]


def test_ranges_share_no_line_and_miss_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_documents, "MAX_DOCUMENT_BYTES", 40)
    chance = random.Random(0)
    lines = ["x" * chance.choice([0, 1, 5, 39, 40, 41, 42, 43, 100]) for _ in range(60)]
    data = "".join(f"{line}\n" for line in lines).encode()
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    reading = ReadOptions("text", text_lines=True)
    expected = [line for line in lines if 0 < len(line) <= 40]
    for size in (1, 7, 41, 64, 10_000):
        found: list[str | RejectedDocument] = []
        with path.open("rb") as file:
            for start in range(0, len(data), size):
                found += read_lines(file, start, min(start + size, len(data)), reading, is_json=False)
        assert [one for one in found if isinstance(one, str)] == expected
        rejects = [one for one in found if isinstance(one, RejectedDocument)]
        too_long = [one.place for one in rejects if one.kind == read_documents.TOO_LONG]
        starts = np.cumsum([0, *(len(line) + 1 for line in lines)])
        assert too_long == [start for start, line in zip(starts, lines, strict=False) if len(line) > 40]
        with path.open("rb") as file:
            chunks = list(split_into_chunks(file, size))
        assert sum(chunk.count(b"\n") for chunk in chunks) == data.count(b"\n")
        joined = b"".join(chunks).split(b"\n")
        assert [line.decode() for line in joined if 0 < len(line) <= 40] == expected


def test_no_torch_is_imported() -> None:
    program = "import sys; import stoker.trainer.cli.preprocess; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"


@full_only
def test_the_sample_of_a_trained_tokenizer_is_counted_in_bytes(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("\u00e9\u00e9\u00e8\u00e8", encoding="utf-8")
    monkeypatch.setattr(train_tokenizer, "SAMPLE_BYTES", 5)
    assert (
        main(["preprocess", str(tmp_path / "a.txt"), f"--output-prefix={tmp_path / 'p'}", "--train-tokenizer=270"]) == 0
    )
    trained = load_tokenizer(str(tmp_path / "p-tokenizer.json"), "--tokenizer", SpecialTokens())
    assert (len(trained.encode("\u00e9")), len(trained.encode("\u00e8"))) == (1, 2), "it has seen the first two only"
