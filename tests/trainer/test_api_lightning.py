"""The LightningModules and the data module in a plain `pl.Trainer`: the weights of `stoker train`; refusals."""

import os
import socket
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from forked_ranks import fork_ranks
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.strategies import ModelParallelStrategy
from tiers import extra, full_only
from torch.utils.data import DataLoader

import stoker
from stoker.trainer.config.schema.optim import build_schedule
from stoker.trainer.core.training_state import build_optimizer
from stoker.trainer.train import run_training

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns of workers, loggers and more

TINY = ("model.hidden_size=32", "model.ffn_hidden_size=64", "model.num_layers=2", "model.num_attention_heads=2")
SMALL = ("data=mock", "trainer=cpu", "model.hidden_dropout=0.1", "trainer.val_check_interval=100")
FAMILIES = {
    "gpt": ("model=gpt_tiny", "model.encoder_seq_length=16", *TINY),
    "moe": ("model=gpt_tiny", "model.encoder_seq_length=16", *TINY, "model.num_moe_experts=4",
            "model.moe_router_enable_expert_bias=True", "model.moe_router_score_function=sigmoid"),
    "t5": ("model=t5_tiny", "model.seq_length=16"),
    "bert": ("model=bert_tiny", "model.encoder_seq_length=16", "data=pystd"),
}  # fmt: skip
MODULES = {"gpt": stoker.GPTModule, "moe": stoker.GPTModule, "t5": stoker.T5Module, "bert": stoker.BertModule}


def configured(*overrides, family="gpt", batch=8, steps=4):
    keys = [f"trainer.max_steps={steps}", "model.micro_batch_size=2", f"model.global_batch_size={batch}"]
    data = [key for key in FAMILIES[family] if key.startswith("data=")]
    common = [key for key in SMALL if not (data and key.startswith("data="))]
    return stoker.load_config([*FAMILIES[family], *common, *keys, *overrides])


def fitted(config, steps=4, resume=None, **arguments):
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 1}
    trainer = pl.Trainer(accelerator="cpu", max_steps=steps, **(quiet | arguments))
    module = MODULES[config.root.model.family](config)
    trainer.fit(module, stoker.TokenDataModule(config), ckpt_path=resume)
    return module


def stoker_train(directory, *overrides, **options):
    config = configured(
        "trainer.limit_val_batches=0", f"exp_manager.explicit_log_dir={directory}", *overrides, **options
    )
    return run_training(config).model.state_dict()


def same_bits(module, weights):
    found = module.model.state_dict()
    assert found.keys() == weights.keys()
    return all(torch.equal(found[name], weight) for name, weight in weights.items())


def test_twenty_lines_train_to_the_bits_of_stoker_train(tmp_path):
    config = configured(steps=8)
    module = stoker.GPTModule(config)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=8,
        val_check_interval=16,  # micro batches
        check_val_every_n_epoch=None,
        limit_val_batches=2,
        callbacks=[
            ModelCheckpoint(tmp_path / "kept", monitor="val_loss", save_last=True),
            EarlyStopping("val_loss", patience=5),
            LearningRateMonitor(),
        ],
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
        enable_progress_bar=False,
    )
    trainer.fit(module, stoker.TokenDataModule(config))
    assert trainer.global_step == 8
    assert same_bits(module, stoker_train(tmp_path / "run", steps=8))
    logged = next(tmp_path.rglob("metrics.csv")).read_text()
    assert all(name in logged.splitlines()[0] for name in ("loss", "grad_norm", "val_loss", "lr/pg1"))
    restored = stoker.GPTModule.load_from_checkpoint(tmp_path / "kept" / "last.ckpt")
    restored.configure_model()
    restored.load_state_dict(torch.load(tmp_path / "kept" / "last.ckpt", weights_only=True)["state_dict"])
    assert same_bits(restored, module.model.state_dict())


@pytest.mark.usefixtures("small_pystd")
@pytest.mark.parametrize("family", ["moe", *extra("t5", "bert")])
def test_every_family_trains_to_the_same_bits(tmp_path, family):
    module = fitted(configured(family=family, steps=2), steps=2)
    assert same_bits(module, stoker_train(tmp_path, family=family, steps=2))


