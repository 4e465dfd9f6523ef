"""Observables: functions from a configuration to a comparable value that changes if a key has an effect.

Shapes, initial weights, logits, loss, learning rates, sampled data, files and output of a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from config_harness import CPU, DATA, MANAGER, MODEL, TEXT, TOKENIZER, TRAINER, Changes, ConfigHarness, fingerprint
from config_helpers import gpt, load
from resolved import build_data, build_model
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from stoker.kernels.attention.backends.unfused import UnfusedAttention
from stoker.kernels.attention.call_spec import AttentionCall, InstalledSoftware
from stoker.kernels.attention.dispatch import select_backend
from stoker.kernels.attention.flags import AttentionFlags
from stoker.kernels.fp8.delayed_scaling import LINEAR, DelayedScaling
from stoker.models.config.stack import StackKeys
from stoker.models.gpt import GPT
from stoker.models.layer import Layer
from stoker.models.moe import experts as experts_module
from stoker.models.moe.moe_layer import find_moe_layers
from stoker.trainer.callbacks.early_stopping import EarlyStopping
from stoker.trainer.checkpoint.loop_state import EarlyStoppingState
from stoker.trainer.config import dotted_paths
from stoker.trainer.config.parameter_layout import plan_layout
from stoker.trainer.config.resolved_run import DataSpec, resolve_run
from stoker.trainer.config.run_config import RunConfig
from stoker.trainer.config.schema.exp_manager import canonical_metric_name
from stoker.trainer.config.schema.optim import build_schedule
from stoker.trainer.config.schema.root import RootBlock
from stoker.trainer.core import run_context
from stoker.trainer.core.training_state import build_optimizer
from stoker.trainer.data import dataloader
from stoker.trainer.data.datasets.samples import IGNORE_INDEX
from stoker.trainer.data.tokenizers import sentencepiece_tokenizer
from stoker.trainer.data.tokenizers.gpt2_files import gpt2_tokenizer_json
from stoker.trainer.data.tokenizers.token_bytes import unicode_to_bytes
from stoker.trainer.data.tokenizers.tokenizer import CharTokenizer
from stoker.trainer.device.choose_device import choose_device
from stoker.trainer.distributed.data_parallel import grad_reduce_dtype
from stoker.trainer.lightning import lightning_module
from stoker.trainer.train import run_training


def shapes(harness: ConfigHarness, changes: Changes) -> Any:
    return {name: tuple(value.shape) for name, value in harness.model(changes).named_parameters()}


def family_shapes(harness: ConfigHarness, changes: Changes) -> Any:
    """Parameter shapes, with the stack's keys placed where the family expects them."""
    document = harness.document(changes)
    model = document["model"]
    if changes[MODEL + "family"] == "t5":
        stack = {name: model.pop(name) for name in list(model) if name in StackKeys.model_fields}
        length = model.pop("encoder_seq_length")
        model |= {"encoder": stack, "decoder": stack, "seq_length": length, "data": {"data_impl": "mock"}}
    root = RootBlock.model_validate(document)
    model = build_model(root, build_data(root))
    return {name: tuple(value.shape) for name, value in model.named_parameters()}


def weights(harness: ConfigHarness, changes: Changes) -> Any:
    return {name: fingerprint(value) for name, value in harness.model(changes).named_parameters()}


def logits(harness: ConfigHarness, changes: Changes) -> Any:
    model = harness.model(changes).eval()
    with torch.no_grad():
        return fingerprint(model(torch.arange(8).repeat(2, 1)))


def training_loss(harness: ConfigHarness, changes: Changes) -> Any:
    """Loss of one micro batch, seeded as in training."""
    model = harness.model(changes)
    tokens = torch.arange(8).repeat(2, 1)
    lightning_module.seed_generators(lightning_module.micro_batch_seed(harness.root(changes).model.seed, 0, 0), CPU)
    return model.loss(tokens, tokens, 1.0).item()


def gradients(harness: ConfigHarness, changes: Changes) -> Any:
    """Gradients of one micro batch, seeded as in training."""
    model = harness.model(changes)
    tokens = torch.arange(8).repeat(2, 1)
    lightning_module.seed_generators(lightning_module.micro_batch_seed(harness.root(changes).model.seed, 0, 0), CPU)
    model.loss(tokens, tokens, 1.0).backward()
    return {name: fingerprint(value.grad) for name, value in model.named_parameters() if value.grad is not None}


