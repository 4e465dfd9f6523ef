"""Micro batches by recordings: the same losses and gradients, whatever is accumulated, on a GPU bit for bit."""

import weakref
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from resolved import uses_cuda_graph
from tiny_run import final_hashes, tiny_config, tiny_document
from torch import Tensor, nn

from stoker.models.layer_graphs import WARM_UP_MICRO_BATCHES
from stoker.models.parallel.pipeline import RankStages
from stoker.models.parallel.stages import PipelineSplit
from stoker.trainer.cli.main import main
from stoker.trainer.config.resolved_run import resolve_run
from stoker.trainer.config.run_config import RunConfig
from stoker.trainer.config.schema.root import RootBlock
from stoker.trainer.core import training_loop
from stoker.trainer.data.batch_sampler import BatchSchedule
from stoker.trainer.device.cuda_graph_support import cuda_graph_unsupported_reason
from stoker.trainer.distributed.pipeline import Pipeline, StageShapes
from stoker.trainer.distributed.process_group import DistributedContext
from stoker.trainer.lightning.cuda_graph import CapturedGraph, CapturedMicroBatches, capture
from stoker.trainer.train import run_training
from stoker.trainer.utils.errors import UserError


class Line:
    """A product with two parameters and one that takes no part, run plainly."""

    def __init__(self):
        self.weight, self.bias, self.unused = (nn.Parameter(torch.tensor(float(n))) for n in (2, 3, 4))
        self.parameters = [self.weight, self.bias, self.unused]
        self.recorded = 0

    def run(self, fields, denominator):
        loss = ((fields["x"] * self.weight + self.bias).sum()) / denominator
        loss.backward()
        return loss.detach()

    def record(self, run, fields, denominator, parameters):
        """As a CUDA graph does: fixed places for samples, loss and gradients, which a replay writes over."""
        self.recorded += 1
        fields = {name: field.clone() for name, field in fields.items()}
        denominator, loss = denominator.clone(), torch.zeros(())
        gradients = [torch.zeros(()), torch.zeros(()), None]

        def replay():
            kept = [p.grad for p in parameters]
            for p in parameters:
                p.grad = None
            loss.copy_(run(fields, denominator))
            for p, gradient, before in zip(parameters, gradients, kept, strict=True):
                if gradient is not None:
                    gradient.copy_(p.grad)
                p.grad = before

        return CapturedGraph(fields, denominator, replay, loss, gradients)


def batches(count, size=3):
    generator = torch.Generator().manual_seed(1)
    return [({"x": torch.randn(size, generator=generator)}, torch.tensor(n + 2.0)) for n in range(count)]


@pytest.mark.parametrize("accumulated", [1, 3])
def test_losses_and_gradients_are_those_of_plain_runs(accumulated):
    plain, recorded = Line(), Line()
    run = CapturedMicroBatches(recorded.run, recorded.parameters, capture=recorded.record)
    losses, expected = [], []
    for number, (fields, denominator) in enumerate(batches(12)):
        expected.append(plain.run(fields, denominator))
        losses.append(run(fields, denominator))
        for ours, theirs in zip(recorded.parameters, plain.parameters, strict=True):
            assert ours.grad == theirs.grad
            if (number + 1) % accumulated == 0:
                ours.grad = theirs.grad = None
    assert losses == expected  # each its own tensor, not the place that the last replay wrote
    assert recorded.recorded == 1
    assert recorded.unused.grad is None


def test_every_shape_has_its_recording_after_its_own_warm_up():
    line = Line()
    run = CapturedMicroBatches(line.run, line.parameters, capture=line.record)
    counts = []
    for small, large in zip(batches(5, 2), batches(5, 4), strict=True):
        run(*small)
        run(*large)
        counts.append(line.recorded)
    assert counts == [0] * WARM_UP_MICRO_BATCHES + [2, 2]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("tried to allocate"), UserError("it waits")])