@pytest.mark.parametrize(
    "precision", ["bf16", "16-mixed", *extra("bf16-mixed", "bf16-true", "64-true", "16", "16-true")]
)
def test_precisions_are_those_of_the_configuration(tmp_path, precision):
    own = ("model.hidden_size=64", "model.native_amp_init_scale=1048576")
    keys = (f"trainer.precision={precision}", *own)
    argument: dict[str, Any] = {} if precision in ("bf16", "16") else {"precision": precision}
    if precision == "16-mixed":  # for which a Trainer takes bf16-mixed on a CPU
        argument = {"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))}
    module = fitted(configured(*keys, steps=5), steps=5, **argument)
    assert same_bits(module, stoker_train(tmp_path, *keys, steps=5))
    if precision.startswith("16"):
        assert 0 < module._optimizer.step_count < 5, "no step was skipped, or all of them"
    if argument:
        assert same_bits(fitted(configured(*own, steps=5), steps=5, **argument), module.model.state_dict())


def test_a_checkpoint_of_lightning_is_resumed_exactly(tmp_path):
    whole = fitted(configured())
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="half-{step}")
    assert same_bits(fitted(configured(), callbacks=[saves], enable_checkpointing=True), whole.model.state_dict())
    resumed = fitted(configured(), resume=tmp_path / "half-step=2.ckpt")
    assert resumed.trainer.global_step == 4
    assert same_bits(resumed, whole.model.state_dict())
    state = torch.load(tmp_path / "half-step=2.ckpt", weights_only=True)["optimizer_states"][0]
    state["state"].popitem()
    with pytest.raises(ValueError, match="the optimizer state must be that of AdamW for the same parameters"):
        resumed._optimizer.load_state_dict(state)