def delayed_scales(harness: ConfigHarness, changes: Changes) -> Any:
    """Scale of an input after each of three steps with smaller amaxes, in delayed scaling."""
    stack = resolve_run(harness.root(changes)).family.stacks[0]
    assert stack.fp8 is not None
    state = DelayedScaling({"layer": LINEAR}, stack.fp8.recipe, CPU)
    found: list[float] = []
    for step, amax in enumerate((4.0, 1.0, 2.0)):
        state.scales("layer").amax[0] = amax
        state.update(step)
        found.append(float(state.scale[0]))
    return found


def fp8_casts(harness: ConfigHarness, changes: Changes) -> Any:
    """Gradients of one micro batch; scales of delayed scaling, which no CPU has."""
    delayed = harness.root(changes).model.fp8_recipe == "delayed"
    return (delayed_scales if delayed else gradients)(harness, changes)


def flops(harness: ConfigHarness, changes: Changes) -> Any:
    """Matmul FLOPs of a forward pass."""
    model = harness.model(changes).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(8).repeat(2, 1))
    return counter.get_total_flops()


def router_calls(harness: ConfigHarness, changes: Changes) -> Any:
    """Dtype of each call of the first layer's router in a training step."""
    model = harness.model(changes)
    (router, *_) = (layer.router for layer in find_moe_layers(model).values())
    seen: list[torch.dtype] = []
    router.register_forward_hook(lambda _module, _arguments, routed: seen.append(routed.assignment.gates.dtype))
    model.loss(torch.arange(8)[None], torch.arange(8)[None], 1.0).backward()
    return seen


def kept(harness: ConfigHarness, changes: Changes) -> Any:
    """Bytes that a training step saves for its backward pass."""
    model, storages = harness.model(changes), dict[int, int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.loss(torch.arange(8)[None], torch.arange(8)[None], 1.0)
    assert loss.requires_grad
    return sum(storages.values())


def expert_implementation(harness: ConfigHarness, changes: Changes) -> Any:
    """Implementation of each call of the experts."""
    seen: list[str] = []
    expert_mlp = experts_module.expert_mlp

    def record(*arguments: Any, implementation: Any, **more: Any) -> torch.Tensor:
        seen.append(implementation)
        return expert_mlp(*arguments, implementation=implementation, **more)

    with harness.monkeypatch.context() as patch:
        patch.setattr(experts_module, "expert_mlp", record)
        training_loss(harness, changes)
    return seen


def logged_names(harness: ConfigHarness, changes: Changes) -> Any:
    return {name for row in harness.metrics(changes) for name in row}


def attention_backends(harness: ConfigHarness, changes: Changes) -> Any:
    return {kind: decision.backend for kind, decision in harness.model(changes).attention_decisions.items()}


def hopper_backend(harness: ConfigHarness, changes: Changes) -> Any:
    """Backend that the dispatcher chooses on a GPU that supports every backend."""
    call = AttentionCall(
        device="cuda",
        capability=(9, 0),
        dtype="bf16",
        batch=1,
        heads=8,
        groups=8,
        head_dim=64,
        queries=8192,
        keys=8192,
        any_length=False,
        causal=True,
        dropout=0.0,
        training=True,
        deterministic=False,
    )
    stack = gpt(harness.root(changes))
    return select_backend(
        call,
        use_flash_attention=stack.use_flash_attention,
        attention_backend=stack.attention_backend,
        transformer_engine=stack.transformer_engine,
        flags=AttentionFlags(),
        installed=InstalledSoftware(torch=(2, 13), cudnn=91900, triton=(3, 6), te=(2, 20), flash_attn=(2, 8, 3)),
    ).backend


def softmax_fusion(harness: ConfigHarness, changes: Changes) -> Any:
    """Return True if unfused attention of a layer may use the fused softmax."""
    layer = harness.model(changes).decoder.layers[0]
    assert isinstance(layer, Layer)
    function = layer.attention.backends["training"]
    assert isinstance(function, UnfusedAttention)
    return function.masked_softmax_fusion


def attention_masks(harness: ConfigHarness, changes: Changes) -> Any:
    """Bytes of the attention masks recorded by the dispatcher."""
    return {kind: decision.mask_bytes for kind, decision in harness.model(changes).attention_decisions.items()}


def optimizer_groups(harness: ConfigHarness, changes: Changes) -> Any:
    root = harness.root(changes)
    groups = build_optimizer(resolve_run(root), harness.model(changes)).param_groups
    return [(group["names"], group["weight_decay"]) for group in groups]


def first_batch(harness: ConfigHarness, changes: Changes, samples: int = 2) -> Any:
    return build_data(harness.root(changes)).train.batch(0, samples).tokens.tolist()


def task_config(harness: ConfigHarness, changes: Changes) -> RootBlock:
    """Configuration of the family a task is for (T5 by default), with the data it needs."""
    name = changes.get(DATA + "dataset_type", "t5")
    pairs = harness.folder / "pairs.jsonl"
    texts = (json.dumps({"input": f"read {n}", "output": f"write {n}", "other": f"{n}"}) + "\n" for n in range(40))
    pairs.write_text("".join(texts))
    family, length = ("t5", "seq_length")
    if name in ("gpt", "sft", "bert"):
        family, length = ("bert" if name == "bert" else "gpt", "encoder_seq_length")
    source, path = ("jsonl", pairs) if name in ("seq2seq", "sft") else ("text", documents(harness)[DATA + "path"])
    document: dict[str, Any] = {
        "model": {"family": family, length: 24, "data": {"data_impl": source, "path": str(path)}}
    }
    for key, value in changes.items():
        dotted_paths.put(document, key, deepcopy(value))
    return RootBlock.model_validate({**document, "trainer": {"limit_val_batches": 0}})


def task_batch(harness: ConfigHarness, changes: Changes) -> Any:
    """Names, shapes and values of the first batch of a task."""
    built = build_data(task_config(harness, changes))
    batch = built.train.batch(0, 8)
    tensors = batch if isinstance(batch, dict) else {"tokens": batch.tokens, "labels": batch.labels}
    return built.vocab_size, [(name, fingerprint(tensor)) for name, tensor in tensors.items()]


def data(harness: ConfigHarness, changes: Changes) -> Any:
    built = build_data(harness.root(changes))
    return built.description, built.vocab_size, type(built.train).__name__


def documents(harness: ConfigHarness) -> Changes:
    """Write a folder of files, each one document, and return the keys that read it."""
    folder = harness.folder / "documents"
    folder.mkdir(exist_ok=True)
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"This is document {number}.")
    return {**TEXT, DATA + "path": str(folder)}


