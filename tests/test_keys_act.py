"""No key lies: each key of the schema changes something that can be seen, and each value of a closed list is accepted.

An observable is a function from a configuration to something comparable: shapes, initial weights, logits, the loss,
learning rates, which samples are drawn, what a run writes and prints. A row says which observable a key changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from config_helpers import gpt, load, problems
from late_copies import LateCopies
from late_copies import install as install_late_copies
from test_keys_act_fine_tuning import KEYS as KEYS_OF_FINE_TUNING
from tiny_run import tiny_document
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from stoker.kernels.attention.call import AttentionCall, Installed
from stoker.kernels.attention.dispatch import choose
from stoker.kernels.attention.flags import AttentionFlags
from stoker.kernels.attention.unfused import UnfusedAttention
from stoker.models import build
from stoker.models.build import compile_policy
from stoker.models.config.block import Block
from stoker.models.config.stack import StackKeys
from stoker.models.gpt import GPT
from stoker.models.moe import experts as experts_module
from stoker.models.moe.layers import moe_layers
from stoker.models.stack import Layer
from stoker.trainer import cli, feed, loggers, module, parts, profiling, run, run_description, saving
from stoker.trainer.checkpoint import find_checkpoint
from stoker.trainer.config import paths
from stoker.trainer.config.exp_manager import EarlyStoppingParams, logged_name
from stoker.trainer.config.run_config import RunConfig
from stoker.trainer.config.schema import RootBlock
from stoker.trainer.config.schema_index import schema_keys
from stoker.trainer.data import tokenizer_sentencepiece
from stoker.trainer.data.build import build_data
from stoker.trainer.data.indexed import IndexedWriter
from stoker.trainer.data.installed import BUILT_IN, PAIR_SOURCES
from stoker.trainer.data.samples import IGNORED_LABEL, MockSamples
from stoker.trainer.data.tokenizer_gpt2 import gpt2_definition
from stoker.trainer.data.tokenizer_pieces import byte_alphabet
from stoker.trainer.data.tokenizers import CharTokenizer
from stoker.trainer.distributed import started
from stoker.trainer.distributed.layout import plan_layout
from stoker.trainer.distributed.placement import Placement
from stoker.trainer.distributed.placement import place as place_processes
from stoker.trainer.early_stopping import EarlyStopping
from stoker.trainer.ema import EMA
from stoker.trainer.errors import UserError
from stoker.trainer.evaluation import EvaluationResult
from stoker.trainer.loop_state import LoopState, Patience
from stoker.trainer.optim import build as optim_build
from stoker.trainer.parts import build_model, build_optimizer, choose_device, reduce_dtype
from stoker.trainer.precision import plan_precision
from stoker.trainer.run import TrainingResult, run_training
from stoker.trainer.schedule import build_schedule
from stoker.trainer.step_policy import DivergedError, StepPolicy

pytestmark = pytest.mark.usefixtures("without_pictures", "little_pystd")
CPU = torch.device("cpu")
MODEL, TRAINER, MANAGER, OPTIM = "model.", "trainer.", "exp_manager.", "model.optim."
TOKENIZER = MODEL + "tokenizer."
SCHED, CALLBACK, DATA = "model.optim.sched.", "exp_manager.checkpoint_callback_params.", "model.data."
BASE = {
    "model.hidden_size": 16,
    "model.ffn_hidden_size": 32,
    "model.encoder_seq_length": 8,
    "model.hidden_dropout": 0.0,
    "model.attention_dropout": 0.0,
    "model.init_method_std": 0.3,  # so that everything in the model counts
    "trainer.max_steps": 4,
    "trainer.log_every_n_steps": 1,
    "trainer.limit_val_batches": 0,
    "exp_manager.create_checkpoint_callback": False,
    "model.optim.sched": {},
}
Changes = dict[str, Any]


def fingerprint(value: torch.Tensor) -> str:
    return hashlib.sha256(repr(value.shape).encode() + value.detach().float().numpy().tobytes()).hexdigest()


class Lab:
    """Builds and runs tiny configurations."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.capsys = capsys
        self.monkeypatch = monkeypatch
        self.runs = 0
        self.text = folder / "text.txt"
        self.text.write_text("To be, or not to be, that is the question. " * 20)

    def document(self, changes: Changes, directory: Path | None = None) -> dict[str, Any]:
        document = tiny_document(directory or self.folder / "unused")
        for path, value in {**BASE, **changes}.items():
            paths.put(document, path, deepcopy(value))
        return document

    def root(self, changes: Changes) -> RootBlock:
        return RootBlock.model_validate(self.document(changes))

    def model(self, changes: Changes) -> GPT:
        root = self.root(changes)
        plan = plan_precision(root.trainer, root.model.megatron_amp_O2, CPU)
        model = build_model(root, build_data(root), plan, CPU)
        assert isinstance(model, GPT)
        return model

    def run(self, changes: Changes, directory: Path | None = None) -> TrainingResult:
        self.runs += 1
        directory = directory or self.folder / f"run-{self.runs}"
        document = self.document(changes, directory)
        return run_training(RunConfig(RootBlock.model_validate(document), document=document))

    def metrics(self, changes: Changes) -> list[dict[str, Any]]:
        lines = (self.run(changes).directory / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def printed(self, changes: Changes) -> str:
        self.capsys.readouterr()
        self.run(changes)
        return self.capsys.readouterr().out


@pytest.fixture
def lab(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(tmp_path, capsys, monkeypatch)


# ---------------------------------------------------------------- observables


def shapes(lab: Lab, changes: Changes) -> Any:
    return {name: tuple(value.shape) for name, value in lab.model(changes).named_parameters()}


def shapes_of_family(lab: Lab, changes: Changes) -> Any:
    """With the keys of a stack where the family has them."""
    document = lab.document(changes)
    model = document["model"]
    if changes[MODEL + "family"] == "t5":
        stack = {name: model.pop(name) for name in list(model) if name in StackKeys.model_fields}
        length = model.pop("encoder_seq_length")
        model |= {"encoder": stack, "decoder": stack, "seq_length": length, "data": {"data_impl": "mock"}}
    root = RootBlock.model_validate(document)
    plan = plan_precision(root.trainer, root.model.megatron_amp_O2, CPU)
    model = build_model(root, build_data(root), plan, CPU)
    return {name: tuple(value.shape) for name, value in model.named_parameters()}


def weights(lab: Lab, changes: Changes) -> Any:
    return {name: fingerprint(value) for name, value in lab.model(changes).named_parameters()}


def logits(lab: Lab, changes: Changes) -> Any:
    model = lab.model(changes).eval()
    with torch.no_grad():
        return fingerprint(model(torch.arange(8).repeat(2, 1)))


def training_loss(lab: Lab, changes: Changes) -> Any:
    """Of one micro batch, seeded as in training."""
    model = lab.model(changes)
    tokens = torch.arange(8).repeat(2, 1)
    module.seed_generators(module.micro_batch_seed(lab.root(changes).model.seed, 0, 0), CPU)
    return model.loss(tokens, tokens, 1.0).item()


def gradients(lab: Lab, changes: Changes) -> Any:
    """Of one micro batch, seeded as in training."""
    model = lab.model(changes)
    tokens = torch.arange(8).repeat(2, 1)
    module.seed_generators(module.micro_batch_seed(lab.root(changes).model.seed, 0, 0), CPU)
    model.loss(tokens, tokens, 1.0).backward()
    return {name: fingerprint(value.grad) for name, value in model.named_parameters() if value.grad is not None}


def flops(lab: Lab, changes: Changes) -> Any:
    """Of matrices, in a forward pass."""
    model = lab.model(changes).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(8).repeat(2, 1))
    return counter.get_total_flops()


def routings(lab: Lab, changes: Changes) -> Any:
    """How often the router of the first layer runs in a training step, and in which dtype."""
    model = lab.model(changes)
    (router, *_) = (layer.router for layer in moe_layers(model).values())
    seen: list[torch.dtype] = []
    router.register_forward_hook(lambda _module, _arguments, routed: seen.append(routed.choice.gates.dtype))
    model.loss(torch.arange(8)[None], torch.arange(8)[None], 1.0).backward()
    return seen


def kept(lab: Lab, changes: Changes) -> Any:
    """Bytes that a training step keeps for its backward pass."""
    model, storages = lab.model(changes), dict[int, int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.loss(torch.arange(8)[None], torch.arange(8)[None], 1.0)
    assert loss.requires_grad
    return sum(storages.values())


def expert_implementation(lab: Lab, changes: Changes) -> Any:
    """What the experts are calculated with."""
    seen: list[str] = []
    calculate = experts_module.expert_mlp

    def note(*arguments: Any, implementation: Any, **more: Any) -> torch.Tensor:
        seen.append(implementation)
        return calculate(*arguments, implementation=implementation, **more)

    with lab.monkeypatch.context() as patch:
        patch.setattr(experts_module, "expert_mlp", note)
        training_loss(lab, changes)
    return seen


def logged_names(lab: Lab, changes: Changes) -> Any:
    return {name for row in lab.metrics(changes) for name in row}


def attention_backends(lab: Lab, changes: Changes) -> Any:
    return {kind: decision.backend for kind, decision in lab.model(changes).attention_decisions.items()}


def hopper_backend(lab: Lab, changes: Changes) -> Any:
    """What the dispatcher takes on a card that can run every backend."""
    call = AttentionCall(
        device="cuda",
        capability=(9, 0),
        dtype="bf16",
        batch=1,
        heads=8,
        groups=8,
        head_dim=64,
        queries=128,
        keys=128,
        any_length=False,
        causal=True,
        dropout=0.0,
        training=True,
        deterministic=False,
    )
    stack = gpt(lab.root(changes))
    return choose(
        call,
        use_flash_attention=stack.use_flash_attention,
        attention_backend=stack.attention_backend,
        transformer_engine=stack.transformer_engine,
        flags=AttentionFlags(),
        installed=Installed(torch=(2, 13), cudnn=91900, triton=(3, 6), te=(2, 20), flash_attn=(2, 8, 3)),
    ).backend


def softmax_fusion(lab: Lab, changes: Changes) -> Any:
    """Whether the explicit attention of a layer may take the fused softmax."""
    layer = lab.model(changes).decoder.layers[0]
    assert isinstance(layer, Layer)
    function = layer.attention.backends["training"]
    assert isinstance(function, UnfusedAttention)
    return function.masked_softmax_fusion


def attention_masks(lab: Lab, changes: Changes) -> Any:
    """Bytes of the masks that the dispatcher knows of."""
    return {kind: decision.mask_bytes for kind, decision in lab.model(changes).attention_decisions.items()}


def optimizer_groups(lab: Lab, changes: Changes) -> Any:
    root = lab.root(changes)
    groups = build_optimizer(root, lab.model(changes), plan_precision(root.trainer, True, CPU)).param_groups
    return [(group["names"], group["weight_decay"]) for group in groups]


def plan(lab: Lab, changes: Changes) -> Any:
    root = lab.root(changes)
    return plan_precision(root.trainer, root.model.megatron_amp_O2, torch.device("cuda"))


def first_batch(lab: Lab, changes: Changes, samples: int = 2) -> Any:
    return build_data(lab.root(changes)).train.batch(0, samples).tokens.tolist()


def of_task(lab: Lab, changes: Changes) -> RootBlock:
    """A configuration of T5, or of the family that the task is for, with what its data need."""
    name = changes.get(DATA + "dataset_type", "t5")
    pairs = lab.folder / "pairs.jsonl"
    texts = (json.dumps({"input": f"read {n}", "output": f"write {n}", "other": f"{n}"}) + "\n" for n in range(40))
    pairs.write_text("".join(texts))
    family, length = ("t5", "seq_length")
    if name in ("gpt", "sft", "bert"):
        family, length = ("bert" if name == "bert" else "gpt", "encoder_seq_length")
    source, path = ("jsonl", pairs) if name in ("seq2seq", "sft") else ("text", documents(lab)[DATA + "path"])
    document: dict[str, Any] = {
        "model": {"family": family, length: 24, "data": {"data_impl": source, "path": str(path)}}
    }
    for key, value in changes.items():
        paths.put(document, key, deepcopy(value))
    return RootBlock.model_validate({**document, "trainer": {"limit_val_batches": 0}})


def task_batch(lab: Lab, changes: Changes) -> Any:
    """Names, shapes and values of the first batch of a task."""
    built = build_data(of_task(lab, changes))
    batch = built.train.batch(0, 8)
    tensors = batch if isinstance(batch, dict) else {"tokens": batch.tokens, "labels": batch.labels}
    return built.vocab_size, [(name, fingerprint(tensor)) for name, tensor in tensors.items()]


def data(lab: Lab, changes: Changes) -> Any:
    built = build_data(lab.root(changes))
    return built.description, built.vocab_size, type(built.train).__name__


def documents(lab: Lab) -> Changes:
    """The files of a folder, each of which is a document."""
    folder = lab.folder / "documents"
    folder.mkdir(exist_ok=True)
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"This is document {number}.")
    return {**TEXT, DATA + "path": str(folder)}


def counted_labels(lab: Lab, changes: Changes) -> Any:
    """How many labels count in the files of a folder."""
    built = build_data(lab.root({**documents(lab), **changes}))
    return int((built.train.batch(0, 20).labels != IGNORED_LABEL).sum())


def trained_on_documents(lab: Lab, changes: Changes) -> Any:
    return trained(lab, {**documents(lab), **changes})


def trained(lab: Lab, changes: Changes) -> Any:
    return {name: fingerprint(value) for name, value in lab.run(changes).model.named_parameters()}


def stepped(lab: Lab, changes: Changes) -> Any:
    """Weights after some steps of optimizer and schedule, without the run around them."""
    root, model = lab.root(changes), lab.model(changes)
    optimizer = build_optimizer(root, model, plan_precision(root.trainer, root.model.megatron_amp_O2, CPU))
    rate = build_schedule(root.model.optim, root.trainer.max_steps)
    tokens = torch.arange(8).repeat(2, 1)
    for step in range(3):
        model.loss(tokens, tokens, 1.0).backward()
        optimizer.set_lr(rate(step))
        optimizer.step()
    return {name: fingerprint(value) for name, value in model.named_parameters()}


def learning_rates(lab: Lab, changes: Changes) -> Any:
    return [line["lr"] for line in lab.metrics(changes)]


def rates(lab: Lab, changes: Changes) -> Any:
    """Learning rates as the schedule has them, of which a run reads them."""
    root = lab.root(changes)
    return [build_schedule(root.model.optim, root.trainer.max_steps)(step) for step in range(4)]


def reported_steps(lab: Lab, changes: Changes) -> Any:
    return [line["step"] for line in lab.metrics(changes) if "loss" in line]


def validated_steps(lab: Lab, changes: Changes) -> Any:
    return [line["step"] for line in lab.metrics(changes) if "val_loss" in line]


def consumed(lab: Lab, changes: Changes) -> Any:
    return [line["consumed_samples"] for line in lab.metrics(changes)]


def validated_tokens(lab: Lab, changes: Changes) -> Any:
    validation = lab.run(changes).validation
    return None if validation is None else validation.tokens


def files(lab: Lab, changes: Changes) -> Any:
    return {path.name for path in lab.run(changes).directory.iterdir()}


def checkpoints(lab: Lab, changes: Changes) -> Any:
    changes = {"exp_manager.create_checkpoint_callback": True, **changes}
    return sorted(path.name for path in (lab.run(changes).directory / "checkpoints").glob("*"))


def place(lab: Lab, changes: Changes) -> Any:
    """The run directory of a run that is not told it, as seen from where the run was started."""
    lab.runs += 1
    here = lab.folder / f"here-{lab.runs}"
    here.mkdir()
    lab.monkeypatch.chdir(here)
    lab.monkeypatch.setattr("time.strftime", lambda *_: "now")
    untold = {MANAGER + "explicit_log_dir": None, MANAGER + "resume_if_exists": False, TRAINER + "max_steps": 1}
    document = lab.document({**untold, **changes})
    result = run_training(RunConfig(RootBlock.model_validate(document), document=document))
    return result.directory.relative_to(here).parts


def panel(lab: Lab, changes: Changes) -> Any:
    lab.monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the output for a terminal
    return "╭" in lab.printed(changes)


def summary(lab: Lab, changes: Changes) -> Any:
    return "token_embedding" in lab.printed(changes)


def first_validation(lab: Lab, changes: Changes) -> Any:
    return "before the first step" in lab.printed(changes)


def stopped_by(lab: Lab, changes: Changes) -> Any:
    return lab.run(changes).stopped_by


def checks_said(lab: Lab, changes: Changes) -> Any:
    return "early stopping: val_loss" in lab.printed(changes)


def validation_losses(lab: Lab, changes: Changes) -> Any:
    return [line["val_loss"] for line in lab.metrics(changes) if "val_loss" in line]


def algorithms(lab: Lab, changes: Changes) -> Any:
    """What is in force while the data are read, that is within a run."""
    seen: list[tuple[bool, bool]] = []
    real = run.build_data

    def build(root: RootBlock) -> Any:
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        seen.append((torch.are_deterministic_algorithms_enabled(), warns))
        return real(root)

    lab.monkeypatch.setattr(run, "build_data", build)
    lab.run(changes)
    lab.monkeypatch.setattr(run, "build_data", real)
    assert not torch.are_deterministic_algorithms_enabled()
    return seen


def profiles(lab: Lab, changes: Changes) -> Any:
    return sorted(path.name for path in (lab.run(changes).directory / "profile").glob("*"))


def accumulation(lab: Lab, changes: Changes) -> Any:
    """Samples in each forward pass of a step."""
    sizes: list[int] = []
    real = GPT.loss

    def loss(self: GPT, tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(len(tokens))
        return real(self, tokens, *rest)

    lab.monkeypatch.setattr(GPT, "loss", loss)
    lab.run({"trainer.max_steps": 1, **changes})
    lab.monkeypatch.setattr(GPT, "loss", real)
    return sizes


def workers(lab: Lab, changes: Changes) -> Any:
    """How many processes torch's loader is asked for; none: a thread prepares the batches."""
    asked: list[int] = []

    class Loader:
        def __init__(self, dataset: Any, *, sampler: range, num_workers: int, **_: Any) -> None:
            asked.append(num_workers)
            self.batches = (dataset[position] for position in sampler)

        def __iter__(self) -> Iterator[Any]:
            return self.batches

    lab.monkeypatch.setattr(feed, "DataLoader", Loader)
    lab.run(changes)
    return asked


def compiled(lab: Lab, changes: Changes) -> Any:
    layer: Any = lab.model(changes).decoder.layers[0]
    return layer._compiled_call_impl is not None


def layout(lab: Lab, changes: Changes) -> Any:
    keys = lab.root(changes).model
    return plan_layout(
        4,
        optimizer=keys.optim.name,
        fsdp=keys.fsdp,
        strategy=keys.fsdp_sharding_strategy,
        shard_size=keys.fsdp_shard_size,
    )


def summed_in(lab: Lab, changes: Changes) -> Any:
    return reduce_dtype(lab.root(changes), torch.bfloat16)


def norm_weight(lab: Lab, changes: Changes) -> Any:
    norm = lab.model(changes).decoder.final_norm
    assert norm is not None
    return type(norm).__name__, norm.weight[0].item()


def warnings(lab: Lab, changes: Changes) -> Any:
    found = load("data=mock", *(f"{path}={value}" for path, value in changes.items())).findings
    return [finding.keys[0] for finding in found]


# ---------------------------------------------------------------- keys


@dataclass(frozen=True)
class Row:
    """`key` changes `observable` when it goes from its value in the base to `value`, with `others` held fixed."""

    key: str
    value: Any
    observable: Callable[[Lab, Changes], Any]
    others: Changes | None = None
    before: Any = ...

    def __str__(self) -> str:
        return f"{self.key}-{self.observable.__name__}"


MOE = {MODEL + "num_moe_experts": 4, MODEL + "num_layers": 2}
LIMITED = {**MOE, MODEL + "moe_expert_capacity_factor": 0.5}
ROOMY = {**MOE, MODEL + "num_layers": 1, MODEL + "moe_expert_capacity_factor": 1.5}
ONE_BY_ONE = {**MOE, MODEL + "moe_grouped_gemm": False}  # interpreted kernels would take most of a run
SIGMOID = {**ONE_BY_ONE, MODEL + "moe_router_score_function": "sigmoid"}
NUDGED = {**SIGMOID, MODEL + "moe_router_enable_expert_bias": True}
ROPE = {"model.position_embedding_type": "rope"}
STRETCHED = {**ROPE, "model.rotary_scaling": "llama3", "model.rotary_original_length": 8}
YARN = {**ROPE, "model.rotary_scaling": "yarn", "model.rotary_original_length": 1000}
ALIBI = {"model.position_embedding_type": "alibi"}
BUCKETS = {"model.position_embedding_type": "relative", "model.relative_attention_num_buckets": 4}
VALIDATES = {"trainer.limit_val_batches": 1, "trainer.val_check_interval": 2}
TEXT = {"model.data.data_impl": "text"}
NGRAMS = {DATA + "geometric_dist": True, DATA + "masked_lm_prob": 0.4}
PIECES = {DATA + "respect_document_boundaries": True, "model.seq_length": 64}
PREFIX = {DATA + "dataset_type": "t5_prefix_lm"}
SAVES = {"exp_manager.create_checkpoint_callback": True, CALLBACK + "every_n_train_steps": 1}

SGD, ADAFACTOR, MUON = ({OPTIM + "name": name} for name in ("sgd", "adafactor", "muon"))

STOPPING = "exp_manager.early_stopping_callback_params."
EVERY = {**VALIDATES, "trainer.val_check_interval": 1, STOPPING + "patience": 1, STOPPING + "min_delta": 9.0}
STOPS = {**EVERY, "exp_manager.create_early_stopping_callback": True}
AVERAGES = {**VALIDATES, "exp_manager.ema.enable": True, "exp_manager.ema.decay": 0.9}

RECOMPUTE = MODEL + "activations_checkpoint_"
DEEP = {MODEL + "num_layers": 3, MODEL + "attention_backend": "unfused"}
WHOLE = {**DEEP, RECOMPUTE + "granularity": "full", RECOMPUTE + "method": "uniform", RECOMPUTE + "num_layers": 1}

ROWS = [
    Row(RECOMPUTE + "granularity", None, kept, WHOLE, before="full"),
    Row(RECOMPUTE + "num_layers", 2, kept, WHOLE, before=1),
    Row(RECOMPUTE + "num_layers", 2, kept, {**WHOLE, RECOMPUTE + "method": "block"}, before=1),
    Row(RECOMPUTE + "modules", ["norm"], kept, DEEP),
    Row(RECOMPUTE + "modules", ["mlp_activation"], kept, DEEP),
    Row(RECOMPUTE + "modules", ["core_attention"], kept, DEEP),
    Row(RECOMPUTE + "modules", ["moe"], kept, {**DEEP, **MOE}),
    Row(MODEL + "num_moe_experts", 4, shapes),
    Row(MODEL + "moe_router_topk", 3, logits, MOE),
    Row(MODEL + "moe_aux_loss_coeff", 0.5, gradients, MOE),
    Row(MODEL + "moe_z_loss_coeff", 0.5, gradients, MOE),
    Row(MODEL + "moe_input_jitter_eps", 0.5, gradients, MOE),
    Row(MODEL + "moe_token_dropping", True, flops, ROOMY),
    Row(MODEL + "moe_per_layer_logging", True, logged_names, ONE_BY_ONE),
    Row(MODEL + "moe_expert_capacity_factor", 0.5, logits, MOE),
    Row(MODEL + "moe_pad_expert_input_to_capacity", True, flops, ROOMY),
    Row(MODEL + "moe_layer_recompute", True, routings, MOE),
    Row(MODEL + "moe_grouped_gemm", False, expert_implementation, MOE),
    Row(MODEL + "moe_router_pre_softmax", True, logits, MOE),
    Row(MODEL + "moe_ffn_hidden_size", 8, shapes, MOE),
    Row(MODEL + "moe_layer_freq", [0, 1], shapes, MOE),
    Row(MODEL + "moe_frequency", 2, shapes, MOE),
    Row(MODEL + "moe_dropout", 0.5, gradients, MOE),
    Row(MODEL + "moe_shared_expert_intermediate_size", 8, shapes, MOE),
    Row(MODEL + "moe_router_enable_expert_bias", True, trained, SIGMOID),
    Row(MODEL + "moe_router_bias_update_rate", 0.5, trained, NUDGED),
    Row(MODEL + "moe_router_topk_scaling_factor", 2.0, logits, MOE),
    Row(MODEL + "moe_router_num_groups", 2, logits, {**MOE, MODEL + "moe_router_group_topk": 1}),
    Row(MODEL + "moe_router_group_topk", 1, logits, {**MOE, MODEL + "moe_router_num_groups": 2}),
    Row("name", "other", place),
    Row(TRAINER + "max_steps", 2, reported_steps),
    Row(TRAINER + "max_steps", 3, learning_rates),
    Row(TRAINER + "max_time", "00:00:00:00", stopped_by),
    Row(TRAINER + "log_every_n_steps", 2, reported_steps),
    Row(TRAINER + "val_check_interval", 1, validated_steps, VALIDATES),
    Row(TRAINER + "val_check_interval", 1, checkpoints, {CALLBACK + "save_top_k": -1}),
    Row(TRAINER + "limit_val_batches", 2, validated_tokens, VALIDATES),
    Row(TRAINER + "limit_val_batches", 0.05, validated_tokens, VALIDATES),
    Row(TRAINER + "limit_val_batches", 0, validated_tokens, VALIDATES),
    # 5 of the 1,024 samples, in batches of 4
    Row(DATA + "validation_drop_last", True, validated_tokens, {**VALIDATES, TRAINER + "limit_val_batches": 0.005}),
    Row(TRAINER + "gradient_clip_val", 1e-3, trained),
    Row(TRAINER + "gradient_clip_val", None, trained, before=1e-3),
    Row(TRAINER + "enable_progress_bar", False, panel),
    Row(TRAINER + "enable_model_summary", True, summary, before=False),
    Row(TRAINER + "num_sanity_val_steps", 1, first_validation, VALIDATES),
    Row(MANAGER + "exp_dir", "elsewhere", place),
    Row(MANAGER + "explicit_log_dir", "here", place),
    Row(MANAGER + "name", "other", place),
    Row(MANAGER + "version", 7, place),
    Row(MANAGER + "version", "seven", place),
    Row(MANAGER + "use_datetime_version", False, place),
    Row(MANAGER + "resume_if_exists", True, place, before=False),
    Row(MANAGER + "create_checkpoint_callback", True, files),
    Row(CALLBACK + "save_top_k", 1, checkpoints, SAVES),
    Row(CALLBACK + "save_top_k", -1, checkpoints, SAVES),
    Row(CALLBACK + "save_last", False, checkpoints, {CALLBACK + "save_top_k": 0}),
    Row(CALLBACK + "every_n_train_steps", 1, checkpoints),
    Row(MANAGER + "create_tensorboard_logger", True, files),
    Row(MANAGER + "create_csv_logger", True, files),
    Row(MANAGER + "max_time_per_run", "00:00:00:00", stopped_by),
    Row(MANAGER + "create_early_stopping_callback", True, stopped_by, EVERY),
    Row(STOPPING + "min_delta", 0.0, stopped_by, STOPS, before=9.0),
    Row(STOPPING + "patience", 9, stopped_by, STOPS),
    Row(STOPPING + "verbose", False, checks_said, STOPS),
    Row(STOPPING + "stopping_threshold", 99.0, stopped_by, {**STOPS, STOPPING + "patience": 9}),
    Row(STOPPING + "divergence_threshold", 0.1, stopped_by, {**STOPS, STOPPING + "patience": 9}),
    Row(MANAGER + "ema.enable", True, validation_losses, AVERAGES, before=False),
    Row(MANAGER + "ema.decay", 0.1, validation_losses, AVERAGES),
    Row(MANAGER + "ema.validate_original_weights", True, validation_losses, AVERAGES),
    Row(MANAGER + "ema.every_n_steps", 2, validation_losses, AVERAGES),
    Row(TRAINER + "overfit_batches", 1, trained),
    Row(TRAINER + "fast_dev_run", 2, reported_steps),
    Row(TRAINER + "deterministic", True, algorithms),
    Row(TRAINER + "deterministic", "warn", algorithms),
    Row(TRAINER + "profile_steps", [2, 2], profiles, {TRAINER + "profiler": "pytorch"}, before=[1, 1]),
    Row(MODEL + "num_layers", 2, shapes),
    Row(MODEL + "hidden_size", 32, shapes),
    Row(MODEL + "ffn_hidden_size", 64, shapes),
    Row(MODEL + "num_attention_heads", 4, logits),
    Row(MODEL + "kv_channels", 4, shapes),
    Row(MODEL + "num_query_groups", 1, shapes),
    Row(MODEL + "layernorm_epsilon", 0.1, logits),
    Row(MODEL + "layernorm_zero_centered_gamma", True, norm_weight),
    Row(MODEL + "layernorm_zero_centered_gamma", True, norm_weight, {MODEL + "normalization": "rmsnorm"}),
    Row(MODEL + "openai_gelu", True, logits),
    Row(MODEL + "openai_gelu", True, logits, {MODEL + "activation": "geglu"}),
    Row(MODEL + "bias", False, shapes),
    Row(MODEL + "qkv_bias", True, shapes, {MODEL + "bias": False}),
    Row(MODEL + "hidden_dropout", 0.2, training_loss),
    Row(MODEL + "attention_dropout", 0.2, training_loss),
    Row(MODEL + "ffn_dropout", 0.2, training_loss),
    Row(MODEL + "init_method_std", 0.2, weights),
    Row(MODEL + "use_scaled_init_method", False, weights),
    Row(MODEL + "rotary_percentage", 0.5, logits, ROPE),
    Row(MODEL + "rotary_base", 100.0, logits, ROPE),
    Row(MODEL + "rotary_interleaved", True, logits, ROPE),
    Row(MODEL + "seq_len_interpolation_factor", 2.0, logits, ROPE),
    Row(MODEL + "scale_positional_embedding", True, logits, {**ROPE, MODEL + "rotary_original_length": 8}),
    Row(MODEL + "rotary_scaling_factor", 2.0, logits, STRETCHED),
    Row(MODEL + "rotary_scaling_factor", 2.0, logits, YARN),
    Row(MODEL + "rotary_original_length", 16, logits, STRETCHED),
    Row(MODEL + "rotary_original_length", 16, logits, YARN, before=1000),
    Row(MODEL + "rotary_low_turns", 0.1, logits, STRETCHED),
    Row(MODEL + "rotary_low_turns", 0.1, logits, YARN),
    Row(MODEL + "rotary_high_turns", 2.0, logits, STRETCHED),
    Row(MODEL + "rotary_high_turns", 2.0, logits, YARN),
    Row(MODEL + "num_attention_heads_alibi", 1, logits, ALIBI),
    Row(MODEL + "relative_attention_num_buckets", 8, shapes, BUCKETS),
    Row(MODEL + "relative_attention_max_distance", 4, logits, BUCKETS),
    Row(MODEL + "window_size", [1, 0], logits),
    Row(MODEL + "attn_logit_softcapping", 0.5, logits),
    Row(MODEL + "logits_soft_cap", 0.5, logits),
    Row(MODEL + "logits_soft_cap", 0.5, training_loss),
    Row(MODEL + "apply_embedding_scaling", True, logits),
    Row(MODEL + "qk_layernorm", True, shapes),
    Row(MODEL + "headscale", True, shapes),
    Row(MODEL + "apply_query_key_layer_scaling", True, warnings, before=False),
    Row(MODEL + "normalize_attention_scores", False, logits),
    Row(MODEL + "use_flash_attention", False, attention_backends),
    Row(MODEL + "transformer_engine", True, hopper_backend),
    Row(MODEL + "masked_softmax_fusion", False, softmax_fusion, {MODEL + "attention_backend": "unfused"}),
    Row(MODEL + "encoder_seq_length", 4, first_batch),
    Row(MODEL + "encoder_seq_length", 4, shapes),
    Row(MODEL + "max_position_embeddings", 32, shapes),
    Row(MODEL + "make_vocab_size_divisible_by", 7, shapes),
    Row(MODEL + "override_vocab_size", 500, shapes),
    Row(MODEL + "override_vocab_size", 260, first_batch),
    Row(MODEL + "share_embeddings_and_output_weights", False, shapes),
    Row(MODEL + "embedding_dropout", 0.2, training_loss),
    Row(MODEL + "embedding_dropout", 0.0, training_loss, {MODEL + "hidden_dropout": 0.2}),
    Row(MODEL + "embedding_init_method_std", 0.1, weights),
    Row(MODEL + "label_smoothing", 0.2, training_loss),
    Row(MODEL + "seed", 5, weights),
    Row(MODEL + "seed", 5, first_batch),
    Row(MODEL + "seed", 5, first_batch, TEXT),
    Row(MODEL + "compile", True, compiled),
    Row(MODEL + "micro_batch_size", 4, accumulation),
    Row(MODEL + "global_batch_size", 2, accumulation),
    Row(MODEL + "global_batch_size", 8, consumed),
    Row(MODEL + "megatron_amp_O2", False, plan, {TRAINER + "precision": "bf16"}),
    Row(MODEL + "do_layer_norm_weight_decay", True, optimizer_groups),
    Row(DATA + "splits_string", "500,250,250", data, TEXT),
    Row(DATA + "eod_mask_loss", True, counted_labels, {MODEL + "encoder_seq_length": 4}),
    Row(DATA + "reset_position_ids", True, trained_on_documents),
    Row(DATA + "reset_attention_mask", True, trained_on_documents),
    Row(DATA + "reset_attention_mask", True, attention_masks, {MODEL + "attention_backend": "unfused"}),
    Row(DATA + "num_workers", 1, workers),
    Row(DATA + "seq_length_dec", 32, task_batch),
    Row(DATA + "seq_length_dec", 16, task_batch, PREFIX),
    Row(DATA + "masked_lm_prob", 0.3, task_batch),
    Row(DATA + "masked_lm_prob", 0.3, task_batch, NGRAMS),
    Row(DATA + "masked_lm_prob", 0.3, task_batch, {DATA + "dataset_type": "bert"}),
    Row(DATA + "mean_ngram_size", 1.0, task_batch),
    Row(DATA + "mean_ngram_size", 1.0, task_batch, NGRAMS),
    Row(DATA + "geometric_dist", True, task_batch),
    Row(DATA + "geometric_dist", False, task_batch, {**NGRAMS, DATA + "seq_length_dec": 32}),
    Row(DATA + "geometric_dist", True, task_batch, {DATA + "dataset_type": "bert"}),
    Row(DATA + "max_ngram_size", 1, task_batch, NGRAMS),
    Row(DATA + "favor_longer_ngrams", True, task_batch, {DATA + "geometric_dist": False, DATA + "masked_lm_prob": 0.4}),
    Row(DATA + "whole_word_masking", False, task_batch, NGRAMS),
    Row(DATA + "respect_document_boundaries", True, task_batch),
    Row(DATA + "short_seq_prob", 0.5, task_batch, PIECES),
    Row(DATA + "packed_sequence", True, task_batch, PIECES),
    Row(DATA + "packed_sequence", True, task_batch, {DATA + "dataset_type": "seq2seq"}),
    Row(DATA + "context_key", "other", task_batch, {DATA + "dataset_type": "seq2seq"}),
    Row(DATA + "label_key", "other", task_batch, {DATA + "dataset_type": "seq2seq"}),
    Row(DATA + "reset_attention_mask", True, task_batch, {DATA + "dataset_type": "bert"}),
    Row(DATA + "reset_position_ids", True, task_batch, {DATA + "dataset_type": "bert"}),
    Row(TOKENIZER + "num_sentinel_tokens", 20, task_batch),
    Row(TOKENIZER + "num_sentinel_tokens", 20, task_batch, {DATA + "dataset_type": "bert"}),
    Row(OPTIM + "lr", 1e-3, learning_rates),
    Row(OPTIM + "lr", 1e-3, trained),
    Row(OPTIM + "weight_decay", 0.5, optimizer_groups),
    Row(OPTIM + "weight_decay", 0.5, stepped),
    Row(OPTIM + "betas", [0.5, 0.98], stepped),
    Row(OPTIM + "betas", [0.9, 0.5], stepped),
    Row(OPTIM + "eps", 1e-2, stepped),
    Row(SCHED + "warmup_steps", 2, rates),
    Row(SCHED + "warmup_ratio", 0.5, rates),
    Row(SCHED + "constant_steps", 2, rates),
    Row(SCHED + "constant_ratio", 0.5, rates),
    Row(SCHED + "min_lr", 5e-3, rates),
    Row(SCHED + "min_lr", 5e-3, rates, {SCHED + "name": "WarmupAnnealing"}),
    Row(SCHED + "max_steps", 8, rates),
    Row(OPTIM + "weight_decay", 0.5, stepped, SGD),
    Row(OPTIM + "weight_decay", 0.5, stepped, ADAFACTOR),
    Row(OPTIM + "weight_decay", 0.5, stepped, MUON),
    Row(OPTIM + "momentum", 0.9, stepped, SGD),
    Row(OPTIM + "momentum", 0.5, stepped, MUON),
    Row(OPTIM + "nesterov", True, stepped, {**SGD, OPTIM + "momentum": 0.5}),
    Row(OPTIM + "nesterov", False, stepped, MUON),
    Row(OPTIM + "betas", [0.5, 0.98], stepped, MUON),
    Row(OPTIM + "eps", 1e-2, stepped, MUON),
    Row(OPTIM + "eps", [1e-3, 1e-3], stepped, ADAFACTOR),
    Row(OPTIM + "eps", [1e-30, 1.0], stepped, ADAFACTOR),
    Row(OPTIM + "clip_threshold", 0.1, stepped, ADAFACTOR),
    Row(OPTIM + "decay_rate", -0.1, stepped, ADAFACTOR),
    Row(OPTIM + "beta1", 0.5, stepped, ADAFACTOR),
    Row(OPTIM + "scale_parameter", False, stepped, ADAFACTOR),
    Row(OPTIM + "scale_parameter", True, stepped),
    Row(OPTIM + "relative_step", True, rates, ADAFACTOR),
    Row(OPTIM + "relative_step", True, stepped, ADAFACTOR),
    Row(OPTIM + "warmup_init", True, rates, {**ADAFACTOR, OPTIM + "relative_step": True}),
    Row(OPTIM + "ns_steps", 2, stepped, MUON),
    Row(SCHED + "hold_steps", 2, rates, {SCHED + "name": "WarmupHoldAnnealLinear"}),
    Row(SCHED + "hold_ratio", 0.5, rates, {SCHED + "name": "PolynomialHoldDecayAnnealing"}),
    Row(SCHED + "power", 2.0, rates, {SCHED + "name": "PolynomialDecayAnnealing"}),
    Row(
        SCHED + "decay_rate",
        1.0,
        rates,
        {SCHED + "name": "NoamHoldAnnealing", SCHED + "warmup_steps": 2},
    ),
    Row(SCHED + "d_model", 4, rates, {SCHED + "name": "NoamAnnealing"}, before=16),
]


BEFORE: dict[str, Any] = {}
"""What was seen of a configuration that rows have in common."""


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_key_changes_what_it_says(row: Row, lab: Lab) -> None:
    others = dict(row.others or {})
    if row.observable in (data, first_batch) and others == TEXT:
        others[DATA + "path"] = str(lab.text)
    if row.before is not ...:
        others[row.key] = row.before
    after = row.observable(lab, {**others, row.key: row.value})
    same = f"{row.observable.__name__} {others}"
    if same not in BEFORE:
        BEFORE[same] = row.observable(lab, others)
    assert after != BEFORE[same]


# ---------------------------------------------------------------- closed lists of values


def device(lab: Lab, changes: Changes) -> Any:
    """On a machine that has everything."""
    lab.monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    lab.monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    return choose_device(lab.root(changes)).type


def arithmetic(lab: Lab, changes: Changes) -> Any:
    chosen = plan(lab, changes)
    return chosen.weights, chosen.main_weights, chosen.autocast


def activation(lab: Lab, changes: Changes) -> Any:
    return shapes(lab, changes), logits(lab, changes)


def normalization(lab: Lab, changes: Changes) -> Any:
    return shapes(lab, changes), norm_weight(lab, changes)


def tokens_of_text(lab: Lab, changes: Changes) -> Any:
    return first_batch(lab, {**TEXT, DATA + "path": str(lab.text), **changes})


def tokenizer_files(lab: Lab) -> Changes:
    """GPT-2's two files with few tokens, a tokenizer.json with fewer, and keys that point at them."""
    folder = lab.folder / "tokenizer"
    folder.mkdir(exist_ok=True)
    vocabulary = {character: number for number, character in enumerate(byte_alphabet())}
    vocabulary |= {"to": 256, "<|endoftext|>": 257, "be": 258}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\nt o\nb e\n")
    (folder / "fewer.txt").write_text("t o\n")
    (folder / "tokenizer.json").write_text(gpt2_definition(json.dumps(vocabulary), ""))
    return {
        TOKENIZER + "vocab_file": str(folder / "vocab.json"),
        TOKENIZER + "merge_file": str(folder / "merges.txt"),
        TOKENIZER + "type": str(folder / "tokenizer.json"),
    }


def tokens_of_file(lab: Lab, changes: Changes) -> Any:
    """Each library with its own file; what the sentencepiece extra gives is stood in for."""
    model = lab.folder / "tokenizer.model"
    model.write_bytes(b"a model")
    stand_in = CharTokenizer.of_texts([lab.text.read_text() + "\0"])
    lab.monkeypatch.setattr(tokenizer_sentencepiece, "define", lambda *_: stand_in)
    files = tokenizer_files(lab)
    if changes[TOKENIZER + "library"] == "sentencepiece":
        files = {TOKENIZER + "model": str(model)}
    return tokens_of_text(lab, {**files, **changes})


def optimizer(lab: Lab, changes: Changes) -> Any:
    return stepped(lab, changes), optimizer_groups(lab, changes)


def monitored(lab: Lab, changes: Changes) -> Any:
    """By what checkpoints are ranked."""
    params = lab.root(changes).exp_manager.checkpoint_callback_params
    return logged_name(params.monitor), params.mode


def watched(lab: Lab, changes: Changes) -> Any:
    params = lab.root(changes).exp_manager.early_stopping_callback_params
    return EarlyStopping(params, Patience.model_validate({})).metric, EarlyStopping(
        params, Patience.model_validate({"best": 1.0})
    ).check(2.0)[1]


@dataclass(frozen=True)
class Values:
    """A closed list: its values give different observables, but for aliases, which give that of what they stand for."""

    observable: Callable[[Lab, Changes], Any]
    aliases: dict[Any, Any]
    others: Changes | None = None


OTHER_NAMES = {"reduced_train_loss": "loss", "train_loss": "loss", "validation_loss": "val_loss"}
VALUES = {
    TRAINER + "accelerator": Values(device, {"gpu": "cuda", "auto": "cuda"}),
    "model.fsdp_sharding_strategy": Values(layout, {}, {MODEL + "fsdp": True, MODEL + "fsdp_shard_size": 2}),
    "model.fsdp_grad_reduce_dtype": Values(summed_in, {"32": 32, "fp32": 32}),
    TRAINER + "precision": Values(
        arithmetic,
        {"64": 64, "64-true": 64, "32": 32, "32-true": 32, "bf16-mixed": "bf16"},
        {MODEL + "megatron_amp_O2": False},
    ),
    CALLBACK + "monitor": Values(monitored, OTHER_NAMES),
    CALLBACK + "mode": Values(monitored, {}),
    STOPPING + "monitor": Values(watched, OTHER_NAMES),
    STOPPING + "mode": Values(watched, {}),
    TRAINER + "profiler": Values(profiles, {}, {TRAINER + "profile_steps": [1, 2]}),
    MODEL + "family": Values(shapes_of_family, {}),
    RECOMPUTE + "granularity": Values(kept, {}, WHOLE),
    RECOMPUTE + "method": Values(kept, {}, WHOLE),
    MODEL + "transformer_block_type": Values(logits, {}),
    MODEL + "normalization": Values(normalization, {}),
    MODEL + "activation": Values(activation, {f"fast-{name}": name for name in ("geglu", "swiglu", "reglu")}),
    MODEL + "position_embedding_type": Values(logits, {}),
    MODEL + "moe_router_load_balancing_type": Values(gradients, {}, {**MOE, MODEL + "moe_aux_loss_coeff": 0.5}),
    MODEL + "moe_token_dispatcher_type": Values(  # each process has all experts; `test_config_moe.py` has what is said
        logits, dict.fromkeys(("alltoall", "alltoall_seq", "flex"), "allgather"), MOE
    ),
    MODEL + "moe_token_drop_policy": Values(logits, {}, LIMITED),
    MODEL + "moe_router_dtype": Values(routings, {}, MOE),
    MODEL + "moe_router_score_function": Values(logits, {}, MOE),
    MODEL + "rotary_scaling": Values(logits, {}, {**ROPE, MODEL + "rotary_original_length": 8}),
    MODEL + "attention_backend": Values(
        hopper_backend, {"auto": "sdpa_cudnn", "fused": "sdpa_cudnn", "flash": "triton"}
    ),
    MODEL + "tokenizer.library": Values(tokens_of_file, {}),
    DATA + "dataset_type": Values(task_batch, {}),
    OPTIM + "name": Values(
        optimizer,
        dict.fromkeys(
            ("fused_adam", "distributed_fused_adam", "megatron_fused_adam", "mcore_distributed_optim"), "adamw"
        ),
    ),
    OPTIM + "adjust_lr_fn": Values(stepped, {}, {OPTIM + "name": "muon"}),
    SCHED + "name": Values(
        rates,
        {"WarmupHoldPolicy": "WarmupPolicy"},
        {
            SCHED + "warmup_steps": 1,
            SCHED + "hold_steps": 1,
            SCHED + "constant_steps": 2,
            SCHED + "power": 1.5,
            SCHED + "d_model": 16,
            SCHED + "min_lr": 1e-4,
            SCHED + "max_steps": 8,
        },
    ),
}


def canonical(values: Values, value: Any) -> Any:
    return values.aliases.get(value, value)


@pytest.mark.parametrize("key", VALUES)
def test_each_value_of_a_closed_list_is_accepted_and_distinct(key: str, lab: Lab) -> None:
    entry = VALUES[key]
    observed = [
        (canonical(entry, value), entry.observable(lab, {**(entry.others or {}), key: value}))
        for value in schema_keys()[key].choices
    ]
    for number, (name, seen) in enumerate(observed):
        for other_name, other in observed[:number]:
            assert (seen == other) == (name == other_name), (name, other_name)


@pytest.mark.parametrize("key", VALUES)
def test_no_other_value_is_accepted(key: str) -> None:
    assert list(problems(f"{key}=word")) == [key]


def test_main_weights_set_bf16_apart(lab: Lab) -> None:
    precisions = ("bf16", "bf16-mixed", "bf16-true", 32)
    assert len({arithmetic(lab, {TRAINER + "precision": precision}) for precision in precisions}) == 4


def test_every_backend_of_a_cpu_gives_the_same_logits(lab: Lab) -> None:
    def of(backend: str) -> torch.Tensor:
        with torch.no_grad():
            return lab.model({MODEL + "attention_backend": backend}).eval()(torch.arange(8)[None])

    for backend in ("flash", "unfused", "sdpa_flash", "sdpa_math", "reference"):
        torch.testing.assert_close(of(backend), of("auto"), atol=1e-5, rtol=1e-5)
    for backend in ("fused", "sdpa_efficient", "sdpa_cudnn"):
        with pytest.raises(UserError, match="needs a CUDA device"):
            of(backend)


# ---------------------------------------------------------------- keys with a story of their own

STORIES: dict[str, Callable[[Lab], None]] = {}


def story(*keys: str) -> Callable[[Callable[[Lab], None]], Callable[[Lab], None]]:
    """What the function shows is the effect of these keys."""

    def note(told: Callable[[Lab], None]) -> Callable[[Lab], None]:
        STORIES.update(dict.fromkeys(keys, told))
        return told

    return note


@story("env_vars")
def variables_are_set_for_training(lab: Lab) -> None:
    lab.monkeypatch.setenv("STOKER_TEST", "")
    lab.monkeypatch.delenv("STOKER_TEST")
    seen: list[str | None] = []
    lab.monkeypatch.setattr("stoker.trainer.run.train", lambda _: seen.append(os.environ.get("STOKER_TEST")) or 0)
    assert cli.main(["train", "data=mock"]) == 0
    assert cli.main(["train", "data=mock", "env_vars.STOKER_TEST=true"]) == 0
    assert seen == [None, "1"]


@story("trainer.devices", "trainer.num_nodes")
def processes_are_placed(lab: Lab) -> None:
    def placed(changes: Changes, **environ: str) -> tuple[int, int, int]:
        found = place_processes(lab.root(changes).trainer, environ)
        return found.world_size, found.per_node, found.node

    assert placed({}) == (1, 1, 0)
    assert placed({TRAINER + "devices": 3}) == (3, 3, 0)
    meeting = {"MASTER_ADDR": "first", "MASTER_PORT": "29500", "NODE_RANK": "1"}
    assert placed({TRAINER + "devices": 3, TRAINER + "num_nodes": 2}, **meeting) == (6, 3, 1)
    with pytest.raises(UserError, match="NODE_RANK"):
        placed({TRAINER + "num_nodes": 2})


@story("model.fsdp", "model.fsdp_shard_size")
def parameters_are_cut(lab: Lab) -> None:
    cut = {MODEL + "fsdp": True}
    hybrid = {**cut, MODEL + "fsdp_sharding_strategy": "hybrid"}
    found = [
        layout(lab, {}),
        layout(lab, {OPTIM + "name": "distributed_fused_adam"}),
        layout(lab, cut),
        layout(lab, {**hybrid, MODEL + "fsdp_shard_size": 2}),
    ]
    assert [(each.replicas, each.shards) for each in found] == [(4, 1), (1, 4), (1, 4), (2, 2)]
    assert len({str(each) for each in found}) == len(found)


@story("trainer.process_timeout")
def a_process_that_waits_gives_up(lab: Lab) -> None:
    timeouts: list[float] = []

    def join(*place: int, store: Any, timeout: float) -> Any:
        timeouts.append(timeout)
        raise UserError("enough")

    lab.monkeypatch.setattr(started, "join", join)
    lab.monkeypatch.setenv("RANK", "0")
    lab.monkeypatch.setenv("WORLD_SIZE", "2")
    for changes in ({}, {TRAINER + "process_timeout": 7.0}):
        document = lab.document(changes)
        config = RunConfig(RootBlock.model_validate(document), document=document)
        with pytest.raises(UserError, match="enough"):
            started.train(config, Placement(2, 2, rank=0))
    assert timeouts == [600.0, 7.0]


@story("model.rampup_batch_size")
def the_batch_grows(lab: Lab) -> None:
    grows = lab.metrics({MODEL + "rampup_batch_size": [2, 2, 4]})
    assert [row["consumed_samples"] for row in grows if "loss" in row] == [2, 4, 8, 12]


@story(CALLBACK + "async_save")
def checkpoints_are_written_beside_training(lab: Lab) -> None:
    names: list[str] = []
    write = saving.write_checkpoint

    def record(*arguments: Any) -> Path:
        names.append(threading.current_thread().name)
        return write(*arguments)

    lab.monkeypatch.setattr(saving, "write_checkpoint", record)
    for beside in (False, True):
        kept = checkpoints(lab, {**SAVES, CALLBACK + "async_save": beside, CALLBACK + "save_top_k": -1})
        assert kept == ["step-1", "step-2", "step-3", "step-4"]
    assert names == ["MainThread"] * 4 + ["checkpoint"] * 4


@story(MANAGER + "resume_from_checkpoint", MANAGER + "resume_if_exists", MANAGER + "resume_ignore_no_checkpoint")
def runs_go_on(lab: Lab) -> None:
    saves = {MANAGER + "create_checkpoint_callback": True}
    first = lab.run({**saves, TRAINER + "max_steps": 2})
    assert find_checkpoint(first.directory)[0].state.step == 2

    def steps(changes: Changes, directory: Path | None = None) -> list[int]:
        directory = lab.run(changes, directory).directory
        return [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]

    assert steps({}) == [1, 2, 3, 4]
    assert steps({MANAGER + "resume_from_checkpoint": str(first.directory)}) == [3, 4]
    assert steps({MANAGER + "resume_if_exists": True}, first.directory) == [1, 2, 3, 4]
    with pytest.raises(UserError, match="already holds checkpoints"):
        lab.run({MANAGER + "resume_if_exists": False}, first.directory)
    with pytest.raises(UserError, match="resume_ignore_no_checkpoint"):
        lab.run({MANAGER + "resume_ignore_no_checkpoint": False})


@story(CALLBACK + "dirpath")
def checkpoints_go_where_they_should(lab: Lab) -> None:
    elsewhere = lab.folder / "elsewhere"
    lab.run({MANAGER + "create_checkpoint_callback": True, CALLBACK + "dirpath": str(elsewhere)})
    assert [path.name for path in elsewhere.glob("step-*")] == ["step-4"]


@story(CALLBACK + "monitor", CALLBACK + "mode")
def the_smallest_validation_loss_is_kept(lab: Lab) -> None:
    measured = iter([3.0, 1.0, 2.0, 4.0])

    def evaluate(*_: Any, **__: Any) -> EvaluationResult:
        return EvaluationResult(loss=next(measured), tokens=1, bytes=0)

    lab.monkeypatch.setattr(parts, "evaluate", evaluate)
    keeps_one = {**VALIDATES, TRAINER + "val_check_interval": 1, CALLBACK + "save_top_k": 1}
    assert checkpoints(lab, {**keeps_one, CALLBACK + "save_last": False}) == ["step-2"]


@story(STOPPING + "monitor", STOPPING + "mode", STOPPING + "strict", STOPPING + "check_finite")
def early_stopping_watches_its_metric(lab: Lab) -> None:
    assert "val_loss" in str(stopped_by(lab, STOPS))
    assert "(loss " in str(stopped_by(lab, {**STOPS, STOPPING + "monitor": "reduced_train_loss"}))
    below = {**STOPS, STOPPING + "patience": 9, STOPPING + "stopping_threshold": 0.1}
    assert [stopped_by(lab, {**below, STOPPING + "mode": mode}) is None for mode in ("min", "max")] == [True, False]
    absent = {**STOPS, STOPPING + "monitor": "bits_per_byte", TRAINER + "limit_val_batches": 0}
    with pytest.raises(UserError, match="was not measured"):
        lab.run(absent)
    assert stopped_by(lab, {**absent, STOPPING + "strict": False}) is None
    for wish, stops in ((True, True), (False, False)):
        params = EarlyStoppingParams.model_validate({"check_finite": wish})
        assert (EarlyStopping(params, Patience.model_validate({})).check(float("nan"))[0] is not None) == stops


@story(CALLBACK + "train_time_interval")
def checkpoints_come_by_the_clock(lab: Lab) -> None:
    timed = {CALLBACK + "save_top_k": -1, CALLBACK + "train_time_interval": "00:00:00:00"}
    assert checkpoints(lab, timed) == ["step-1", "step-2", "step-3", "step-4"]


@story(MANAGER + "files_to_copy")
def files_are_copied(lab: Lab) -> None:
    directory = lab.run({MANAGER + "files_to_copy": [str(lab.text)]}).directory
    assert (directory / "files" / "text.txt").read_text() == lab.text.read_text()
    with pytest.raises(UserError, match="files_to_copy"):
        lab.run({MANAGER + "files_to_copy": [str(lab.folder / "missing")]})


@story(MANAGER + "ema.cpu_offload")
def the_average_lies_in_host_memory(lab: Lab) -> None:
    weight = torch.zeros(2, device="meta")
    for offload in (True, False):
        average = EMA({"w": torch.zeros(2)}, decay=0.5, cpu_offload=offload)
        assert average.pieces()["w"].local.device.type == "cpu"
    assert EMA({"w": weight}, decay=0.5).pieces()["w"].local.device.type == "meta"
    assert validation_losses(lab, AVERAGES) == validation_losses(lab, {**AVERAGES, MANAGER + "ema.cpu_offload": True})


WANDB = ("project", "name", "entity", "group", "job_type", "tags", "notes", "save_dir", "id", "offline")
MLFLOW = ("experiment_name", "run_name", "tracking_uri", "save_dir", "prefix", "tags", "artifact_location", "run_id")
EVENTS = ("max_queue", "flush_secs", "filename_suffix")


@story(
    *(f"{MANAGER}{switch}" for switch in ("create_wandb_logger", "create_mlflow_logger")),
    *(f"{MANAGER}wandb_logger_kwargs.{name}" for name in WANDB),
    *(f"{MANAGER}mlflow_logger_kwargs.{name}" for name in MLFLOW),
    *(f"{MANAGER}summary_writer_kwargs.{name}" for name in EVENTS),
)
def loggers_get_their_settings(lab: Lab) -> None:
    """Each setting reaches its logger; what the loggers do with it is in test_trainer_loggers.py."""
    made: dict[str, Any] = {}

    class Sink:
        def __init__(self, *given: Any, **_: Any) -> None:
            keys = next(item for item in given if isinstance(item, Block))
            made[type(keys).__name__] = keys.model_dump()

        def log(self, step: int, figures: Any, group: str) -> None: ...

        def close(self, *, failed: bool) -> None: ...

    for name in ("WandbSink", "MlflowSink", "TensorBoardSink"):
        lab.monkeypatch.setattr(loggers, name, Sink)
    lab.monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda _: True)
    on = {f"create_{name}_logger": True for name in ("wandb", "mlflow", "tensorboard")}
    lab.run({MANAGER + switch: value for switch, value in on.items()} | {MANAGER + "wandb_logger_kwargs.project": "p"})
    assert made["WandbBlock"]["project"] == "p"
    assert set(made["WandbBlock"]) == set(WANDB)
    assert set(made["MlflowBlock"]) == set(MLFLOW)
    assert set(made["SummaryWriterBlock"]) == set(EVENTS)


MEMORY = "model.memory_profile."


@story(*(MEMORY + name for name in ("enabled", "start_step", "end_step", "rank", "output_path")))
def memory_is_recorded(lab: Lab) -> None:
    asked: list[tuple[Any, ...]] = []
    lab.monkeypatch.setattr(profiling, "MemoryRecorder", lambda *given: asked.append(given))
    keys = {MEMORY + "enabled": True, MEMORY + "start_step": 2, MEMORY + "end_step": 3, MEMORY + "rank": 1}
    root = lab.root({**keys, MEMORY + "output_path": str(lab.folder)})
    for rank in (0, 1):
        profiling.build_observers(root, lab.folder, CPU, print, rank)
    assert [given[:3] for given in asked] == [(lab.folder, 2, 3)]
    with pytest.raises(UserError, match="memory_profile"):
        lab.run(keys)


OFFLOADING = MODEL + "cpu_offloading"


@story(*(OFFLOADING + end for end in ("", "_num_layers", "_activations", "_weights")))
def layers_lie_in_host_memory(lab: Lab) -> None:
    auto = {OFFLOADING: True, MODEL + "num_layers": 4, TRAINER + "accelerator": "auto", TRAINER + "max_steps": 1}
    if not torch.cuda.is_available():
        assert "`model.cpu_offloading` (True) has no effect on cpu" in lab.printed(auto)
    made: list[LateCopies] = []
    install_late_copies(lab.monkeypatch)
    lab.monkeypatch.setattr(build, "copies_of", lambda device: lambda: (made.append(LateCopies()), made[-1])[1])

    def sent(changes: Changes) -> int:
        """Bytes that a forward copies to the host of a pretended GPU."""
        changes = {MODEL + "num_layers": 4, **changes}
        made.clear()
        tokens = torch.arange(8).repeat(2, 1)
        lab.model(changes).loss(tokens, tokens, 1.0)
        return sum(size for copies in made for name, size in copies.events if name == "send")

    on = {OFFLOADING: True, OFFLOADING + "_num_layers": 2}
    both, none = sent(on), sent({**on, OFFLOADING: False})
    activations, weights = (sent({**on, f"{OFFLOADING}_{other}": False}) for other in ("weights", "activations"))
    assert none == 0 < min(activations, weights)
    assert both == activations + weights
    assert sent({**on, OFFLOADING + "_num_layers": 1}) * 2 == both
    assert sent({OFFLOADING: True}) * 2 == both * 3  # all layers but one


@story(MODEL + "cpu_offloading_optimizer")
def the_optimizer_lies_in_host_memory(lab: Lab) -> None:
    lab.monkeypatch.setattr(optim_build, "PinnedState", lambda device: (device, "copies"))
    on, off = (lab.root({MODEL + "cpu_offloading_optimizer": on}).model for on in (True, False))
    cuda = torch.device("cuda", 0)
    assert optim_build.host_copies(on, cuda) == (cuda, "copies")
    assert optim_build.host_copies(off, cuda) is None
    assert optim_build.host_copies(on, CPU) is None
    auto = {MODEL + "cpu_offloading_optimizer": True, TRAINER + "accelerator": "auto"}
    assert "`model.cpu_offloading_optimizer` (True) has no effect on cpu" in lab.printed(auto)


@story(MODEL + "enable_cuda_graph")
def micro_batches_are_recorded(lab: Lab) -> None:
    made: list[Any] = []
    for part in (run, parts, run_description):
        lab.monkeypatch.setattr(part, "uses_cuda_graph", lambda root, *_: root.model.enable_cuda_graph)
    lab.monkeypatch.setattr(parts, "RecordedMicroBatches", lambda step, *_: made.append(step) or step)
    lab.run({MODEL + "enable_cuda_graph": True, TRAINER + "accelerator": "auto"})
    assert len(made) == 1


@story(TRAINER + "max_skipped_steps", TRAINER + "loss_spike_threshold")
def steps_are_watched(lab: Lab) -> None:
    bad, good = (float("nan"), 1.0), (1.0, 1.0)
    policy = StepPolicy(1, None, LoopState.model_validate({}))
    policy.read(1, [bad, good, bad])
    with pytest.raises(DivergedError, match="step 4"):
        policy.read(4, [bad])
    losses = [(1.0 + 0.01 * (step % 7), 1.0) for step in range(150)] + [(3.0, 1.0)] * 20
    assert [len(StepPolicy(1, limit, LoopState.model_validate({})).read(1, losses)) for limit in (4.0, 1e6, None)] == [
        1,
        0,
        0,
    ]


@story(MODEL + "hidden_dropout")
def embeddings_attention_and_mlp_drop(lab: Lab) -> None:
    rates: list[float] = []

    def dropout(values: torch.Tensor, rate: float) -> torch.Tensor:
        rates.append(rate)
        return values

    lab.monkeypatch.setattr(torch.nn.functional, "dropout", dropout)
    training_loss(lab, {MODEL + "hidden_dropout": 0.2, MODEL + "num_layers": 2})
    assert rates == [0.2] * (1 + 2 * 2)


@story(MODEL + "compile")
def null_compiles_on_a_gpu(lab: Lab) -> None:
    choices = [compile_policy(wish, "cuda", (2, 12), dropout=False)[0] for wish in (None, True, False)]
    assert choices == [True, True, False]


@story(MODEL + "seed")
def dropout_is_seeded(lab: Lab) -> None:
    seeds: set[int] = set()
    lab.monkeypatch.setattr(module, "micro_batch_seed", lambda seed, *_: seeds.add(seed) or seed)
    lab.run({MODEL + "seed": 5})
    assert seeds == {5}


@story(MODEL + "restore_from_path")
def a_run_begins_where_another_ended(lab: Lab) -> None:
    first = lab.run({"exp_manager.create_checkpoint_callback": True})
    assert trained(lab, {}) != trained(lab, {MODEL + "restore_from_path": str(first.directory)})


@story(TOKENIZER + "type", TOKENIZER + "vocab_file", TOKENIZER + "merge_file")
def tokenizers_are_read_from_files(lab: Lab) -> None:
    files = tokenizer_files(lab)
    folder = lab.folder / "tokenizer"
    megatron = {TOKENIZER + "library": "megatron", **files, TOKENIZER + "type": "GPT2BPETokenizer"}
    merged = tokens_of_text(lab, megatron)
    assert merged != tokens_of_text(lab, {**megatron, TOKENIZER + "merge_file": str(folder / "fewer.txt")})
    other = json.loads((folder / "vocab.json").read_text())
    other["to"], other["be"] = other["be"], other["to"]
    (folder / "other.json").write_text(json.dumps(other))
    assert merged != tokens_of_text(lab, {**megatron, TOKENIZER + "vocab_file": str(folder / "other.json")})
    huggingface = {TOKENIZER + "library": "huggingface", TOKENIZER + "type": files[TOKENIZER + "type"]}
    assert merged != tokens_of_text(lab, huggingface)
    text = ["data=text", f"model.data.path={lab.text}"]
    refused = problems(*text, "model.tokenizer.library=megatron", "model.tokenizer.type=BertWordPieceCase")
    assert TOKENIZER + "type" in refused
    assert TOKENIZER + "merge_file" in problems(*text, "tokenizer=gpt2", "model.tokenizer.vocab_file=v")


@story(TOKENIZER + "model")
def a_tokenizer_model_is_a_file_too(lab: Lab) -> None:
    path = tokenizer_files(lab)[TOKENIZER + "type"]
    library = {TOKENIZER + "library": "huggingface"}
    by_model = tokens_of_text(lab, {**library, TOKENIZER + "model": path})
    assert by_model == tokens_of_text(lab, {**library, TOKENIZER + "type": path})
    both = ["tokenizer=huggingface", f"model.tokenizer.type={path}", f"model.tokenizer.model={path}"]
    assert TOKENIZER + "type" in problems("data=text", f"model.data.path={lab.text}", *both)
    with pytest.raises(UserError, match="downloads no tokenizers"):
        tokens_of_text(lab, {**library, TOKENIZER + "model": "meta-llama/Llama-3.1-8B"})


@story(
    TOKENIZER + "additional_special_tokens",
    TOKENIZER + "special_tokens.eos_token",
    TOKENIZER + "special_tokens.pad_token",
)
def special_tokens_are_named_and_added(lab: Lab) -> None:
    path = tokenizer_files(lab)[TOKENIZER + "type"]
    base = {**TEXT, DATA + "path": str(lab.text), TOKENIZER + "library": "huggingface", TOKENIZER + "type": path}

    def built(**special: Any) -> Any:
        keys = {TOKENIZER + key: value for key, value in special.items()}
        tokenizer = build_data(lab.root({**base, **keys})).tokenizer
        return tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id

    assert built() == (259, 257, 257)
    assert built(additional_special_tokens=["<a>", "<b>"]) == (261, 257, 257)
    assert built(special_tokens={"eos_token": "be"}) == (259, 258, 257)
    assert built(special_tokens={"pad_token": "to"}) == (259, 257, 256)


@story(TOKENIZER + "special_tokens.mask_token")
def bert_hides_tokens_behind_the_named_one(lab: Lab) -> None:
    path = tokenizer_files(lab)[TOKENIZER + "type"]
    bert = {DATA + "dataset_type": "bert", TOKENIZER + "library": "huggingface", TOKENIZER + "type": path}
    for special, name in (({}, "<extra_id_0>"), ({"mask_token": "<hide>"}, "<hide>")):
        built = build_data(of_task(lab, {**bert, TOKENIZER + "special_tokens": special}))
        hidden = built.tokenizer.token_id(name)
        assert hidden is not None
        assert (built.train.batch(0, 8)["tokens"] == hidden).any()
        assert built.tokenizer.token_id("<hide>") == (hidden if special else None)


@story(DATA + "path")
def text_is_read_from_there(lab: Lab) -> None:
    other = lab.folder / "other.txt"
    other.write_text("Whether 'tis nobler in the mind to suffer " * 20)
    batches = [first_batch(lab, {**TEXT, DATA + "path": str(path)}) for path in (lab.text, other)]
    assert batches[0] != batches[1]


def tokens_on_disk(lab: Lab, name: str, first: int) -> str:
    """A set of 40 documents of 10 tokens, counted up from `first`."""
    with IndexedWriter(lab.folder / name, "u2") as writer:
        for number in range(40):
            writer.add_document(range(first + 2 * number, first + 2 * number + 10))
        writer.finish()
    return str(lab.folder / name)


@story(DATA + "data_impl")
def sources_differ(lab: Lab) -> None:
    files = {"text": {DATA + "path": str(lab.text)}, "mmap": {DATA + "data_prefix": tokens_on_disk(lab, "a", 3)}}
    streams = [name for name in BUILT_IN if name not in PAIR_SOURCES]
    found = [first_batch(lab, {DATA + "data_impl": name, **files.get(name, {})}) for name in streams]
    pairs = {DATA + "dataset_type": "seq2seq"}
    found += [task_batch(lab, pairs), task_batch(lab, {**pairs, DATA + "data_impl": "pystd_docstring"})]
    assert all(found.count(batch) == 1 for batch in found)
    assert "did you mean model.data.data_impl=mmap?" in problems("model.data.data_impl=mmpa")[DATA + "data_impl"].fix
    assert "use mmap or text" in problems("model.data.data_impl=text_mmap")[DATA + "data_impl"].rule


@story(DATA + "data_prefix", DATA + "shuffle_documents", DATA + "index_mapping_dir")
def tokens_come_from_there(lab: Lab) -> None:
    a, b = tokens_on_disk(lab, "a", 3), tokens_on_disk(lab, "b", 150)
    folder = lab.folder / "index"

    def drawn(prefix: Any, **more: Any) -> list[list[int]]:
        changes = {DATA + "data_impl": "mmap", DATA + "data_prefix": prefix}
        return first_batch(lab, {**changes, **{DATA + name: value for name, value in more.items()}}, 20)

    first, second, both = drawn(a), drawn(b), drawn([0.25, a, 0.75, b])
    assert sum(min(row) >= 150 for row in both) == 15
    assert drawn({"train": b, "validation": a}, splits_string="1") != second, "not cut"
    assert drawn(a, shuffle_documents=False) != first
    assert drawn(a, index_mapping_dir=str(folder)) == first
    assert list(folder.glob("*.npy"))


@story(DATA + "dataset_kwargs")
def installed_data_get_their_arguments(lab: Lab) -> None:
    def samples(data: Any, split: str, sequence_length: int, tokenizer: Any, seed: int) -> Any:
        top = data["dataset_kwargs"]["top"]
        return MockSamples(top, sequence_length, seed, 1000) if split == "train" else None

    point = EntryPoint("mine", "package:samples", "stoker.datasets")
    lab.monkeypatch.setattr(EntryPoint, "load", lambda self: samples)
    for module_name in ("trainer.data.installed", "trainer.data.build", "trainer.config.data_rules"):
        lab.monkeypatch.setattr(f"stoker.{module_name}.installed_datasets", lambda: {"mine": point})
    changes = {DATA + "data_impl": "mine", DATA + "path": None}
    batches = [first_batch(lab, {**changes, DATA + "dataset_kwargs": {"top": top}}) for top in (10, 20)]
    assert max(map(max, batches[0])) < 10 <= max(map(max, batches[1]))
    loaded = load("model.data.data_impl=mine", "model.data.dataset_kwargs.top=5").root.model.data
    assert loaded.dataset_kwargs == {"top": 5}


@story(DATA + "seq_length")
def a_second_length_must_be_the_first(lab: Lab) -> None:
    both = ["data=mock", "model.encoder_seq_length=32"]
    assert load(*both, "model.data.seq_length=32").root.model.data.seq_length == 32
    assert list(problems(*both, "model.data.seq_length=64")) == [DATA + "seq_length"]
    assert len(first_batch(lab, {DATA + "seq_length": 4})[0]) == 4


@pytest.mark.parametrize("told", dict.fromkeys(STORIES.values()), ids=lambda told: told.__name__)
def test_the_story_of(told: Callable[[Lab], None], lab: Lab) -> None:
    told(lab)


# ---------------------------------------------------------------- all of them


def test_every_key_has_an_entry_and_every_entry_a_key() -> None:
    rows = {row.key for row in ROWS}
    keys = {key for key in schema_keys() if not key.startswith("model.peft.")} - KEYS_OF_FINE_TUNING
    assert rows | set(VALUES) | set(STORIES) == keys
    assert set(VALUES) == {path for path in keys if len(schema_keys()[path].choices)}
    for path, values in VALUES.items():
        assert set(values.aliases) | set(values.aliases.values()) <= set(schema_keys()[path].choices)
    single = {path for path in keys if len(schema_keys()[path].choices) == 1}
    assert single <= set(STORIES)


# ---------------------------------------------------------------- combinations in which a key has no effect

WEIGHTS = "model.restore_from_path=x"
LORA, ADAPTER, IA3 = ([WEIGHTS, f"model.peft.peft_scheme={scheme}"] for scheme in ("lora", "adapter", "ia3"))


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["data=mock", "model.data.splits_string='1,1,1'"], DATA + "splits_string"),
        (["model.data.index_mapping_dir=x"], DATA + "index_mapping_dir"),
        (["model.data.shuffle_documents=false"], DATA + "shuffle_documents"),
        (["model.data.dataset_kwargs.a=1"], DATA + "dataset_kwargs"),
        (["data=mock", "model.data.eod_mask_loss=true"], DATA + "eod_mask_loss"),
        (["model.data.masked_lm_prob=0.3"], DATA + "masked_lm_prob"),
        (["model.data.packed_sequence=true"], DATA + "packed_sequence"),
        (["model.data.label_key=x"], DATA + "label_key"),
        (["model.tokenizer.num_sentinel_tokens=5"], TOKENIZER + "num_sentinel_tokens"),
        (
            ["model.position_embedding_type=none", "model.data.reset_position_ids=true"],
            DATA + "reset_position_ids",
        ),
        (["data=mmap", "model.data.data_prefix={train: a, validation: [1, b]}"], DATA + "data_prefix.validation"),
        (
            ["data=mmap", "model.data.data_prefix={train: a, validation: b}", "model.data.splits_string='1,1'"],
            DATA + "splits_string",
        ),
        (["trainer.limit_val_batches=0", "trainer.num_sanity_val_steps=1"], TRAINER + "num_sanity_val_steps"),
        (
            ["trainer.limit_val_batches=0", "trainer.val_check_interval=5", f"{CALLBACK}every_n_train_steps=5"],
            TRAINER + "val_check_interval",
        ),
        (["exp_manager.version=1", "exp_manager.use_datetime_version=false"], MANAGER + "use_datetime_version"),
        (["exp_manager.version=0", "exp_manager.use_datetime_version=false"], MANAGER + "use_datetime_version"),
        (["exp_manager.resume_ignore_no_checkpoint=false"], MANAGER + "resume_ignore_no_checkpoint"),
        ([f"{CALLBACK}save_top_k=0", f"{CALLBACK}save_last=false"], CALLBACK + "save_top_k"),
        ([f"{CALLBACK}every_n_train_steps=9999", f"{CALLBACK}save_last=false"], CALLBACK + "every_n_train_steps"),
        (
            ["model.normalization=layernorm1p", "model.layernorm_zero_centered_gamma=false"],
            MODEL + "layernorm_zero_centered_gamma",
        ),
        (["trainer.precision=bf16-true", "model.megatron_amp_O2=false"], MODEL + "megatron_amp_O2"),
        (["trainer.accelerator=cpu", "model.megatron_amp_O2=false"], MODEL + "megatron_amp_O2"),
        (["trainer.limit_val_batches=0", f"{DATA}validation_drop_last=true"], DATA + "validation_drop_last"),
        (["trainer.overfit_batches=2", f"{DATA}validation_drop_last=true"], DATA + "validation_drop_last"),
        (["model.do_layer_norm_weight_decay=true", f"{OPTIM}weight_decay=0.0"], MODEL + "do_layer_norm_weight_decay"),
        ([*LORA, "model.do_layer_norm_weight_decay=true"], MODEL + "do_layer_norm_weight_decay"),
        ([*IA3, "model.do_layer_norm_weight_decay=true"], MODEL + "do_layer_norm_weight_decay"),
        (
            [*ADAPTER, "model.peft.adapter_tuning.norm_position=null", "model.do_layer_norm_weight_decay=true"],
            MODEL + "do_layer_norm_weight_decay",
        ),
        ([WEIGHTS, "model.init_method_std=0.5"], MODEL + "init_method_std"),
        ([WEIGHTS, "model.use_scaled_init_method=false"], MODEL + "use_scaled_init_method"),
        ([WEIGHTS, "model.embedding_init_method_std=0.5"], MODEL + "embedding_init_method_std"),
        (["model=t5_tiny", WEIGHTS, "model.decoder.init_method_std=0.5"], MODEL + "decoder.init_method_std"),
        (
            [*LORA, "model.peft.restore_from_path=y", "model.peft.lora_tuning.row_init_method=normal"],
            MODEL + "peft.lora_tuning.row_init_method",
        ),
    ],
)
def test_a_key_without_effect_is_told(overrides: list[str], key: str) -> None:
    warned = [finding.keys[0] for finding in load(*overrides).findings if finding.level == "warning"]
    assert warned == [key]