def test_a_recording_that_fails_is_given_up_once_where_nobody_asked_for_it(error):
    """However many errors stand between the line that fails and the one that is told."""
    computed = []

    def waits() -> NoReturn:
        loss = torch.ones(())
        computed.append(weakref.ref(loss))
        raise RuntimeError("it waits")

    def fails(*_) -> NoReturn:
        try:
            try:
                waits()
            except RuntimeError:
                raise RuntimeError("so the end of the recording fails")  # noqa: B904
        except RuntimeError as end:
            raise error from end

    plain, line, said = Line(), Line(), []
    run = CapturedMicroBatches(line.run, line.parameters, said.append, fails)
    asked = CapturedMicroBatches(line.run, line.parameters, None, fails)
    for fields, denominator in batches(WARM_UP_MICRO_BATCHES + 3):
        assert run(fields, denominator) == plain.run(fields, denominator)
        assert line.weight.grad == plain.weight.grad
    assert computed[0]() is None, "kept by the frames of the error"
    (told,) = said
    assert told.startswith("warning: ")
    assert "model.enable_cuda_graph=False" in told
    (batch,) = batches(1)
    for _ in range(WARM_UP_MICRO_BATCHES):
        asked(*batch)
    with pytest.raises(type(error)):
        asked(*batch)


def test_errors_that_are_each_others_cause_are_given_up_too():
    """As where a recording raises the error again that its end was raised from."""
    first, end = torch.OutOfMemoryError("tried to allocate"), RuntimeError("the end of the recording fails")
    end.__cause__ = first

    def fails(*_) -> NoReturn:
        try:
            raise end
        except RuntimeError:
            raise first from None

    said, line = [], Line()
    run = CapturedMicroBatches(line.run, line.parameters, said.append, fails)
    for fields, denominator in batches(WARM_UP_MICRO_BATCHES + 1):
        run(fields, denominator)
    assert len(said) == 1


@pytest.mark.parametrize("wish", [None, True])
def test_only_a_recording_that_is_asked_for_ends_the_run(tmp_path, monkeypatch, wish):
    monkeypatch.setattr(training_loop, "CapturedMicroBatches", lambda run, parameters, give_up: give_up)
    root = tiny_config(tmp_path, trainer__accelerator="auto", model__enable_cuda_graph=wish).root
    log, ranks = SimpleNamespace(log=print), DistributedContext()
    run: Any = SimpleNamespace(resolved=resolve_run(root), uses_cuda_graph=True, logger=log, ranks=ranks)
    recorder: Any = training_loop._graph_capture(run, nn.Linear(1, 1), None, BatchSchedule(1))  # pyrefly: ignore[bad-argument-type]
    assert recorder(None) is (None if wish else print)


def test_a_failure_of_one_rank_alone_is_told(tmp_path, monkeypatch, capsys):
    seen: list[Any] = []
    monkeypatch.setattr(training_loop, "layer_capture", lambda: None)
    root = tiny_config(tmp_path, trainer__accelerator="auto", trainer__devices=2, model__enable_cuda_graph=None).root
    logger = SimpleNamespace(log=lambda line: None)  # as on all ranks but the first
    resolved, ranks = resolve_run(root, world_size=2), DistributedContext(1, 2)
    run: Any = SimpleNamespace(resolved=resolved, uses_cuda_graph=True, logger=logger, ranks=ranks)
    stack = SimpleNamespace(capture_layers=lambda build, on_failure, *others: seen.append(on_failure))
    model: Any = SimpleNamespace(stacks=[stack])
    assert training_loop._graph_capture(run, model, None, BatchSchedule(1)) is None
    seen[0](torch.OutOfMemoryError("tried to allocate"))
    assert "rank 1: warning: out of memory while capturing" in capsys.readouterr().err


def test_what_cannot_be_recorded_is_refused_before_anything_is_built(tmp_path):
    yes, perhaps, no = (
        tiny_config(tmp_path, trainer__accelerator="auto", model__enable_cuda_graph=wish).root
        for wish in (True, None, False)
    )
    says = r"`model\.enable_cuda_graph` \(True\).*this run is on cpu.*enable_cuda_graph=False"
    for processes in (1, 2):
        with pytest.raises(UserError, match=says):
            uses_cuda_graph(yes, torch.device("cpu"), processes)
        assert not uses_cuda_graph(perhaps, torch.device("cpu"), processes)
    for processes in (1, 2):  # micro batches, layers
        found = [uses_cuda_graph(root, torch.device("cuda"), processes) for root in (yes, perhaps, no)]
        assert found == [True, True, False]