def num_target_labels(harness: ConfigHarness, changes: Changes) -> Any:
    """Number of labels that count towards the loss, in a folder of files."""
    built = build_data(harness.root({**documents(harness), **changes}))
    return int((built.train.batch(0, 20).labels != IGNORE_INDEX).sum())


def weights_trained_on_documents(harness: ConfigHarness, changes: Changes) -> Any:
    return trained(harness, {**documents(harness), **changes})


def trained(harness: ConfigHarness, changes: Changes) -> Any:
    return {name: fingerprint(value) for name, value in harness.run(changes).model.named_parameters()}


def stepped(harness: ConfigHarness, changes: Changes) -> Any:
    """Weights after three steps of optimizer and schedule, without a run."""
    root, model = harness.root(changes), harness.model(changes)
    optimizer = build_optimizer(resolve_run(root), model)
    rate = build_schedule(root.model.optim, root.trainer.max_steps)
    tokens = torch.arange(8).repeat(2, 1)
    for step in range(3):
        model.loss(tokens, tokens, 1.0).backward()
        optimizer.set_lr(rate(step))
        optimizer.step()
    return {name: fingerprint(value) for name, value in model.named_parameters()}


def loss_scales(harness: ConfigHarness, changes: Changes) -> Any:
    return [line["loss_scale"] for line in harness.metrics(changes)]


def learning_rates(harness: ConfigHarness, changes: Changes) -> Any:
    return [line["lr"] for line in harness.metrics(changes)]


def rates(harness: ConfigHarness, changes: Changes) -> Any:
    """Learning rates of the schedule itself."""
    root = harness.root(changes)
    return [build_schedule(root.model.optim, root.trainer.max_steps)(step) for step in range(4)]


def reported_steps(harness: ConfigHarness, changes: Changes) -> Any:
    return [line["step"] for line in harness.metrics(changes) if "loss" in line]


def validated_steps(harness: ConfigHarness, changes: Changes) -> Any:
    return [line["step"] for line in harness.metrics(changes) if "val_loss" in line]


def consumed(harness: ConfigHarness, changes: Changes) -> Any:
    return [line["consumed_samples"] for line in harness.metrics(changes)]


