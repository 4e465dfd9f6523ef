"""Every fix that a message prints works when obeyed: it is accepted, and the message does not come again."""

from __future__ import annotations

import random

import pytest
from cures import complaint, cures_in, follow, load_messages, random_overrides
from test_random_runs import POOLS
from tiers import cases, full_only, looped

from stoker.trainer.utils.errors import UserError

T5, BERT, MMAP = "model=t5_small", "model=bert_base", "model.data.data_impl=mmap"
PEFT, SCHED, RUN = "model.peft.peft_scheme", "model.optim.sched", "exp_manager"
PTUNING = f"{PEFT}=ptuning"
HAND_MADE = [
    ["model.precision=16"],
    ["model.precision='16-mixed'"],
    [f"{SCHED}.max_steps_for_lr_sched=54300.0"],
    ["trainer.max_epochs=0"],
    ["trainer.max_epochs=1.0"],
    ["trainer.max_epochs=x"],
    [
        PTUNING,
        "model.position_embedding_type=rope",
        "model.encoder_seq_length=64",
        "model.peft.p_tuning.virtual_tokens=20",
    ],
    [PTUNING, "model.position_embedding_type=rope", "model.encoder_seq_length=8"],
    [PTUNING, "model.position_embedding_type=learned_absolute", "model.max_position_embeddings=512"],
    [PTUNING, "model.data.reset_attention_mask=true"],
    [PTUNING, BERT],
    [f"{PEFT}=ia3", "model.num_moe_experts=4"],
    [f"{PEFT}=selective"],
    ["model.peft.lora_tuning.adapter_dim=4"],
    ["model.num_attention_heads=7"],
    ["model.num_query_groups=5"],
    ["model.hidden_size=100"],
    ["model.window_size=[40,5]"],
    ["model.activation=swiglu", "model.openai_gelu=true"],
    ["model.qkv_bias=true", "model.bias=true"],
    ["model.attention_backend=flash", "model.use_flash_attention=false"],
    ["model.attention_backend=te_flash", "model.transformer_engine=false"],
    ["model.max_position_embeddings=64", "model.position_embedding_type=learned_absolute"],
    ["model.max_position_embeddings=64", "model.position_embedding_type=alibi"],
    ["model.num_moe_experts=4", "model.moe_router_topk=8"],
    ["model.moe_token_dropping=alltoall", "model.moe_token_dispatcher_type=allgather"],
    ["model.activations_checkpoint_granularity=full"],
    ["model.activations_checkpoint_granularity=selective", "model.cpu_offloading=true"],
    ["model.cpu_offloading=true", "model.cpu_offloading_num_layers=40"],
    ["model.global_batch_size=10", "model.micro_batch_size=4"],
    ["model.rampup_batch_size=[3,3,100]"],
    ["model.data.data_impl=text"],
    ["data=text"],
    ["data=jsonl"],
    ["model.data.data_impl=jsonl"],
    ["model.data.path=x"],
    ["model.data.path=x", "model.data.data_impl=mock"],
    [MMAP, "model.data.data_prefix={train:a}"],
    [MMAP],
    ["model.data.data_prefix=a"],
    ["model.data.splits_string='1'"],
    ["model.data.splits_string=null"],
    ["model.data.seq_length=4096", "model.position_embedding_type=learned_absolute"],
    ["model.data.chat=true"],
    ["tokenizer=char", "data=mock"],
    ["model.tokenizer.library=char", "data=mock"],
    ["tokenizer=char", "model.data.eod_mask_loss=true"],
    [T5, "model.tokenizer.library=char"],
    [T5, "tokenizer=char"],
    [T5, "model.hidden_size=512"],
    [T5, "model.decoder.hidden_size=256"],
    [T5, "model.encoder_seq_length=64"],
    [T5, "model.data.seq_length_dec=8"],
    [T5, "model.tokenizer.num_sentinel_tokens=20"],
    [BERT, "model.num_layers=1k"],
    ["model.tokenizer.library=megatron", "model.tokenizer.type=BertWordPieceCase"],
    ["model.tokenizer.library=huggingface", "model.tokenizer.type=a", "model.tokenizer.model=b"],
    [f"{SCHED}.warmup_steps=5", f"{SCHED}.warmup_ratio=0.1"],
    [f"{SCHED}.warmup_ratio=1.0"],
    [f"{SCHED}.warmup_steps=200000"],
    [f"{SCHED}.name=NoamAnnealing"],
    [f"{SCHED}.name=T5InverseSquareRootAnnealing"],
    [f"{SCHED}.name=NoamHoldAnnealing", f"{SCHED}.warmup_ratio=null"],
    [f"{SCHED}.min_lr=0.1"],
    ["optim=adafactor", "model.optim.eps=1e-8"],
    ["optim=adafactor", "model.optim.warmup_init=true"],
    ["model.optim.name=sgd", "model.optim.nesterov=true"],
    [f"{RUN}.create_early_stopping_callback=true", "trainer.limit_val_batches=0"],
    [f"{RUN}.create_early_stopping_callback=true", "trainer.max_steps=10"],
    [f"{RUN}.checkpoint_callback_params.save_top_k=0", f"{RUN}.checkpoint_callback_params.save_last=false"],
    [f"{RUN}.checkpoint_callback_params.mode=max"],
    [f"{RUN}.ema.enable=true", f"{RUN}.ema.every_n_steps=200000"],
    [f"{RUN}.resume_from_checkpoint=a", f"{RUN}.create_wandb_logger=true"],
    ["trainer.max_time='00:00:00:00'"],
    ["trainer.max_time=00:00:05"],
    ["trainer.max_time=5"],
    ["trainer.profiler=pytorch", "trainer.profile_steps=[8,5]"],
    ["model.memory_profile.enabled=true", "model.memory_profile.rank=3"],
    ["trainer.devices=3"],
    ["trainer.limit_val_batches=7.5"],
    ["trainer.val_check_interval=100.0"],
    ["model.deteministic_mode=true"],
]


