"""The document that goes to disk: complete, without secrets, and valid again when it is read."""

import json
from pathlib import Path

import pytest
from config_helpers import load, write

from stoker.trainer.config.load import config_from_document
from stoker.trainer.config.problems import ConfigError
from stoker.trainer.config.render import as_json
from stoker.trainer.config.schema.key_index import schema_keys


def test_values_of_the_environment_are_shown_unless_secret(tmp_path: Path) -> None:
    write(
        tmp_path,
        "shown",
        "defaults: [train, _self_]\nname: ${oc.env:RUN}\nmodel:\n  seed: ${oc.env:SEED}\nexp_manager:\n"
        "  exp_dir: /x/${oc.env:HF_TOKEN}\n  explicit_log_dir: ${.exp_dir}/y\n  version: ${name}\n"
        "env_vars:\n  AUTH: ${oc.env:HF_TOKEN}\n  PLACE: ${oc.env:URL}\n",
    )
    environ = {"RUN": "mine", "SEED": "7", "HF_TOKEN": "hush", "URL": "https://user:password@host/"}
    config = load(name="shown", directory=tmp_path, environ=environ)
    shown = {row.path: row.value for row in config.key_reports}
    assert (shown["name"], shown["model.seed"], shown["exp_manager.version"]) == ("mine", "7", "mine")
    assert shown["exp_manager.exp_dir"] == "/x/${oc.env:HF_TOKEN}"
    assert shown["exp_manager.explicit_log_dir"] == "${.exp_dir}/y"
    assert shown["env_vars.AUTH"] == "${oc.env:HF_TOKEN}"
    assert "password" not in shown["env_vars.PLACE"]
    document = json.loads(as_json(config.key_reports, config.findings, config, None))["keys"]
    assert (document["model.seed"]["value"], document["env_vars.AUTH"]["value"]) == (7, "${oc.env:HF_TOKEN}")
    assert config.document["model"]["seed"] == "${oc.env:SEED}"  # saved unresolved


def test_round_trip(tmp_path: Path) -> None:
    config = load("model=llama_1b", "data=mock", "trainer.max_time=00:01:00:00", "env_vars.A=1")
    config.save(tmp_path / "config.resolved.json")
    saved = json.loads((tmp_path / "config.resolved.json").read_text())
    again = config_from_document(saved, origin="config.resolved.json")
    assert (again.root, again.digest, again.document) == (config.root, config.digest, config.document)
    assert again.origins["model.hidden_size"].text == "config.resolved.json"


def test_document_has_every_key() -> None:
    document = load().document
    for path in schema_keys():
        node = document
        for name in path.split("."):
            node = node[name]


def test_digest_depends_on_values_only(tmp_path: Path) -> None:
    write(tmp_path, "a", "model:\n  seed: 7\ntrainer:\n  max_steps: 3\n")
    write(tmp_path, "b", "trainer:\n  max_steps: 3\nmodel:\n  seed: 7\n  mcore_gpt: true\n")
    a, b = (load(name=name, directory=tmp_path) for name in "ab")
    assert a.digest == b.digest != load("model.seed=8", name="a", directory=tmp_path).digest


def test_the_environment_never_reaches_the_disk(tmp_path: Path) -> None:
    write(
        tmp_path,
        "env",
        "exp_manager:\n  wandb_logger_kwargs:\n    project: ${oc.env:SECRET}\n    group: of ${.project}\n"
        "  name: ${oc.env:NO,fallback}\n"
        "model:\n  optim:\n    lr: ${oc.env:RATE}\n    sched:\n      min_lr: ${divide:${..lr},10}\nenv_vars:\n"
        "  TOKEN: ${oc.env:SECRET}\n",
    )
    config = load(name="env", directory=tmp_path, environ={"SECRET": "hunter2", "RATE": "0.01"})
    wandb = config.root.exp_manager.wandb_logger_kwargs
    assert (wandb.project, wandb.group) == ("hunter2", "of hunter2")
    assert (config.root.model.optim.lr, config.root.model.optim.sched.min_lr) == (0.01, 0.001)
    assert config.root.env_vars == {"TOKEN": "hunter2"}
    text = json.dumps(config.document) + "".join(row.value for row in config.key_reports)
    assert "hunter2" not in text
    assert config.document["exp_manager"]["wandb_logger_kwargs"]["project"] == "${oc.env:SECRET}"
    assert config.document["model"]["optim"]["sched"]["min_lr"] == "${divide:${..lr},10}"


def test_a_secret_that_is_only_referred_to_can_be_read_again_from_a_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, "env", "defaults: [train, _self_]\nenv_vars:\n  HF_TOKEN: ${oc.env:SECRET}\n")
    config = load(name="env", directory=tmp_path, environ={"SECRET": "hunter2"})
    again = config_from_document(config.document, trusted=False)
    assert again.root.env_vars == {"HF_TOKEN": "${oc.env:SECRET}"}


def test_a_secret_that_an_earlier_version_saved_is_a_warning(tmp_path: Path) -> None:
    """Its runs and checkpoints still load; the value is not shown."""
    write(tmp_path, "a", "defaults: [train, _self_]\nenv_vars:\n  B: hunter2\n")
    document = json.loads(json.dumps(load(name="a", directory=tmp_path).document).replace('"B"', '"DB_PASS"'))
    config = config_from_document(document)
    assert config.root.env_vars == {"DB_PASS": "hunter2"}
    (finding,) = [finding for finding in config.findings if "env_vars.DB_PASS" in finding.keys]
    assert finding.level == "warning"
    assert "looks like a secret" in finding.message
    assert "hunter2" not in "".join(row.value for row in config.key_reports)
    write(tmp_path, "a", "defaults: [train, _self_]\nenv_vars:\n  DB_PASS: hunter2\n")
    with pytest.raises(ConfigError, match="looks like a secret"):
        load(name="a", directory=tmp_path)


def test_environment_is_read_only_where_it_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    document = {"name": "${oc.env:SECRET}", "exp_manager": {"exp_dir": "${name}"}}
    monkeypatch.setenv("SECRET", "hunter2")
    trusted = config_from_document(document, trusted=True)
    assert (trusted.root.name, trusted.root.exp_manager.exp_dir) == ("hunter2", "hunter2")
    assert trusted.document["name"] == "${oc.env:SECRET}"
    literal = config_from_document(document)
    assert (literal.root.name, literal.root.exp_manager.exp_dir) == ("${oc.env:SECRET}", "${name}")


def test_plain_dollars_survive(tmp_path: Path) -> None:
    write(tmp_path, "d", "name: 'a \\${b}'\n")
    config = load(name="d", directory=tmp_path)
    assert config.root.name == "a ${b}"
    assert config_from_document(config.document, trusted=True).root.name == "a ${b}"


def test_documents_are_validated() -> None:
    bad = {"model": {"num_layers": "3", "nope": 1, "seed": "${oc.env:SEED}"}, "trainer": {"_target_": "os.system"}}
    with pytest.raises(ConfigError) as caught:
        config_from_document(bad, origin="step-7/config.json")
    found = {problem.key: problem for problem in caught.value.problems}
    assert set(found) == {"model.num_layers", "model.nope", "model.seed", "trainer._target_"}
    assert {problem.origin for problem in found.values()} == {"step-7/config.json"}
    assert "environment" in found["model.seed"].fix