def validated_tokens(harness: ConfigHarness, changes: Changes) -> Any:
    validation = harness.run(changes).validation
    return None if validation is None else validation.tokens


def files(harness: ConfigHarness, changes: Changes) -> Any:
    return {path.name for path in harness.run(changes).directory.iterdir()}


def report_sample(harness: ConfigHarness, changes: Changes) -> Any:
    return json.loads((harness.run(changes).directory / "report.json").read_text()).get("sample")


def checkpoints(harness: ConfigHarness, changes: Changes) -> Any:
    changes = {"exp_manager.create_checkpoint_callback": True, **changes}
    return sorted(path.name for path in (harness.run(changes).directory / "checkpoints").glob("*"))


def place(harness: ConfigHarness, changes: Changes) -> Any:
    """Default run directory, relative to the working directory."""
    harness.runs += 1
    cwd = harness.folder / f"cwd-{harness.runs}"
    cwd.mkdir()
    harness.monkeypatch.chdir(cwd)
    harness.monkeypatch.setattr("time.strftime", lambda *_: "now")
    defaults = {MANAGER + "explicit_log_dir": None, MANAGER + "resume_if_exists": False, TRAINER + "max_steps": 1}
    document = harness.document({**defaults, **changes})
    result = run_training(RunConfig(RootBlock.model_validate(document), document=document))
    return result.directory.relative_to(cwd).parts


def panel(harness: ConfigHarness, changes: Changes) -> Any:
    harness.monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich treat the output as a terminal
    return "╭" in harness.printed(changes)


def summary(harness: ConfigHarness, changes: Changes) -> Any:
    return "token_embedding" in harness.printed(changes)


def validates_first(harness: ConfigHarness, changes: Changes) -> Any:
    return "before the first step" in harness.printed(changes)


def stopped_by(harness: ConfigHarness, changes: Changes) -> Any:
    return harness.run(changes).stop_reason


def logs_early_stopping(harness: ConfigHarness, changes: Changes) -> Any:
    return "early stopping: val_loss" in harness.printed(changes)


def validation_losses(harness: ConfigHarness, changes: Changes) -> Any:
    return [line["val_loss"] for line in harness.metrics(changes) if "val_loss" in line]


def algorithms(harness: ConfigHarness, changes: Changes) -> Any:
    """Deterministic-algorithm settings in force within a run, observed when data is built."""
    seen: list[tuple[bool, bool]] = []
    original = run_context.build_data

    def build(spec: DataSpec) -> Any:
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        seen.append((torch.are_deterministic_algorithms_enabled(), warn_only))
        return original(spec)

    harness.monkeypatch.setattr(run_context, "build_data", build)
    harness.run(changes)
    harness.monkeypatch.setattr(run_context, "build_data", original)
    assert not torch.are_deterministic_algorithms_enabled()
    return seen


def profiles(harness: ConfigHarness, changes: Changes) -> Any:
    return sorted(path.name for path in (harness.run(changes).directory / "profile").glob("*"))