ONE = {"model__tensor_model_parallel_size": 1}
EXPERT_RANKS = {
    "model__num_moe_experts": 4, "model__moe_router_topk": 2, "model__expert_model_parallel_size": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, None),
        ({"model__sequence_parallel": True}, None),
        ({"model__sequence_parallel": True, "model__ub_tp_comm_overlap": True}, "ub_tp_comm_overlap"),
        ({"trainer__devices": 4}, None),
        ({"trainer__devices": 4, "model__sequence_parallel": True, "model__ub_tp_comm_overlap": True}, "overlap"),
        (ONE | EXPERT_RANKS, None),
        (ONE | EXPERT_RANKS | {"model__moe_grouped_gemm": False}, None),
        (ONE | EXPERT_RANKS | {"model__fp8": True}, "`fp8` (True)"),
        (ONE, None),
        (ONE | {"model__optim__name": "distributed_fused_adam"}, None),
        (ONE | {"model__fsdp": True}, None),
        (ONE | {"model__fsdp": True, "model__fsdp_sharding_strategy": "hybrid"}, "`fsdp_sharding_strategy` (hybrid)"),
        (ONE | {"model__fsdp": True, "model__copy_engine_collectives": False}, "`copy_engine_collectives` (False)"),
        (ONE | {"model__fsdp": True, "model__fp8": True}, "`fp8` (True)"),
        (
            ONE | {"model__context_parallel_size": 2, "model__pipeline_model_parallel_size": 2, "trainer__devices": 4},
            None,
        ),
        (
            ONE | {"model__activations_checkpoint_granularity": "full"},
            "`activations_checkpoint_granularity` (full)",
        ),
    ],
)
def test_communication_that_can_be_captured_or_is_between_layers(tmp_path, capsys, settings, says):
    more = {"trainer__devices": 2, "model__tensor_model_parallel_size": 2, "model__micro_batch_size": 1, **settings}
    for wish in (True, None):
        config = tiny_config(tmp_path, trainer__accelerator="auto", model__enable_cuda_graph=wish, **more)
        run = resolve_run(config.root, world_size=more["trainer__devices"])
        reason = cuda_graph_unsupported_reason(run, torch.device("cuda"))
        assert reason is None if says is None else says in str(reason)
    words = [f"{name.replace('__', '.')}={value}" for name, value in more.items()]
    code = main(["config", "model=gpt_tiny", "trainer=gpu", "model.enable_cuda_graph=True", *words])
    assert code == (0 if says is None else 2)
    assert ("fix: model.enable_cuda_graph=False" in capsys.readouterr().err) == (says is not None)


EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model__moe_grouped_gemm": False}, "host synchronization"),
        ({"trainer__precision": "64"}, "host synchronization"),
        ({"model__moe_layer_recompute": True, "model__moe_input_jitter_eps": 0.1}, None),
        ({"model__moe_layer_recompute": True, "model__moe_dropout": 0.1}, None),
        ({"model__moe_layer_recompute": True}, None),
        ({"model__moe_input_jitter_eps": 0.1}, None),
    ],
)
def test_experts_that_cannot_be_recorded(tmp_path, settings, says):
    keys = {f"model__{name}": value for name, value in EXPERTS.items()} | {"trainer__accelerator": "auto"} | settings
    yes, perhaps = (tiny_config(tmp_path, **keys, model__enable_cuda_graph=wish).root for wish in (True, None))
    cuda = torch.device("cuda")
    assert uses_cuda_graph(perhaps, cuda, 1) == (says is None)
    if says is None:
        assert uses_cuda_graph(yes, cuda, 1)
        return
    with pytest.raises(UserError, match=says):
        uses_cuda_graph(yes, cuda, 1)


HYBRID = "model.fsdp_sharding_strategy=hybrid"


def test_keys_that_contradict_it_are_refused(capsys):
    on = ["config", "model=gpt_tiny", "model.enable_cuda_graph=True"]
    for words in (["trainer=cpu"], ["trainer=gpu", "trainer.devices=2", "model.fsdp=true", HYBRID]):
        assert main([*on, *words]) == 2
        assert "model.enable_cuda_graph=False" in capsys.readouterr().err
    assert main([*on[:2], "model.enable_cuda_graph=null", "trainer=cpu"]) == 0


