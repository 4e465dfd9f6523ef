"""Every command of README.md and docs/ runs: shortened where it would take minutes, with files made for it."""

import json
import re
import shlex
from pathlib import Path

import pytest
from config_helpers import keep_last_overrides
from hf_folders import letter_tokenizer, random_model, save
from tiers import full_only, looped

from stoker.trainer.cli.main import VERBS, main

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SHORT = [
    "trainer.max_steps=2",
    "trainer.limit_val_batches=1",
    "model.micro_batch_size=1",  # two data-parallel ranks need two
    "model.global_batch_size=2",
]

TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def commands(kind: str) -> list[str]:
    """Lines of the shell blocks that start with `kind`, comments removed."""
    found = []
    for page in PAGES:
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            if language not in ("", "bash"):
                continue
            found += [
                line.split("  #")[0].strip()
                for line in block.replace("\\\n", " ").splitlines()
                if line.startswith(kind)
            ]
    return list(dict.fromkeys(found))


@full_only
@pytest.mark.usefixtures("without_plots", "small_pystd")
def test_stoker_commands_run_in_the_order_of_the_readme(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text(Path(__file__).read_text() * 5)  # has every letter of the prompt
    asked = [(f"what is {letter}", f"it is {letter}") for letter in "abcdefghijklmnopqrstuvwxyz"]
    pairs = [json.dumps({"input": question, "output": answer}) for question, answer in asked]
    Path("pairs.jsonl").write_text("\n".join(pairs))
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in asked]
    Path("chats.jsonl").write_text("\n".join(json.dumps({"messages": messages}) for messages in turns))
    stage = tmp_path / "CONF" / "training" / "gpt3" / "126m.yaml"
    stage.parent.mkdir(parents=True)
    stage.write_text("run: {name: a}\nexp_manager: {explicit_log_dir: '${base_results_dir}/${training.run.name}'}\n")
    whole = "defaults: [_self_, {training: null}]\nbase_results_dir: ${launcher_scripts_path}/results\n"
    (tmp_path / "CONF" / "config.yaml").write_text(whole)
    seen = []
    for line in commands("stoker "):
        arguments = shlex.split(line.replace("FILE", str(text)))[1:]
        if "HF_FOLDER" in line:
            letter_tokenizer(save(random_model("llama"), tmp_path / "theirs"))
            (tmp_path / "theirs" / "chat_template.jinja").write_text(TEMPLATE)
            arguments = [argument.replace("HF_FOLDER", str(tmp_path / "theirs")) for argument in arguments]
        if any(argument in ("DIR", "model.restore_from_path=DIR") for argument in arguments):
            newest = str(max((tmp_path / "runs").rglob("checkpoints")).parent)
            other = [
                str(path.parent) for path in (tmp_path / "runs").rglob("checkpoints") if str(path.parent) != newest
            ]
            named = {"OTHER": next(iter(other), newest), "DIR": newest}
            for name, path in named.items():
                arguments = [argument.replace(name, path) for argument in arguments]
        if arguments[0] in ("train", "finetune"):
            length = "seq_length" if any("t5" in argument for argument in arguments) else "encoder_seq_length"
            arguments = keep_last_overrides([*arguments, *SHORT, f"model.{length}=32"])
        if arguments[0] == "generate":
            arguments += ["--max-new-tokens", "3"]
        if arguments[0] == "evaluate":
            arguments += ["--limit-batches", "1"]
        code = main(arguments)
        assert code == 0, f"{line}\n{capsys.readouterr().err}"
        seen.append(arguments[0])
    assert {"train", "config", "convert", "generate", "evaluate", "doctor"} <= set(seen)
    assert set(seen) <= set(VERBS)


def test_scripts_named_in_the_pages_exist_and_ci_runs_the_main_ones():
    ci = (ROOT / ".ci" / "run").read_text()
    for line in commands("bash "):
        script = line.split()[1]
        assert (ROOT / script).is_file(), line
    for script in ("scripts/test.sh", "scripts/quickstart.sh"):
        assert f"bash {script}" in ci
    for line in commands("python scripts/"):
        assert (ROOT / line.split()[1]).is_file(), line


@looped("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_yaml_of_docs_finetune_is_a_run(tmp_path, monkeypatch, capsys):
    (block,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "finetune.md").read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    letter_tokenizer(save(random_model("llama"), tmp_path / "HF_FOLDER"))
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(block)
    (tmp_path / "chats.jsonl").write_text("{}")
    assert main(["config", "--finetune", "experiment=mine", "--json"]) == 0, capsys.readouterr().err
    values = json.loads(capsys.readouterr().out)["keys"]
    assert values["model.peft.peft_scheme"]["value"] == "lora"
    assert values["model.data.chat"]["value"] is True
    assert values["model.hidden_size"]["value"] == random_model("llama").config.hidden_size


@pytest.mark.usefixtures("small_pystd")
@pytest.mark.filterwarnings("ignore")  # of Lightning
def test_the_lines_of_docs_library_run(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "library.md").read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks:
        exec(block, names)
    assert names["value"].shape == names["query"].shape == (128, 128)
    assert names["restored"].tokenizer.decode(names["restored"].tokenizer.encode("def main(").tolist()) == "def main("


def test_the_refusals_shown_are_the_real_ones(capsys, nothing_registered):
    """The block in the README is what the command prints, letter for letter."""
    block = re.search(
        r"^\$ stoker (train model\.num_query_group.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S
    )
    assert block
    command, _, printed = block.group(1).partition("\n")
    assert main(shlex.split(command)) == 2
    assert capsys.readouterr().err == printed