def accumulation(harness: ConfigHarness, changes: Changes) -> Any:
    """Samples in each forward pass of a step."""
    sizes: list[int] = []
    original = GPT.loss

    def loss(self: GPT, tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(len(tokens))
        return original(self, tokens, *rest)

    harness.monkeypatch.setattr(GPT, "loss", loss)
    harness.run({"trainer.max_steps": 1, **changes})
    harness.monkeypatch.setattr(GPT, "loss", original)
    return sizes


def workers(harness: ConfigHarness, changes: Changes) -> Any:
    """Number of dataloader workers; empty if a thread prepares the batches."""
    passed: list[int] = []

    class Pool:
        def __init__(self, prepare: Any, items: Any, num_workers: int, report: Any) -> None:
            passed.append(num_workers)
            self.batches = map(prepare, items)

        def __iter__(self) -> Iterator[Any]:
            return self.batches

        def close(self) -> None:
            pass

    harness.monkeypatch.setattr(dataloader, "WorkerPool", Pool)
    harness.run(changes)
    return passed


def compiled(harness: ConfigHarness, changes: Changes) -> Any:
    layer: Any = harness.model(changes).decoder.layers[0]
    return "forward" in vars(layer)


def layout(harness: ConfigHarness, changes: Changes) -> Any:
    keys = harness.root(changes).model
    return plan_layout(
        4,
        optimizer=keys.optim.name,
        fsdp=keys.fsdp,
        strategy=keys.fsdp_sharding_strategy,
        shard_size=keys.fsdp_shard_size,
    )


def exchange_of_tokens(harness: ConfigHarness, changes: Changes) -> Any:
    return resolve_run(harness.root(changes), world_size=4).context_split


def gradient_reduce_dtype(harness: ConfigHarness, changes: Changes) -> Any:
    return grad_reduce_dtype(harness.root(changes).model, torch.bfloat16)


def norm_weight(harness: ConfigHarness, changes: Changes) -> Any:
    norm = harness.model(changes).decoder.final_norm
    assert norm is not None
    return type(norm).__name__, norm.weight[0].item()


def warnings(harness: ConfigHarness, changes: Changes) -> Any:
    found = load("data=mock", *(f"{path}={value}" for path, value in changes.items())).findings
    return [finding.keys[0] for finding in found]


def device(harness: ConfigHarness, changes: Changes) -> Any:
    """Device chosen on a machine with CUDA and MPS."""
    harness.monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    harness.monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    return choose_device(harness.root(changes).trainer).type


def arithmetic(harness: ConfigHarness, changes: Changes) -> Any:
    return replace(resolve_run(harness.root(changes), capability=(9, 0)).precision, name="")


def activation(harness: ConfigHarness, changes: Changes) -> Any:
    return shapes(harness, changes), logits(harness, changes)


def normalization(harness: ConfigHarness, changes: Changes) -> Any:
    return shapes(harness, changes), norm_weight(harness, changes)


def tokens_of_text(harness: ConfigHarness, changes: Changes) -> Any:
    return first_batch(harness, {**TEXT, DATA + "path": str(harness.text), **changes})


def tokenizer_files(harness: ConfigHarness) -> Changes:
    """Write small GPT-2 vocabulary and merge files and a smaller tokenizer.json, and return keys that use them."""
    folder = harness.folder / "tokenizer"
    folder.mkdir(exist_ok=True)
    vocabulary = {character: number for number, character in enumerate(unicode_to_bytes())}
    vocabulary |= {"to": 256, "<|endoftext|>": 257, "be": 258}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\nt o\nb e\n")
    (folder / "fewer.txt").write_text("t o\n")
    (folder / "tokenizer.json").write_text(gpt2_tokenizer_json(json.dumps(vocabulary), ""))
    return {
        TOKENIZER + "vocab_file": str(folder / "vocab.json"),
        TOKENIZER + "merge_file": str(folder / "merges.txt"),
        TOKENIZER + "type": str(folder / "tokenizer.json"),
    }


def tokens_of_file(harness: ConfigHarness, changes: Changes) -> Any:
    """Tokens with each tokenizer library and its own file; sentencepiece is replaced by a stub."""
    model = harness.folder / "tokenizer.model"
    model.write_bytes(b"a model")
    stub = CharTokenizer.from_texts([harness.text.read_text() + "\0"])
    harness.monkeypatch.setattr(sentencepiece_tokenizer, "build_sentencepiece_tokenizer", lambda *_: stub)
    files = tokenizer_files(harness)
    if changes[TOKENIZER + "library"] == "sentencepiece":
        files = {TOKENIZER + "model": str(model)}
    elif changes[TOKENIZER + "library"] == "checkpoint":
        stored = CharTokenizer.from_texts([harness.text.read_text() + "\0\1"])
        (harness.folder / "step-1").mkdir(exist_ok=True)
        (harness.folder / "step-1" / "tokenizer.json").write_text(json.dumps(stored.to_dict()))
        files = {TOKENIZER + "type": str(harness.folder / "step-1")}
    return tokens_of_text(harness, {**files, **changes})


def optimizer(harness: ConfigHarness, changes: Changes) -> Any:
    return stepped(harness, changes), optimizer_groups(harness, changes)


def checkpoint_metric(harness: ConfigHarness, changes: Changes) -> Any:
    """Metric by which checkpoints are ranked, and its mode."""
    params = harness.root(changes).exp_manager.checkpoint_callback_params
    return canonical_metric_name(params.monitor), params.mode


def watched(harness: ConfigHarness, changes: Changes) -> Any:
    params = harness.root(changes).exp_manager.early_stopping_callback_params
    return EarlyStopping(params, EarlyStoppingState.model_validate({})).metric, EarlyStopping(
        params, EarlyStoppingState.model_validate({"best": 1.0})
    ).check(2.0)[1]
