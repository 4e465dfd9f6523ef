import os
import shutil
import sysconfig
from pathlib import Path

import pytest

from stoker.trainer.config.dataset_names import SPLITS
from stoker.trainer.data.sources import text_sources
from stoker.trainer.data.sources.text_sources import Corpus, parse_proportions, read_pystd, read_text
from stoker.trainer.utils.errors import UserError

THIRDS = (0.4, 0.3, 0.3)


def _folder(path: Path, files: int) -> Path:
    for number in range(files):
        file = path / f"part{number % 3}" / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"text number {number}\n")
    return path


def _place(corpus: Corpus) -> dict[str, str]:
    return {text: split for split in SPLITS for text in corpus.documents[split]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("900,50,50", (0.9, 0.05, 0.05)), ("1", (1, 0, 0)), ("3,1", (0.75, 0.25, 0)), ("0,0.5,1.5", (0, 0.25, 0.75))],
)
def test_proportions(text: str, expected: tuple[float, float, float]) -> None:
    assert parse_proportions(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["0", "0,0,0", "9" * 400])
def test_proportions_without_a_sum_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"`model\.data\.splits_string`"):
        parse_proportions(text)


def test_file_is_cut_by_position_in_characters(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("äöü" * 4, newline="")
    corpus = read_text(path, (0.5, 0.25, 0.25))
    assert [corpus.documents[split] for split in SPLITS] == [["äöüäöü"], ["äöü"], ["äöü"]]
    assert corpus.text("validation") == "äöü".encode()


@pytest.mark.parametrize("splits", ["900,50,50", "1,1,1", "7,2", "1", "0,1", "0,0,1", "0.1,0.2,0.7", "0.1,0.02"])
@pytest.mark.parametrize("length", [1, 2, 9, 10, 1003])
def test_every_character_is_in_one_split(tmp_path: Path, splits: str, length: int) -> None:
    path = tmp_path / "text.txt"
    text = "".join(chr(0x100 + i) for i in range(length))
    path.write_text(text, newline="")
    corpus = read_text(path, parse_proportions(splits))
    assert "".join("".join(corpus.documents[split]) for split in SPLITS) == text
    if splits.count(",") < 2:
        assert not corpus.documents["test"]


def test_line_ends_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"a\r\nb\rc\n")
    assert read_text(path, (1, 0, 0)).text("train") == b"a\r\nb\rc\n"


def test_folder_takes_every_file_once(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "texts", 60)
    (folder / ".hidden").write_bytes(b"\xff")
    (folder / ".git").mkdir()
    (folder / ".git" / "binary").write_bytes(b"\xff")
    (folder / "empty.txt").touch()
    corpus = read_text(folder, THIRDS)
    assert sorted(_place(corpus)) == sorted(f"text number {n}\n" for n in range(60))
    assert corpus.files == 60
    assert all(len(corpus.documents[split]) > 8 for split in SPLITS)


def test_split_by_hash_is_stable_when_a_file_is_added_or_moved(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "texts", 30)
    before = read_text(folder, THIRDS)
    (folder / "0.txt").write_text("a new one that sorts first")
    (folder / "part0" / "0.txt").rename(folder / "zzz.txt")
    after = read_text(folder, THIRDS)
    moved = _place(after)
    del moved["a new one that sorts first"]
    assert moved == _place(before)
    assert after.fingerprint != before.fingerprint


