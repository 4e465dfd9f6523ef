"""Fine-tuning of a GPT on answers: what counts, packed rows, whole runs and what `stoker evaluate` says of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from config_helpers import keep_last_overrides
from resolved import build_data, build_model
from tiers import cases, extra, full_only
from torch import Tensor
from transformers import AutoTokenizer

from stoker.trainer.cli import main
from stoker.trainer.config.schema.root import RootBlock
from stoker.trainer.data.build_datasets import Data
from stoker.trainer.data.datasets.samples import IGNORE_INDEX
from stoker.trainer.data.datasets.sft_examples import Example, Examples, truncate_examples
from stoker.trainer.data.datasets.sft_samples import ExampleSamples
from stoker.trainer.data.tokenizers.tokenizer import ByteTokenizer
from stoker.trainer.utils.errors import UserError

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.2,
    "compile": False,
}
LENGTH = 96


def pairs(folder: Path, count: int = 40) -> Path:
    path = folder / "pairs.jsonl"
    lines = ({"input": f"{'long ' * (n % 5)}question {n}", "output": f"answer {n * n}"} for n in range(count))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def root(folder: Path, data: dict[str, Any] | None = None, **model: Any) -> RootBlock:
    given = {"data_impl": "jsonl", "path": str(pairs(folder)), **(data or {})}
    document = {"encoder_seq_length": LENGTH, "data": given, **SMALL, **model}
    return RootBlock.model_validate({"model": document, "trainer": {"precision": 64, "limit_val_batches": 0}})


def loss_and_gradients(data: Data, root: RootBlock, rows: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Summed over an epoch, in batches of so many rows."""
    model = build_model(root, data)
    total = torch.zeros((), dtype=torch.float64)
    for first in range(0, data.train.samples, rows):
        batch: Any = data.train.batch(first, min(rows, data.train.samples - first))
        loss = model.batch_loss(batch, torch.ones(()))
        loss.backward()
        total += loss.detach()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return total, gradients


KINDS: dict[str, dict[str, Any]] = {
    "rope": {"position_embedding_type": "rope", "num_query_groups": 2, "normalization": "rmsnorm"},
    "learned": {"position_embedding_type": "learned_absolute"},
    "alibi": {"position_embedding_type": "alibi"},
    "relative": {"position_embedding_type": "relative", "relative_attention_num_buckets": 8},
    "window": {"position_embedding_type": "rope", "window_size": [20, 0]},
    "experts": {"position_embedding_type": "rope", "num_moe_experts": 4, "moe_router_topk": 2,
                "moe_aux_loss_coeff": 0.05, "moe_z_loss_coeff": 0.01},
    "recomputed": {"position_embedding_type": "rope", "activations_checkpoint_granularity": "full",
                   "activations_checkpoint_method": "uniform", "activations_checkpoint_num_layers": 1},
}  # fmt: skip


@pytest.mark.parametrize("kind", cases(KINDS, fast=2))
def test_packed_rows_are_unpacked_rows(kind: str, tmp_path: Path) -> None:
    """Loss and gradients of an epoch, in fp64."""
    found = {}
    for packs in (False, True):
        there = root(tmp_path, {"packed_sequence": packs}, **KINDS[kind])
        data = build_data(there)
        at_once = data.train.samples if kind == "experts" else 3  # their losses are of a whole micro batch
        found[packs] = data.train.samples, *loss_and_gradients(data, there, at_once)
    (rows, loss, gradients), (fewer, packed_loss, packed_gradients) = found[False], found[True]
    assert fewer < rows / 2
    assert abs(packed_loss / loss - 1) < 1e-12
    for name, gradient in gradients.items():
        scale = gradient.abs().max()
        assert (packed_gradients[name] - gradient).abs().max() <= 1e-12 * scale, name