def test_batches_of_a_loader_of_ones_own_have_their_own_mean():
    torch.manual_seed(0)
    rows = torch.randint(0, 250, (8, 17))
    dataset: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in rows]
    batches = DataLoader(dataset, batch_size=2)
    config = configured(
        "trainer.precision=64", "model.hidden_dropout=0", "trainer.gradient_clip_val=0", batch=4, steps=1
    )
    module = stoker.GPTModule(config, vocab_size=259)
    module.configure_model()
    twin = stoker.GPTModule(config, vocab_size=259)
    twin.configure_model()
    pl.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        accumulate_grad_batches=2,
    ).fit(module, batches)  # fmt: skip
    optimizer = twin.model and build_optimizer(twin.run, twin.model)
    for first in (0, 2):
        logits = twin(rows[first : first + 2, :-1])
        (torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[first : first + 2, 1:].flatten()) / 2).backward()
    optimizer.set_lr(build_schedule(config.root.model.optim, 1)(0))
    optimizer.step()
    for name, weight in twin.model.state_dict().items():
        torch.testing.assert_close(module.model.state_dict()[name], weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("keys", "arguments", "says"),
    [
        (["trainer.max_steps=4"], {"steps": 3}, "`trainer.max_steps` (4) and Trainer(max_steps=3) must be equal"),
        (["trainer.gradient_clip_val=1.0"], {"gradient_clip_val": 2.0}, "`trainer.gradient_clip_val` (1.0) and"),
        ([], {"accumulate_grad_batches": 3}, "`model.global_batch_size` (8) is 4 micro batches on each of 1"),
        (["trainer.precision=64"], {"precision": "bf16-mixed"}, "set trainer.precision=bf16-mixed"),
        (["trainer.precision=16"], {"precision": "16-true"}, "set trainer.precision=16-true"),
        ([], {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "use 'norm'"),
        (["model.rampup_batch_size=[2,2,8]"], {}, "`model.rampup_batch_size` ([2, 2, 8]) needs"),
        (
            ["model.fp8=True", "model.transformer_engine=True"],
            {},
            "`model.fp8_recipe` (delayed) needs the loop of stoker, which updates and saves its scales",
        ),
        (
            [
                "model.fp8=True", "model.transformer_engine=True", "model.fp8_recipe=tensorwise",
                "model.fp8_dot_product_attention=True", "model.attention_dropout=0",
            ],
            {},
            "`model.fp8_dot_product_attention` (True) needs the loop of stoker, which updates and saves its scales",
        ),
        (
            ["model.fp8=True", "model.fp8_params=True", "trainer.precision=bf16"],
            {},
            "`model.fp8_params` (True) needs the loop of stoker",
        ),
        (["exp_manager.ema.enable=True"], {}, "`exp_manager.ema.enable` (True) needs the loop of stoker"),
        (["model.context_parallel_size=2", "trainer.devices=2"], {}, "`model.context_parallel_size` (2) needs"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(keys, arguments, says):
    with pytest.raises(stoker.UserError) as error:
        fitted(configured(*keys), **arguments)
    assert says in "\n".join(error.value.lines)


def test_all_contradictions_are_told_at_once_and_unused_keys_warned_of():
    with pytest.raises(stoker.UserError) as error:
        fitted(configured("exp_manager.ema.enable=True", "trainer.precision=16"), steps=3, precision="16-true")
    assert len(error.value.lines) == 3
    with pytest.warns(UserWarning, match=r"act in `stoker train` only.*: exp_manager\.exp_dir, trainer\.max_time"):
        fitted(configured("exp_manager.exp_dir=x", "trainer.max_time=00:01:00:00", "trainer.log_every_n_steps=50"))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda row: {"input_ids": row[:-1], "labels": row[1:]}, "has input_ids, labels without tokens"),
        (lambda row: (row[:-1], row[1:]), "has list without tokens and labels"),
        (
            lambda row: {"tokens": row[:-1].float(), "labels": row[1:]},
            "`tokens` (torch.float32) of a batch must",
        ),
        (lambda row: {"tokens": row[:-1], "labels": row[1:] + 250}, "beyond the vocabulary of 259"),
    ],
)
def test_batches_that_are_none_are_refused_in_a_line(make, says):
    dataset: Any = [make(row) for row in torch.arange(34).view(2, 17)]
    trainer = pl.Trainer(accelerator="cpu", max_steps=4, logger=False, enable_checkpointing=False)
    with pytest.raises(stoker.UserError) as error:
        trainer.fit(stoker.GPTModule(configured(batch=2)), DataLoader(dataset, batch_size=2))
    assert says in error.value.lines[0]


def test_the_length_of_the_configuration_acts_if_the_trainer_has_none(tmp_path):
    keys = ("model.data.data_impl=mock",)
    module = fitted(configured(*keys, steps=2), steps=-1, max_epochs=1)
    assert module.trainer.global_step == 2
    assert same_bits(module, stoker_train(tmp_path, *keys, steps=2))


def test_a_module_is_of_one_family():
    with pytest.raises(stoker.UserError, match=r"must be t5 for T5Module; use GPTModule"):
        stoker.T5Module(configured())
    with pytest.raises(stoker.UserError, match=r"has no data before setup\(\)"):
        stoker.TokenDataModule(configured()).train_dataloader()


@full_only
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tensor", "moe"])
def test_ranks_train_what_one_process_does(tmp_path, kind):
    keys = {"fsdp": ["model.fsdp=True"], "tensor": ["model.tensor_model_parallel_size=2", "trainer.devices=2"]}
    family = "moe" if kind == "moe" else "gpt"
    one = fitted(configured("trainer.precision=64", family=family), precision="64-true").model.state_dict()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def train(rank):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        os.environ |= {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"TORCHELASTIC_RUN_ID": "x"}
        options: dict[str, Any] = {"strategy": "ddp", "precision": "64-true"}
        if kind in ("fsdp", "tensor"):
            sizes = (2, 1) if kind == "fsdp" else (1, 2)
            options = {"strategy": ModelParallelStrategy(*sizes)}
        config = configured("trainer.precision=64", *keys.get(kind, []), family=family)
        module = fitted(config, devices=2, **options)
        part = {"tensor": "decoder.layers.0.mlp.down.weight"}.get(kind)
        worst = 0.0
        for name, weight in module.model.state_dict().items():
            weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            expected = one[name]
            if kind == "tensor" and weight.shape != expected.shape:
                if name != part:
                    continue
                expected = expected.chunk(2, dim=1)[rank]
            worst = max(worst, (weight - expected).abs().max().item())
        if kind == "fsdp":
            with pytest.raises(stoker.UserError, match="save weights only"):
                module.trainer.save_checkpoint(tmp_path / "x.ckpt")
            with pytest.raises(stoker.UserError, match=r"use ModelCheckpoint\(save_weights_only=True\)"):
                fitted(config, devices=2, strategy=ModelParallelStrategy(2, 1), enable_checkpointing=True)
        return worst

    assert max(fork_ranks(str(tmp_path), 2, train)) < 1e-13