def test_equal_files_land_on_the_same_side(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text("the same")
    assert sorted(len(texts) for texts in read_text(tmp_path, THIRDS).documents.values()) == [0, 0, 40]


def test_proportions_grow_without_moving_training_files_out(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "texts", 50)
    small, large = read_text(folder, (0.5, 0.5, 0)), read_text(folder, (0.8, 0.2, 0))
    assert set(small.documents["train"]) < set(large.documents["train"])


def test_fingerprint_of_a_folder(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "texts", 5)
    first = read_text(folder, THIRDS).fingerprint
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert read_text(copy, THIRDS).fingerprint == first
    (copy / "part0" / "0.txt").write_text("changed")
    assert read_text(copy, THIRDS).fingerprint != first


def test_fingerprint_of_a_file_is_that_of_its_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("text")
    (tmp_path / "b").write_text("text")
    assert read_text(tmp_path / "a", THIRDS).fingerprint == read_text(tmp_path / "b", (1, 0, 0)).fingerprint


def _bad_utf8(path: Path) -> Path:
    path.write_bytes(b"good \xe4 bad")
    return path


def _in_folder(path: Path) -> Path:
    path.mkdir()
    (path / "good.txt").write_text("good")
    _bad_utf8(path / "latin1.txt")
    return path


def _empty(path: Path) -> Path:
    path.touch()
    return path


def _empty_folder(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_bad_utf8, ["not UTF-8", "0xe4", "byte offset 5"]),
        (_in_folder, ["latin1.txt", "byte offset 5"]),
        (_empty, ["is empty"]),
        (_empty_folder, ["holds no text"]),
        (lambda path: path, ["No such file"]),
        (lambda path: path / "\0", ["null"]),
        (lambda path: Path(os.devnull), ["neither a file nor a folder"]),
        (lambda path: path / ("x" * 5000), ["too long"]),
    ],
)
def test_unusable_text_gives_one_line_with_the_path(tmp_path: Path, make, words: list[str]) -> None:
    path = make(tmp_path / "data.txt")
    with pytest.raises(UserError) as caught:
        read_text(path, THIRDS)
    assert len(caught.value.lines) == 1
    for word in ["`model.data.path`", str(path), *words]:
        assert word in caught.value.lines[0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.jsonl", ["objects with texts", "stoker preprocess", "data=mmap model.data.data_prefix=NAME", "data=sft"]),
        ("a.ndjson", ["stoker preprocess"]),
        ("a.parquet", ["stoker preprocess"]),
        ("A.JSON.GZ", ["compressed", "stoker preprocess"]),
        ("a.jsonl.zst", ["stoker preprocess"]),
        ("a.txt.gz", ["compressed", "unpack it first"]),
        ("a.idx", ["tokens", "a.idx holds", "train on it with data=mmap", "/a"]),
        ("a.bin", ["tokens"]),
    ],
)
def test_what_is_no_plain_text_by_name_is_refused_with_what_reads_it(
    tmp_path: Path, name: str, words: list[str]
) -> None:
    (tmp_path / name).write_text('{"text": "a"}\n')
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(UserError) as caught:
            read_text(path, THIRDS)
        (line,) = caught.value.lines
        assert line.startswith("`model.data.path`: ")
        for word in words:
            assert word in line
    with pytest.raises(UserError, match=r"^--data-path: .*; give the text itself, as a plain file$"):
        read_text(tmp_path / name, THIRDS, "--data-path", for_training=False)


def test_folder_tells_of_what_it_leaves_out(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "texts", 5)
    assert read_text(folder, THIRDS).skipped_files == ""
    before = read_text(folder, THIRDS).fingerprint
    for name in ("a.jsonl", "part0/b.bin", "part0/b.idx", "z.gz"):
        (folder / name).write_text("{}")
    corpus = read_text(folder, THIRDS)
    assert corpus.skipped_files == "4 files skipped, not plain text by name: a.jsonl, part0/b.bin, part0/b.idx, ..."
    assert (corpus.files, corpus.fingerprint) == (5, before)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_is_a_user_error(tmp_path: Path) -> None:
    path = tmp_path / "secret.txt"
    path.write_text("text")
    path.chmod(0)
    with pytest.raises(UserError, match="Permission denied"):
        read_text(path, THIRDS)


def test_pystd_is_this_pythons_library() -> None:
    corpus = read_pystd((0.9, 0.05, 0.05))
    argparse = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text(encoding="utf-8")
    everything = [text for split in SPLITS for text in corpus.documents[split]]
    assert argparse in everything
    assert len(everything) == corpus.files > 150
    assert sum(len(text) for text in corpus.documents["train"]) > 0.7 * sum(map(len, everything))
    assert corpus.documents["validation"]
    assert "pystd" in corpus.name


def test_pystd_is_stable() -> None:
    first, second = read_pystd((0.9, 0.05, 0.05)), read_pystd((0.9, 0.05, 0.05))
    assert first == second
    assert read_pystd((1, 0, 0)).fingerprint == first.fingerprint


def test_pystd_leaves_tests_and_tables_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        "json/decoder.py",
        "os.py",
        "test/test_os.py",
        "unittest/test/test_case.py",
        "idlelib/run.py",
        "encodings/cp1252.py",
        "site-packages/numpy/core.py",
        "_sysconfigdata__linux.py",
        "config-3.11-x86_64/python-config.py",
        "lib2to3/pygram.py",
    ]:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# {name}")
    (tmp_path / "latin1.py").write_bytes(b"# \xe4")
    (tmp_path / "notes.txt").write_text("no Python")
    monkeypatch.setattr(text_sources.sysconfig, "get_path", lambda name: str(tmp_path))
    assert read_pystd((1, 0, 0)).documents["train"] == ["# json/decoder.py", "# os.py"]


def test_python_without_sources_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_sources.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match=r"model\.data\.data_impl=text"):
        read_pystd((1, 0, 0))