def check(line: list[str]) -> None:
    """Every cure is accepted; and obeying one after the other ends, with a run or with a value only the user knows."""
    before = load_messages(line)
    for cure in before.cures:
        wrong = complaint(line, before, cure)
        assert not wrong, f"{line}: {cure.overrides} for {cure.key}: {wrong}"
    lines = follow(line, limit=8)
    assert len(lines) <= 8, lines
    assert len({tuple(sorted(words)) for words in lines}) == len(lines), lines


def check_random(chance: random.Random, count: int) -> int:
    """Check random command lines; return how many of them had a cure."""
    cured = 0
    for line in random_overrides(chance, count):
        try:
            cured += bool(load_messages(line).cures)
            check(line)
        except UserError as error:
            pytest.fail(f"{line}: {error}")
    return cured


def check_models(chance: random.Random, count: int) -> None:
    """Check combinations of plausible values of a GPT."""
    for _ in range(count):
        keys = chance.sample(list(POOLS), chance.randint(3, 9))
        check([*chance.choice([["data=mock"], []]), *(f"{key}={chance.choice(POOLS[key])}" for key in keys)])


@looped(
    ("fix", "overrides"),
    [
        ("write a.b=1", [("a.b=1",)]),
        ("~a.b c=2", [("~a.b", "c=2")]),
        ("a=1, or b=x", [("a=1",), ("b=x",)]),
        ("use a=1, or b=2.5.", [("a=1",), ("b=2.5",)]),
        ("leave it out, or write a=[1,2]", [("-key",), ("a=[1,2]",)]),
        ("~a, or b=VALUE in place of it", [("~a",)]),
        ("'a='\"'\"'2'\"'\"''", [("a='2'",)]),
        ("did you mean a=b?", [("a=b",)]),
        ("such as a=3", []),
        ("data=pystd to train on text", [("data=pystd",)]),
    ],
)
def test_cures_are_found_in_a_fix(fix: str, overrides: list[tuple[str, ...]]) -> None:
    assert list(cures_in("key", fix)) == overrides


LINES = cases(HAND_MADE, fast=25)


@looped("line", LINES)
def test_hand_made(line: list[str]) -> None:
    check(line)


def test_most_of_the_hand_made_have_a_cure() -> None:
    assert all(load_messages(line).messages for line in LINES)
    assert sum(bool(load_messages(line).cures) for line in LINES) > 0.75 * len(LINES)


def test_random_keys() -> None:
    assert check_random(random.Random(5), 20) > 5


def test_random_models() -> None:
    check_models(random.Random(5), 12)


@full_only
@pytest.mark.parametrize("seed", range(8))
def test_all_random_keys(seed: int) -> None:
    assert check_random(random.Random(seed), 750) > 200


@full_only
@pytest.mark.parametrize("seed", range(4))
def test_all_random_models(seed: int) -> None:
    check_models(random.Random(seed), 400)
