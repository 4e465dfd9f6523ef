"""Components of a user's own: what is asked of them, what is refused, and what a checkpoint says about them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from config_helpers import load, problems
from resolved import build_data
from run_metrics import metric_rows
from safetensors.torch import load_file
from tiers import extra, looped
from tiny_run import final_hashes, tiny_config, tiny_document
from torch import nn

import stoker
from stoker.models.config import extensions
from stoker.trainer.cli.main import main
from stoker.trainer.config.lr_schedule import OwnSchedule
from stoker.trainer.config.schema.root import RootBlock
from stoker.trainer.data.tokenizers.own_tokenizer import OwnTokenizer, make_own_tokenizer
from stoker.trainer.data.tokenizers.tokenizer import ByteTokenizer
from stoker.trainer.data.tokenizers.tokenizer_document import tokenizer_from_dict
from stoker.trainer.evaluation.own_functions import own_functions
from stoker.trainer.optim.own_optimizer import OwnOptimizer
from stoker.trainer.train import TrainingResult, run_training
from stoker.trainer.utils.errors import UserError

pytestmark = pytest.mark.usefixtures("nothing_registered")
IGNORED = -100


# ---------------------------------------------------------------- names


@looped(
    ("overrides", "key", "rule", "fix"),
    [
        (
            "model.optim.name=adamww",
            "model.optim.name",
            "or a registered optimizer (lion); if it is your own",
            "=adamw?",
        ),
        ("model.optim.name=lyon", "model.optim.name", "must be one of adamw, ", "model.optim.name=lion?"),
        ("model.optim.sched.name=x", "model.optim.sched.name", "give its module with --import", ""),
        ("model.tokenizer.library=bpe", "model.tokenizer.library", "a registered tokenizer (there is none)", ""),
        ("model.data.data_impl=txt", "model.data.data_impl", "or a registered dataset (there is none)", "=text?"),
        ("model.loss=focl", "model.loss", "`loss` (focl) must be a registered loss (focal)", "model.loss=focal?"),
        (
            "trainer.validation_metrics=[top]",
            "trainer.validation_metrics",
            "(top) must be a registered metric",
            "[top1]",
        ),
        ("trainer.validation_metrics=[top1,top1]", "trainer.validation_metrics", "each metric once", "[top1]"),
        ("trainer.callbacks=[x]", "trainer.callbacks", "(x) must be a registered callback (there is none)", ""),
        (
            "exp_manager.checkpoint_callback_params.monitor=val_top1",
            "exp_manager.checkpoint_callback_params.monitor",
            "`monitor` (val_top1) must be one of val_loss, ",
            "trainer.validation_metrics=[top1]",
        ),
        ("model.optim.kwargs.token=hf_0123456789abcdef", "model.optim.kwargs.token", "looks like a secret", ""),
        (
            "model.optim.name=lion model.fsdp=true",
            "model.optim.name",
            "does not say that its update is elementwise",
            "",
        ),
        ("model.loss=focal model.tensor_model_parallel_size=2 trainer.devices=2", "model.loss", "whole vocabulary", ""),
        (
            "model.optim.name=lion model.cpu_offloading_optimizer=true",
            "model.cpu_offloading_optimizer",
            "does not support an optimizer of your own",
            "",
        ),
    ],
)
def test_refused(overrides: str, key: str, rule: str, fix: str) -> None:
    if "lion" not in extensions.extension_names("optimizer"):
        stoker.register("optimizer", "lion")(torch.optim.SGD)
        stoker.register("loss", "focal")(F.cross_entropy)
        stoker.register("metric", "top1")(len)
    found = problems(*overrides.split())[key]
    assert rule in found.rule
    assert fix in found.fix


def test_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    stoker.register("metric", "top1")(len)
    stoker.register("loss", "focal")(len)

    @stoker.register("optimizer", "lion")
    class Lion(torch.optim.SGD):
        elementwise = True

    watched = ("checkpoint_callback_params", "early_stopping_callback_params")
    monitors = [f"exp_manager.{block}.monitor=val_top1" for block in watched]
    monitors.append("exp_manager.create_early_stopping_callback=true")
    sharded = ["model.optim.name=lion", "model.fsdp=true", "trainer.devices=2", "model.micro_batch_size=8"]
    assert not load("trainer.validation_metrics=[top1]", *monitors, *sharded).findings
    (finding,) = load("model.loss=focal", "model.label_smoothing=0.1").findings
    assert "`label_smoothing` has no effect" in finding.message
    (finding,) = load("model.optim.kwargs.a=1").findings
    assert "`kwargs` has no effect with `adamw`" in finding.message
    with pytest.raises(ValueError, match="already provided by stoker"):
        stoker.register("metric", "loss")


# ---------------------------------------------------------------- datasets


def samples_of(items: Any, length: int = 4, **model: Any) -> Any:
    stoker.register("dataset", "items")(lambda split: items if split == "train" else [])
    length_key = "seq_length" if model.get("family") == "t5" else "encoder_seq_length"
    keys = {length_key: length, "data": {"data_impl": "items"}, **model}
    document = {"model": keys, "trainer": {"limit_val_batches": 0}}
    try:
        return build_data(RootBlock.model_validate(document)).train
    finally:
        extensions._registered["dataset"].clear()


def rows(items: Any, length: int = 4, **model: Any) -> list[tuple[list[int], list[int]]]:
    samples = samples_of(items, length, **model)
    batch = samples.batch(0, len(items))
    return sorted(zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True))


def test_items_become_rows_with_the_labels_of_their_next_tokens() -> None:
    i = IGNORED
    assert rows([[5, 6, 7]]) == [([5, 6, 7, 0], [6, 7, i, i])]
    assert rows([np.arange(5, 10)]) == [([5, 6, 7, 8], [6, 7, 8, 9])]
    assert rows([torch.tensor([5, 6], dtype=torch.int16)]) == [([5, 6, 0, 0], [6, i, i, i])]
    assert rows([{"input_ids": [5, 6, 7], "text": "x"}]) == [([5, 6, 7, 0], [6, 7, i, i])]
    assert rows([{"input_ids": [5, 6, 7, 8], "labels": [i, i, 7, 8]}]) == [([5, 6, 7, 8], [i, 7, 8, i])]
    masked = {"input_ids": [0, 5, 6, 7], "labels": [i, 5, 6, 9], "attention_mask": [0, 1, 1, 1]}
    assert rows([masked]) == [([5, 6, 7, 0], [6, 9, i, i])]
    assert rows(["ab"]) == [([100, 101, 1, 0], [101, 1, i, i])]
    padded = samples_of([[5, 6, 7]], num_moe_experts=2).batch(0, 1)
    assert padded.padding.tolist() == [[True, True, True, False]]


@looped(
    ("items", "says"),
    [
        ([[5, 6], [1] * 6], "item 1 has 6 tokens, but a sample takes 5: truncate or split it"),
        ([[5, 999]], "item 0: the token id 999 is not in the vocabulary, 0 to 258"),
        ([[5, -1]], "item 0: the token id -1 is not"),
        ([{"input_ids": [5, 6], "labels": [-100, -1]}], "item 0: the label -1 is not"),
        ([{"input_ids": [5, 6], "labels": [6]}], "`labels` (1) must be as many as `input_ids` (2)"),
        ([{"input_ids": [5, 6], "attention_mask": [1]}], "`attention_mask` (1) must be as long as `input_ids` (2)"),
        ([{"tokens": [5, 6]}], "item 0: the dict has no `input_ids`, only tokens"),
        ([[5]], "item 0 has 1 tokens; one predicts the next, so it needs 2"),
        ([[0.5, 1.5]], "must be a flat sequence of integers, not a list of float64 [2]"),
        ([([5, 6], [6, 7])], "not a tuple of int64 [2, 2]; an item is a list, array or tensor of token ids"),
        ([[[5, 6], [6]]], "must be a flat sequence of integers"),
        ([None], "must be a flat sequence of integers, not a NoneType"),
        ([], "(items), train: the dataset is empty"),
        (iter([[5, 6]]), "returned list_iterator, which is neither a map-style dataset"),
        (None, "returned NoneType, which is neither"),
    ],
)
def test_what_is_no_dataset_or_item_is_told(items: Any, says: str) -> None:
    with pytest.raises(UserError) as error:
        rows(items)
    assert says in str(error.value)


def test_every_epoch_has_each_item_once_in_an_order_of_its_own() -> None:
    items = [[5 + n, 6, 7] for n in range(50)]
    firsts = samples_of(items).batch(0, 150).tokens[:, 0]
    epochs = [firsts[start : start + 50].tolist() for start in (0, 50, 100)]
    assert all(sorted(epoch) == list(range(5, 55)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert samples_of(items).batch(70, 3).tokens[:, 0].tolist() == firsts[70:73].tolist(), "of a resumed run"
    assert samples_of(items, seed=1).batch(0, 50).tokens[:, 0].tolist() != epochs[0]


def test_held_out_items_are_used_once() -> None:
    stoker.register("dataset", "items")(lambda split: [[5 + n, 6] for n in range(5)])
    keys = {"encoder_seq_length": 4, "data": {"data_impl": "items"}}
    samples = build_data(RootBlock.model_validate({"model": keys})).validation
    assert samples is not None
    batch = samples.batch(0, 8)
    assert sorted(batch.tokens[:5, 0].tolist()) == [5, 6, 7, 8, 9]
    assert (batch.labels[5:] == IGNORED).all()


def test_other_tasks_take_full_rows_and_make_their_own_labels() -> None:
    bert = {"family": "bert", "position_embedding_type": "learned_absolute"}
    batch = samples_of([list(range(5, 13))], 8, **bert).batch(0, 1)
    assert batch["tokens"].shape == (1, 8)
    for item in ([5, 6, 7], {"input_ids": list(range(5, 13)), "labels": list(range(5, 13))}):
        with pytest.raises(UserError, match="this task takes items of exactly 8 tokens, without `labels`"):
            samples_of([item], 8, **bert).batch(0, 1)


# ---------------------------------------------------------------- tokenizers


class Letters:
    """Letters, as words of one letter each with spaces between them."""

    eos_id = 0
    vocab_size = 28

    def __init__(self, shift: int = 1) -> None:
        self.shift = shift

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") + self.shift for letter in text if letter.isalpha()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(chr(ord("a") + id_ - self.shift) for id_ in ids)


def test_a_tokenizer_is_restored_through_the_registry() -> None:
    stoker.register("tokenizer", "letters")(Letters)
    tokenizer = make_own_tokenizer("letters", {"shift": 2})
    assert tokenizer.encode("a b").tolist() == [2, 3]
    assert tokenizer.decode([2, 3, 0]) == "a b"
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.document_start_ids()) == (0, 0, [0])
    assert tokenizer.continuation_bytes([2], 3) == b" b"
    assert not tokenizer.token_byte_counts().any()
    document = json.loads(json.dumps(tokenizer.to_dict()))
    assert document == {"tokenizer": "letters", "kwargs": {"shift": 2}}
    assert tokenizer_from_dict(document).encode("a").tolist() == [2]
    extensions._registered["tokenizer"].clear()
    with pytest.raises(ValueError, match=r"unknown tokenizer 'letters'; .* your own, give its module with --import"):
        tokenizer_from_dict(document)


class Broken(Letters):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.__dict__ |= attributes


@looped(
    ("make", "says"),
    [
        (lambda: Broken(encode=None), "has no method encode"),
        (lambda: Broken(vocab_size="many"), "`vocab_size` (many) must be a positive integer"),
        (lambda: Broken(eos_id=28), "the id of the eos token (28) must be 0 to 27"),
        (lambda: open("no such file"), "FileNotFoundError"),  # noqa: SIM115
        (lambda: Letters(wrong=1), "TypeError"),  # pyrefly: ignore[unexpected-keyword]
    ],
)
def test_what_is_no_tokenizer_is_told(make: Callable[[], Any], says: str) -> None:
    extensions._registered["tokenizer"]["x"] = make
    with pytest.raises(ValueError) as error:
        make_own_tokenizer("x", {})
    assert says in str(error.value)


def test_what_a_tokenizer_returns_is_checked() -> None:
    with pytest.raises(UserError, match="returned the id 28, which is not in its vocabulary of 28"):
        OwnTokenizer("x", Broken(encode=lambda text: [28]), {}).encode("a")
    with pytest.raises(UserError, match="must return 28 `token_byte_counts`"):
        OwnTokenizer("x", Broken(token_byte_counts=lambda: [1]), {}).token_byte_counts()
    with pytest.raises(UserError, match="the state of the tokenizer x must be JSON"):
        OwnTokenizer("x", Broken(to_dict=lambda: {"a": object()}), {}).to_dict()
    stoker.register("tokenizer", "x")(Letters)
    with pytest.raises(ValueError, match="needs a class method from_dict"):
        tokenizer_from_dict({"tokenizer": "x", "state": {}})
    with pytest.raises(UserError, match="has 0 of 100 sentinels"):
        samples_of([[5, 6]], 64, family="t5", encoder={}, decoder={}, tokenizer={"library": "x"})


def test_a_tokenizer_may_give_the_bytes_of_its_tokens() -> None:
    inner = ByteTokenizer()
    tokenizer = OwnTokenizer("x", inner, {})
    assert tokenizer.token_byte_counts().sum() == 256
    assert tokenizer.decode(inner.encode("é").tolist()) == "é"


# ---------------------------------------------------------------- optimizers and schedules


class Counting(torch.optim.Optimizer):
    """SGD with state of every kind: a tensor, numbers, and a setting of its groups that it changes."""

    def __init__(self, params: Any, lr: float = 0.1, kept: Any = None) -> None:
        super().__init__(params, {"lr": lr, "total": 0.0, "kept": kept})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyrefly: ignore[bad-override]
        for group in self.param_groups:
            group["total"] += group["lr"]
            for parameter in group["params"]:
                state = self.state[parameter]
                state["sum"] = state.get("sum", torch.zeros_like(parameter)) + parameter.grad
                state |= {"steps": state.get("steps", 0) + 1, "odd": not state.get("odd", False), "none": None}
                if group["kept"] is not None:
                    state["kept"] = [group["kept"]]
                parameter -= group["lr"] / state["steps"] * state["sum"] + 1e-3 * group["total"]


def own(model: nn.Module, make: Any = Counting, **settings: Any) -> OwnOptimizer:
    settings = {"lr": 0.1, "weight_decay": 0.0, "kwargs": {}, **settings}
    return OwnOptimizer(model.named_parameters(), make=make, name="x", **settings)


def test_an_optimizer_updates_main_weights_and_counts_no_skipped_step() -> None:
    torch.manual_seed(0)
    model, wide = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4)
    wide.load_state_dict(model.state_dict())
    optimizer = own(model, torch.optim.Adam, main_weights=True, clip_norm=1.0)
    expected = torch.optim.Adam(wide.parameters(), lr=0.1)
    for step in range(3):
        for parameter, twin in zip(model.parameters(), wide.parameters(), strict=True):
            parameter.grad = torch.randn_like(parameter)
            twin.grad = parameter.grad.float()
        if step == 1:
            next(model.parameters()).grad.fill_(math.inf)  # pyrefly: ignore[missing-attribute]
            before = [parameter.clone() for parameter in model.parameters()]
            optimizer.step()
            assert all(map(torch.equal, before, model.parameters()))
            continue
        nn.utils.clip_grad_norm_(wide.parameters(), 1.0)
        optimizer.step()
        expected.step()
    shards = optimizer.local_shards()
    assert torch.allclose(shards["weight.main"].local, wide.weight, rtol=1e-6)
    assert torch.equal(model.weight, shards["weight.main"].local.bfloat16())
    assert (int(shards["weight.step"].local), optimizer.step_count) == (2, 2)


@looped(
    ("make", "settings", "says"),
    [
        (Counting, {"weight_decay": 0.1}, "(x) takes no weight_decay; set model.optim.weight_decay=0"),
        (torch.optim.SGD, {"kwargs": {"wrong": 1}}, "(x): TypeError: "),
        (torch.optim.SGD, {"kwargs": {"momentum": -1.0}}, "(x): ValueError: Invalid momentum value"),
        (lambda groups, lr: list(groups), {}, "must return a torch.optim.Optimizer with the parameter groups given"),
    ],
)
def test_what_is_no_optimizer_is_told(make: Any, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as error:
        own(nn.Linear(2, 2), make, **settings)
    assert says in str(error.value)


def test_state_that_a_checkpoint_cannot_hold_is_told() -> None:
    model = nn.Linear(2, 2)
    optimizer = own(model, kwargs={"kept": 1})
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(UserError, match="has `kept` of type list in its state"):
        optimizer.local_shards()


def test_lightning_restores_an_optimizer() -> None:
    def trained(optimizer: OwnOptimizer, model: nn.Module) -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    model, copy = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, restored = own(model), own(copy)
    trained(optimizer, model)
    copy.load_state_dict(model.state_dict())
    restored.load_state_dict(optimizer.state_dict())
    for each in ((optimizer, model), (restored, copy)):
        trained(*each)
    assert torch.equal(model.weight, copy.weight)
    assert restored.inner.state[restored.inner.param_groups[0]["params"][0]]["steps"] == 2


@pytest.mark.parametrize("rate", ["0.1", None, math.nan, -1.0, True])
def test_a_schedule_must_return_a_rate(rate: Any) -> None:
    with pytest.raises(UserError, match=r"\(x\), step 3: it must return a learning rate, a number >= 0, not "):
        OwnSchedule("x", lambda step, **_: rate, 0.1, 0.0, 10, {})(3)
    with pytest.raises(UserError, match=r"\(x\), step 3: TypeError: .*'wrong'"):
        OwnSchedule("x", lambda step, max_steps, lr, min_lr: 1.0, 0.1, 0.0, 10, {"wrong": 1})(3)


@pytest.mark.parametrize("values", [torch.ones(()), 1.0])
def test_a_loss_must_return_a_value_of_each_token(values: Any) -> None:
    stoker.register("loss", "x")(lambda logits, labels: values)
    loss = own_functions("x", []).loss
    assert loss is not None
    with pytest.raises(UserError, match=r"\(x\) must return a value of each token, a tensor of shape \[3\]"):
        loss(torch.ones(3, 5), torch.ones(3, dtype=torch.int64))


# ---------------------------------------------------------------- runs and their checkpoints


def entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def other_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return entropy(logits, labels)


def train(directory: Path, steps: int, **changes: Any) -> TrainingResult:
    optim = {"name": "counting", "lr": 1e-2, "weight_decay": 0.0, "sched": {"name": "saw", "kwargs": {"teeth": 3}}}
    own = {"model__optim": optim, "model__loss": "entropy", "trainer__validation_metrics": ["entropy"]}
    return run_training(tiny_config(directory, trainer__max_steps=steps, **own, **changes))


def test_a_run_resumes_bit_for_bit_and_tells_of_another_component(tmp_path: Path) -> None:
    stoker.register("optimizer", "counting")(Counting)
    stoker.register("schedule", "saw")(lambda step, max_steps, lr, min_lr, teeth: lr * (1 - step % teeth / teeth))
    stoker.register("loss", "entropy")(entropy)
    stoker.register("metric", "entropy")(entropy)
    train(tmp_path / "a", 8)
    train(tmp_path / "b", 4)
    extensions._registered["loss"]["entropy"] = other_entropy
    result = train(tmp_path / "b", 8)
    assert final_hashes(tmp_path / "a", 8) == final_hashes(tmp_path / "b", 8)
    log = (tmp_path / "b" / "run.log").read_text()
    assert f"`model.loss` was {__name__}:entropy in step-4 and is {__name__}:other_entropy now" in log
    assert "`model.optim.name` was" not in log
    state = load_file(tmp_path / "b" / "checkpoints" / "step-8" / "optimizer.safetensors")
    numbers = {name: tensor.item() for name, tensor in state.items() if name.endswith(".number")}
    assert numbers["token_embedding.weight.steps.number"] == 8
    assert numbers["token_embedding.weight.odd.number"] is False
    assert numbers["param_groups.0.total.number"] == pytest.approx(0.01 * (1 + 2 / 3 + 1 / 3) * 8 / 3, rel=0.1)
    assert result.validation is not None
    assert result.validation.metrics["entropy"] == pytest.approx(result.validation.loss, rel=1e-6)


def test_a_loss_of_all_logits_is_the_built_in_one_for_every_family(tmp_path: Path) -> None:
    stoker.register("loss", "entropy")(entropy)
    stack = {"hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2, "num_layers": 1}
    t5 = tiny_document(tmp_path)["model"]
    t5 = {name: t5[name] for name in ("micro_batch_size", "global_batch_size", "data", "optim")}
    t5 |= {"family": "t5", "seq_length": 16, "encoder": stack, "decoder": stack}
    losses: dict[str, list[float]] = {}
    families = {"gpt": {}, "bert": {"model__family": "bert"}, "t5": {"model": t5}}
    for family in ("bert", *extra("gpt", "t5")):
        for loss in (None, "entropy"):
            directory = tmp_path / f"{family}-{loss}"
            short = {"trainer__max_steps": 2, "trainer__precision": 64, "trainer__limit_val_batches": 0}
            changes = {**short, **families[family], "trainer__log_every_n_steps": 1, "model__loss": loss}
            run_training(tiny_config(directory, **changes))
            losses[directory.name] = [row[name] for row in metric_rows(directory) for name in ("loss", "grad_norm")]
        assert losses[f"{family}-entropy"] == pytest.approx(losses[f"{family}-None"], rel=1e-6), family


def test_a_checkpoint_is_used_without_the_components_of_its_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stoker.register("optimizer", "counting")(Counting)
    stoker.register("schedule", "saw")(lambda step, max_steps, lr, min_lr, teeth: lr)
    stoker.register("loss", "entropy")(entropy)
    stoker.register("metric", "entropy")(entropy)
    stoker.register("tokenizer", "letters")(Letters)
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog " * 50)
    text = {"data_impl": "text", "path": str(tmp_path / "text"), "splits_string": "1,1"}
    train(tmp_path / "run", 2, model__data=text, model__tokenizer={"library": "letters"})
    run, limit = str(tmp_path / "run"), ["--device", "cpu", "--limit-batches", "1"]
    assert main(["evaluate", run, *limit, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]) == {"entropy"}
    for kind in ("optimizer", "schedule", "loss", "metric"):
        extensions._registered[kind].clear()
    assert main(["evaluate", run, *limit, "--json"]) == 0
    shown = capsys.readouterr()
    assert "metrics" not in json.loads(shown.out)
    assert "note: entropy: not registered, so not measured" in shown.err
    assert main(["generate", run, "--device", "cpu", "--prompt", "ab", "--max-new-tokens", "2"]) == 0
    assert len(capsys.readouterr().out.split()) <= 4
    extensions._registered["tokenizer"].clear()
    assert main(["generate", run, "--device", "cpu", "--prompt", "ab"]) == 2
    assert "unknown tokenizer 'letters'" in capsys.readouterr().err