def test_labels_are_the_answers_and_their_ends(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    whole = sorted(line["output"] for line in map(json.loads, pairs(tmp_path).read_text().splitlines()))
    for packs in (False, True):
        data = build_data(root(tmp_path, {"packed_sequence": packs, "splits_string": "1"}))
        batch: Any = data.train.batch(0, data.train.samples)
        counted = batch["labels"] != IGNORE_INDEX
        said = tokenizer.decode(batch["labels"][counted].masked_fill(batch["labels"][counted] == 1, ord("|") + 3))
        assert sorted(said.removesuffix("|").replace(" answer", "|answer").split("|")[1:]) != []
        assert sorted(f" {one}" for one in whole) == sorted(said.removesuffix("|").split("|"))
        # What is predicted at a place is what is read at the next.
        following = batch["tokens"][:, 1:][counted[:, :-1]]
        labels = batch["labels"][:, :-1][counted[:, :-1]]
        assert ((following == labels) | (labels == tokenizer.eos_id)).all()
        assert packs == ("documents" in batch)


def example(*tokens: int, counted: int) -> Example:
    ids = torch.tensor(tokens).numpy()
    return Example(ids, torch.arange(len(tokens)).numpy() >= len(tokens) - counted, 0, "", "")


def test_examples_are_cut_to_a_row_and_left_out_with_nothing_to_learn() -> None:
    long, lost, short = example(*range(1, 9), counted=5), example(*range(1, 9), counted=2), example(1, 2, counted=1)
    found = truncate_examples([long, lost, short, example(5, counted=1)], 4)
    assert (len(found), found.num_truncated, found.num_skipped) == (2, 2, 2)
    assert found.examples[0].tokens.tolist() == [1, 2, 3, 4, 5]
    rows = ExampleSamples(found, 4, 0, None, pack_rows=False).batch(0, 3)
    expected = {(1, 2, 3, 4): (-100, -100, 4, 5), (1, 0, 0, 0): (2, -100, -100, -100), (0,) * 4: (-100,) * 4}
    seen = zip(rows["tokens"].tolist(), rows["labels"].tolist(), strict=True)
    assert {tuple(read): tuple(said) for read, said in seen} == expected
    packed = ExampleSamples(truncate_examples([short, short, short], 4), 4, 9, 3, pack_rows=True).batch(0, 1)
    assert packed["tokens"].tolist() == [[1, 1, 1, 9]]
    assert packed["documents"].tolist() == [[0, 1, 2, 3]]
    assert packed["labels"].tolist() == [[2, 2, 2, -100]]
    with pytest.raises(ValueError, match="at least one"):
        ExampleSamples(Examples([], 0, 0), 4, 0, None, pack_rows=True)


def test_positions_alone_decide_what_a_batch_holds(tmp_path: Path) -> None:
    data = build_data(root(tmp_path, {"packed_sequence": True}))
    assert data.train.samples >= 4
    whole: Any = data.train.batch(0, 3 * data.train.samples)
    for first, count in ((0, 2), (data.train.samples - 1, 3), (2 * data.train.samples, 1)):
        part: Any = build_data(root(tmp_path, {"packed_sequence": True})).train.batch(first, count)
        assert all(torch.equal(part[name], whole[name][first : first + count]) for name in whole)
    epochs = whole["tokens"].chunk(3)
    assert not torch.equal(epochs[0], epochs[1])
    assert sorted(epochs[0].tolist()) == sorted(epochs[1].tolist())


# ---------------------------------------------------------------- whole runs


RUN = [
    *("trainer=cpu", "model.encoder_seq_length=192", "model.num_layers=1", "model.hidden_size=48"),
    *("model.ffn_hidden_size=96", "model.num_attention_heads=4", "model.micro_batch_size=4"),
    *("model.global_batch_size=4", "model.compile=false", "trainer.limit_val_batches=1.0"),
    *("trainer.enable_model_summary=false", "model.optim.lr=1e-2", "model.position_embedding_type=rope"),
]


def evaluated(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main.main(["evaluate", "--checkpoint", str(folder), "--device", "cpu", "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


@full_only
@pytest.mark.parametrize("chat", [True, *extra(False)])
def test_a_model_learns_to_answer(chat: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers that are always the same: exact match 1, from prompts as training shows them, up to their end."""
    path, other = tmp_path / "data.jsonl", tmp_path / "other.jsonl"
    for number, file in enumerate((path, other)):
        objects = ({"input": f"Is it {n}?", "output": "No, never."} for n in range(20 + 80 * (1 - number)))
        if chat:
            turns = ("user", "How?"), ("assistant", "No, never."), ("user", "And?"), ("assistant", "No, never.")
            messages = [{"role": role, "content": text} for role, text in turns]
            objects = ({"messages": [{"role": "system", "content": str(n)}, *messages]} for n in range(100))
        file.write_text("".join(json.dumps(one) + "\n" for one in objects))
    source = [f"data={'chat' if chat else 'sft'}", f"model.data.path={path}"]
    run = tmp_path / "run"
    steps = ["trainer.max_steps=40", "trainer.val_check_interval=40", f"exp_manager.explicit_log_dir={run}"]
    assert main.main(["train", *source, *RUN, *steps]) == 0
    found = evaluated(run, capsys)
    assert found["loss"] < 0.1
    assert found["exact_match"] == 1.0
    assert found["rouge_l"] == 1.0
    assert found["data"].startswith("validation split of")
    assert found["tokens"] == found["texts"] * (22 if chat else 12)  # 10 bytes and an end; a space before it
    more = evaluated(run, capsys, "--data-path", str(other), "--limit-batches", "2", "--batch-size", "3")
    assert (more["exact_match"], more["texts"]) == (1.0, 6)


@full_only
def test_docstrings_are_for_a_gpt_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The shipped experiment trains and is scored beside the copied name."""
    run = tmp_path / "run"
    small = ["model.encoder_seq_length=256", "trainer.max_steps=2", "trainer.limit_val_batches=1"]
    changes = keep_last_overrides([*RUN, *small, f"exp_manager.explicit_log_dir={run}"])
    assert main.main(["train", "experiment=docstring_gpt", *changes]) == 0
    assert "packed sequences of 256" in capsys.readouterr().out
    found = evaluated(run, capsys, "--split", "test", "--limit-batches", "1", "--batch-size", "2")
    assert found["texts"] == 2
    assert found["copied_name"]["rouge_l"] >= 0


def test_a_template_without_answers_is_told(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}))
    data = {"path": str(tmp_path / "chat.jsonl"), "chat": True, "splits_string": "1"}
    there = root(tmp_path, data, tokenizer={"chat_template": "{{ messages[0].content }}"})
    with pytest.raises(UserError, match=r"none of the examples of the train split \(1\) .* renders no answers"):
        build_data(there)


def test_the_default_template_of_conversations_is_stored_and_exported(tmp_path: Path) -> None:
    """transformers' tokenizer of the exported model renders a prompt as training did."""
    chats = tmp_path / "chat.jsonl"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chats.write_text(f"{json.dumps({'messages': messages})}\n" * 4)
    data = ["data=chat", f"model.data.path={chats}", "model.data.splits_string='1'", "model.encoder_seq_length=96"]
    run = ["model=gpt_tiny", "model.num_layers=1", "trainer.max_steps=1", "trainer.limit_val_batches=0"]
    run += ["trainer.accelerator=cpu", f"exp_manager.explicit_log_dir={tmp_path / 'run'}"]
    assert main.main(["train", *run, *data]) == 0
    assert main.main(["convert", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path / "hf")
    prompt = theirs.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert theirs.apply_chat_template(messages, tokenize=False).endswith("assistant\nb</s>\n")


def test_rows_too_short_for_the_prompts_are_told(tmp_path: Path) -> None:
    lines = ([("user", "a" * 40 * n), ("assistant", "b")] for n in range(1, 4))
    objects = ({"messages": [{"role": role, "content": text} for role, text in turns]} for turns in lines)
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(one) + "\n" for one in objects))
    data = {"path": str(tmp_path / "chat.jsonl"), "chat": True, "splits_string": "1"}
    says = r"rows of 16 tokens \(`model\.encoder_seq_length`\) end before .* 133 tokens in the median, 173 at most$"
    with pytest.raises(UserError, match=says):
        build_data(root(tmp_path, data, encoder_seq_length=16))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            '{"input": "x"}',
            r"line 1 of .* must have a text `output`; it has `input` \(`model\.data\.label_key` names it",
        ),
        ('{"prompt": "x", "completion": "y"}', r"model\.data\.context_key=prompt model\.data\.label_key=completion$"),
        ('{"messages": []}', r"line 1 of .* is a conversation \(`messages`\), .*; use data=chat"),
        ("", "bad.jsonl holds no example"),
    ],
)
def test_data_that_cannot_be_used(line: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(line)
    keys = {"path": str(tmp_path / "bad.jsonl"), "splits_string": "1", "train_ds": {"add_eos": False}}
    with pytest.raises(UserError, match=says):
        build_data(root(tmp_path, keys))


def test_texts_that_a_template_lacks_are_told_with_its_key(tmp_path: Path) -> None:
    keys = {"splits_string": "1", "train_ds": {"prompt_template": "{question} {output}"}}
    with pytest.raises(UserError, match=r"`input`, `output` \(`model\.data\.train_ds\.prompt_template` names it"):
        build_data(root(tmp_path, keys))


def test_where_a_conversation_stands_is_no_part_of_the_data(tmp_path: Path) -> None:
    """Of equal data the fingerprint is the same wherever they are, and as it was before places were kept."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    prints = set()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(json.dumps({"messages": messages}) + "\n")
        keys = {"path": str(tmp_path / name), "chat": True, "splits_string": "1"}
        prints.add(build_data(root(tmp_path, keys)).fingerprint)
    plain = json.dumps(["train", 0, [messages, None]], sort_keys=True)
    assert prints == {hashlib.sha256(plain.encode()).hexdigest()}


def test_a_changed_template_is_told_on_resuming_and_moves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = [
        "data=sft",
        f"model.data.path={pairs(tmp_path)}",
        *keep_last_overrides([*RUN, "trainer.limit_val_batches=1"]),
    ]
    kept = [f"exp_manager.explicit_log_dir={tmp_path / 'run'}", "trainer.val_check_interval=100"]
    assert main.main(["train", *source, *kept, "trainer.max_steps=1"]) == 0
    again = ["trainer.max_steps=2", "exp_manager.resume_if_exists=true"]
    template = 'model.data.train_ds.prompt_template="Q: {input} A: {output}"'
    capsys.readouterr()
    assert main.main(["train", *source, *kept, *again, template]) == 0
    said = capsys.readouterr().out
    assert "`model.data.train_ds.prompt_template` was None in step-1 and is Q: {input} A: {output} now" in said
    assert "done after step 2" in said


@pytest.mark.parametrize("own", [True, False])
def test_splits_string_beside_splits_of_their_own_is_told(
    own: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    pairs(folder).rename(folder / ("train.jsonl" if own else "all.jsonl"))
    if own:
        pairs(folder, 10).rename(folder / "validation.jsonl")
    source = ["data=sft", f"model.data.path={folder}", "model.data.splits_string='50,50,0'"]
    run = keep_last_overrides([*RUN, "trainer.limit_val_batches=1", "trainer.max_steps=1"])
    assert main.main(["train", *source, *run, f"exp_manager.explicit_log_dir={tmp_path / 'run'}"]) == 0
    line = f"warning: `model.data.splits_string` (50,50,0) has no effect: {folder} has its own splits; leave it out"
    assert (line in capsys.readouterr().out) == own
    assert (line in (tmp_path / "run" / "run.log").read_text()) == own


def test_a_gpt_and_a_t5_hold_the_same_pairs_out(tmp_path: Path) -> None:
    of_gpt = build_data(root(tmp_path)).examples
    t5 = {"family": "t5", "seq_length": 64, "data": {"data_impl": "jsonl", "path": str(pairs(tmp_path))}}
    of_t5 = build_data(RootBlock.model_validate({"model": t5, "trainer": {"limit_val_batches": 0}})).pairs
    assert of_gpt is not None
    assert of_t5 is not None
    for split, sets in of_gpt.items():
        assert [example.answer_text for one in sets for example in one.examples] == [
            p.target for p in of_t5.pairs[split]
        ]


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [False, True])
def test_packed_answers_are_learnt_on_a_gpu(experts: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compiled, and as a CUDA graph: the rows differ in where examples begin and end, the shapes do not."""
    path, run = tmp_path / "chats.jsonl", tmp_path / "run"
    turns = ("user", "How?"), ("assistant", "No, never.")
    messages = [{"role": role, "content": text} for role, text in turns]
    path.write_text(
        "".join(
            json.dumps({"messages": [{"role": "system", "content": "so " * (n % 9) + str(n)}, *messages]}) + "\n"
            for n in range(200)
        )
    )
    size = ["model.hidden_size=128", "model.ffn_hidden_size=256", "model.encoder_seq_length=256"]
    more = ["model.num_moe_experts=4", "model.moe_router_topk=2", "model.moe_aux_loss_coeff=0.01"] if experts else []
    steps = ["trainer.max_steps=150", "trainer.val_check_interval=150", "model.optim.lr=5e-3"]
    steps += [f"exp_manager.explicit_log_dir={run}"]
    fast = ["trainer=gpu", "model.compile=null", "model.enable_cuda_graph=null"]
    on_gpu = keep_last_overrides([*RUN, *fast, *size, *more, *steps])
    assert main.main(["train", "data=chat", f"model.data.path={path}", *on_gpu]) == 0
    assert "micro batches run as a CUDA graph" in capsys.readouterr().out
    assert main.main(["evaluate", "--checkpoint", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loss"] < 0.1
    assert found["exact_match"] == 1.0
