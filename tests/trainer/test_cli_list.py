"""`stoker list`: names of presets, keys and backends, with their purposes."""

import json
from pathlib import Path

import pytest

from stoker.kernels.attention.backend_support import BACKENDS
from stoker.trainer.cli.list_names import GROUPS, TOPICS, first_sentence
from stoker.trainer.cli.main import main
from stoker.trainer.config.schema.key_index import schema_keys

CONF = Path(__file__).resolve().parents[2] / "conf"


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, str]]:
    assert main(["list", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("topic", "group"), GROUPS.items())
def test_every_preset_has_a_purpose(capsys, topic, group):
    rows = listed(capsys, topic)
    assert [row["name"] for row in rows] == sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    assert all(len(row["purpose"]) > 8 and "\n" not in row["purpose"] for row in rows)


def test_keys_have_default_and_meaning(capsys):
    rows = {row["name"]: row for row in listed(capsys, "keys")}
    assert schema_keys("gpt").keys() | schema_keys("t5").keys() | schema_keys("bert").keys() == rows.keys()
    assert rows["model.attention_dropout"] == {
        "name": "model.attention_dropout",
        "default": "0.1",
        "purpose": "Dropout on the attention probabilities",
    }


def test_backends_have_what_they_need(capsys):
    rows = {row["name"]: row for row in listed(capsys, "backends")}
    assert list(rows) == [backend.name for backend in BACKENDS]
    assert rows["unfused"]["purpose"].endswith("; runs everywhere")
    for word in (
        "cuDNN's fused attention",
        "needs a CUDA device;",
        "needs TransformerEngine (pip install 'stoker[te]')",
    ):
        assert word in rows["te_fused"]["purpose"]
    assert "needs Triton" in rows["triton"]["purpose"]


def test_a_word_filters_names_and_purposes(capsys):
    assert main(["list", "models", "MIXTRAL"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["gpt_moe_8x", "mixtral_tiny"]
    assert main(["list", "keys", "nonsense"]) == 2
    assert "none of" in capsys.readouterr().err


def test_own_files_are_listed_and_hide_packaged_ones(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text("# Of my own. And more\nfamily: gpt\n")
    (tmp_path / "conf" / "model" / "gpt_tiny.yaml").write_text("family: gpt\n")
    (tmp_path / "other" / "model").mkdir(parents=True)
    (tmp_path / "other" / "model" / "theirs.yaml").write_text("# Of the group\nfamily: gpt\n")
    monkeypatch.setenv("STOKER_CONF", str(tmp_path / "other"))
    rows = {row["name"]: row["purpose"] for row in listed(capsys, "models")}
    assert rows["mine"] == "Of my own"
    assert (rows["gpt_tiny"], rows["theirs"]) == ("", "Of the group")
    assert "llama_1b" in rows


def test_topics_are_listed_and_suggested(capsys):
    assert main(["list"]) == 0
    assert capsys.readouterr().out.split() == [word for topic in TOPICS for word in ("stoker", "list", topic)]
    assert main(["list", "modls"]) == 2
    assert "did you mean `stoker list models`?" in capsys.readouterr().err


def test_first_sentences():
    assert first_sentence("T5 v1.1 base (x.y):\n  248 M. More") == "T5 v1.1 base (x.y): 248 M"
    assert first_sentence("Fine-tune.\nstoker train x") == "Fine-tune"
    assert first_sentence('{"content": "..."}, ...]}. They') == '{"content": "..."}, ...]}'