@pytest.mark.parametrize("kept", [-1, 0])
def test_ranks_that_choose_no_checkpoint_are_told(kept: int) -> None:
    given = [f"{CALLBACK}monitor=loss", f"{CALLBACK}mode=max", f"{CALLBACK}save_top_k={kept}"]
    found = load(*given).findings
    assert [(one.level, one.keys[0]) for one in found] == [("info", CALLBACK + "monitor"), ("info", CALLBACK + "mode")]


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.limit_val_batches=0"],
        ["trainer.limit_val_batches=0", "trainer.val_check_interval=5"],
        ["experiment=llama_1b_bench"],
        ["trainer.precision=32", "model.megatron_amp_O2=false"],
        ["model.megatron_amp_O2=false"],
        ["trainer.precision=bf16", "trainer.accelerator=cpu", "model.megatron_amp_O2=false"],
        [*ADAPTER, "model.do_layer_norm_weight_decay=true"],
        ["model.init_method_std=0.5", "model.embedding_init_method_std=0.5"],
        ["model=t5_tiny", WEIGHTS],
        ["experiment=shakespeare_char_cpu", "model.data.path=x", WEIGHTS],
        [*LORA, "model.peft.lora_tuning.row_init_method=normal"],
        [f"{DATA}validation_drop_last=true"],
        [f"{CALLBACK}save_top_k=-1"],
        [f"{CALLBACK}save_top_k=-1", f"{CALLBACK}monitor=val_loss", f"{CALLBACK}mode=min"],
        [f"{CALLBACK}monitor=loss", f"{CALLBACK}mode=max"],
        [
            "exp_manager.create_checkpoint_callback=false",
            "exp_manager.resume_if_exists=true",
            f"{CALLBACK}dirpath=somewhere",
        ],
    ],
)
def test_what_acts_is_not_warned_of(overrides: list[str]) -> None:
    assert not load(*overrides).findings