SMALL = {"hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 2, "attention_backend": "triton"}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
STACK = {**SMALL, **DROPOUT, "num_layers": 2, "position_embedding_type": "relative"}
BATCHES = {"micro_batch_size": 2, "optim": {"lr": 1e-2}}
PACKED = {"data_impl": "mock", "reset_attention_mask": True, "reset_position_ids": True}
GPT = {**SMALL, **DROPOUT, **BATCHES, "num_layers": 2, "encoder_seq_length": 128}
T5_DATA = {"data_impl": "mock", "seq_length_dec": 64}
MODELS = {
    "gpt": {**GPT, "data": {"data_impl": "mock"}},
    "packed": {**GPT, "data": PACKED},
    "t5": {**BATCHES, "family": "t5", "seq_length": 128, "encoder": STACK, "decoder": STACK, "data": T5_DATA},
}


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
@pytest.mark.parametrize("global_batch", [2, 6])
@pytest.mark.parametrize("model", MODELS)
def test_gpu_recorded_runs_end_in_the_same_bits(tmp_path, model, global_batch, precision):
    """With dropout, by main weights and by autocast, one micro batch a step and three."""
    ends = []
    for on in (False, True):
        directory = tmp_path / str(on)
        document = tiny_document(directory, trainer__accelerator="gpu", trainer__precision=precision)
        document["model"] = {**MODELS[model], "global_batch_size": global_batch, "enable_cuda_graph": on}
        run_training(RunConfig(RootBlock.model_validate(document), document=document))
        ends.append(final_hashes(directory, 8))
    assert ends[0] == ends[1]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # for it fails at its first call
def test_gpu_what_waits_for_the_device_is_one_clear_error():
    weight = nn.Parameter(torch.ones((), device="cuda"))

    def waits(fields, denominator):
        return fields["x"] * weight.item()

    fields, one = {"x": torch.ones(3, device="cuda")}, torch.ones((), device="cuda")
    with pytest.raises(UserError, match="cannot be captured"):
        capture(waits, fields, one, [weight])
    assert (torch.ones(2, device="cuda") + 1).sum() == 4  # the device goes on


@pytest.mark.gpu
@pytest.mark.parametrize("failure", ["memory", "wait"])
def test_gpu_training_goes_on_after_a_recording_that_fails(failure):
    """With dropout, whose generator a recording takes over; the same gradients, on the same stream."""
    weight = nn.Parameter(torch.ones(1000, device="cuda"))
    fields, one = {"x": torch.ones(1000, device="cuda")}, torch.ones((), device="cuda")
    stream, said = torch.cuda.current_stream(), []

    def run(fields, denominator):
        loss = nn.functional.dropout(fields["x"] * weight, 0.5).sum() / denominator
        if torch.cuda.is_current_stream_capturing():
            torch.empty(1 << 50, device="cuda") if failure == "memory" else loss.item()
        loss.backward()
        return loss.detach()

    def three(step):
        weight.grad = None
        for number in range(3):
            torch.manual_seed(number)
            step(fields, one)
        gradient = weight.grad
        assert gradient is not None
        return gradient

    recorded = CapturedMicroBatches(run, [weight], said.append)
    wanted = three(run)
    for _ in range(3):
        assert torch.equal(three(recorded), wanted)
    assert len(said) == 1
    assert torch.cuda.current_stream() == stream


class SameMemory(torch.autograd.Function):
    """Identity whose gradients are all in the same memory, like those of a CUDA graph."""

    gradient = torch.zeros(1, 1, 2)

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return SameMemory.gradient.copy_(gradients[0]).detach()


def test_gradients_for_other_stages_outlive_the_next_pass():
    """That of what a stage has received is sent while its graphs write that of the next micro batch."""
    stages = PipelineSplit(ranks=2).stages(2)
    shapes = StageShapes(
        micro_batch=1, lengths=(1,), hidden_size=2, dtype=torch.float32, residual_dtypes=(torch.float32,)
    )
    own, ranks = RankStages(stages[1:], {}, ()), DistributedContext(1, 2)
    pipeline = Pipeline(own, stages, shapes, ranks, torch.device("cpu"), lambda: None, reuses_gradients=True)
    pipeline._run = lambda micro_batch, given: ((micro_batch + 1) * SameMemory.apply(given.received[0]).sum(),)
    received: list[Any] = [torch.ones(1, 1, 2, requires_grad=True) for _ in range(2)]
    for micro_batch, each in enumerate(received):
        (loss,) = pipeline.run_stage(stages[1], (each,), micro_batch)
        loss.backward()
    assert [each.grad.tolist() for each in received] == [[[[1.0, 1.0]]], [[[2.0, 2.0]]]]
