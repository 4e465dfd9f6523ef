"""Several ranks train what one trains, on every axis, and one goes on from what they have saved.

On a GPU for each rank, with NCCL; of one GPU two ranks share it and communicate through host memory; with
STOKER_TEST_RANKS=2 and no GPU they are processes on gloo. Layouts of more ranks than there are GPUs are skipped.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from distributed_runs import tensors
from fork_server import ForkServer
from gpu_ranks import Job, rows, train_all

DEVICES = torch.cuda.device_count()
RANKS = int(os.environ.get("STOKER_TEST_RANKS", DEVICES if DEVICES != 1 else 2))
"""Ranks at most."""
Run = Callable[["Case"], tuple[Path, Path, Path]]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(RANKS < 2, reason="needs a GPU, or STOKER_TEST_RANKS=2")]

STEPS, MORE_STEPS = 4, 2
SECONDS = 90 if DEVICES else 300
"""Timeout of a run."""
RUN = [
    f"trainer.accelerator={'gpu' if DEVICES else 'cpu'}",
    "data=mock",
    f"trainer.val_check_interval={STEPS}",
    "trainer.limit_val_batches=2",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
    "trainer.gradient_clip_val=0.5",
    "exp_manager.create_tensorboard_logger=false",
    "exp_manager.create_report=false",
    "exp_manager.checkpoint_callback_params.save_top_k=-1",
    "model.micro_batch_size=1",
    "model.optim.eps=1e-4",  # with the default, Adam makes steps of gradients that are rounding
    "model.optim.sched.max_steps=20",
]
GPT = [
    "model=gpt_tiny",
    "model.num_layers=2",
    "model.num_query_groups=2",
    "model.encoder_seq_length=128",
    "model.global_batch_size=4",
    "model.activation=fast-swiglu",
    "model.bias=false",
    "model.hidden_dropout=0.1",
]
EXPERTS = [
    "model.num_moe_experts=4",
    "model.moe_router_topk=2",
    "model.moe_shared_expert_intermediate_size=128",
    "model.moe_input_jitter_eps=0.01",
    "model.moe_router_load_balancing_type=aux_loss",
    "model.moe_aux_loss_coeff=0.02",
]
T5 = ["model=t5_tiny", "model.seq_length=128", "model.data.seq_length_dec=64", "model.global_batch_size=4"]
T5 += [f"model.{stack}.num_layers=2" for stack in ("encoder", "decoder")]
BERT = ["model=bert_tiny", "model.hidden_dropout=0.1", "model.global_batch_size=4"]
LORA = ["model.peft.peft_scheme=lora", "model.peft.lora_tuning.target_modules=[all]"]
RECOMPUTE = ["model.activations_checkpoint_granularity=full", "model.activations_checkpoint_method=block"]
RECOMPUTE += ["model.activations_checkpoint_num_layers=1"]
MODELS: dict[str, list[str]] = {
    "gpt": GPT,
    "one micro batch": [*GPT, "model.global_batch_size=1"],
    "deep": [*GPT, "model.num_layers=4"],
    "experts": [*GPT, *EXPERTS],
    "t5": T5,
    "bert": BERT,
    "lora": [*GPT, *LORA],
    "recompute": [*GPT, *RECOMPUTE],
    "selective": [*GPT, "model.activations_checkpoint_modules=[mlp_activation,norm]"],
    "offload": [*GPT, "model.cpu_offloading=true", "model.cpu_offloading_num_layers=1"],
    "offloaded optimizer": [*GPT, "model.cpu_offloading_optimizer=true"],
    "weights in fp8": [*GPT, "model.normalization=rmsnorm", "model.fp8=true", "model.fp8_params=true"],
}

ZERO1 = ["model.optim.name=distributed_fused_adam"]
FSDP = ["model.fsdp=true"]
NCCL = "model.copy_engine_collectives=false"
AT_ONCE = "model.optim.overlap_param_sync=false"
BF16_SUMS = ["model.fsdp_grad_reduce_dtype=bf16"]
GRAPHS = ["model.enable_cuda_graph=true"]


def tensor(ranks: int = 2) -> list[str]:
    return [f"model.tensor_model_parallel_size={ranks}"]


def sequence(ranks: int = 2) -> list[str]:
    return [*tensor(ranks), "model.sequence_parallel=true"]


def overlap(*off: str) -> list[str]:
    return [*sequence(), "model.ub_tp_comm_overlap=true", *(f"model.tp_comm_overlap_{kind}=false" for kind in off)]


def context(exchange: str, ranks: int = 2) -> list[str]:
    return [f"model.context_parallel_size={ranks}", f"model.cp_comm_type={exchange}"]


def expert(dispatcher: str = "alltoall", ranks: int = 2) -> list[str]:
    return [f"model.expert_model_parallel_size={ranks}", f"model.moe_token_dispatcher_type={dispatcher}"]


def pipeline(ranks: int = 2, stages: int = 1) -> list[str]:
    virtual = [f"model.virtual_pipeline_model_parallel_size={stages}"] if stages > 1 else []
    return [f"model.pipeline_model_parallel_size={ranks}", *virtual]


T5_PIPELINE = [*pipeline(), "model.pipeline_model_parallel_split_rank=1"]
HYBRID = [*FSDP, "model.fsdp_sharding_strategy=hybrid", "model.fsdp_shard_size=2"]
RINGS_OF_HEADS = [*context("a2a+p2p", 4), "model.hierarchical_context_parallel_sizes=[2,2]"]
TWO: dict[str, list[str]] = {
    "ddp": [],
    "zero1": ZERO1,
    "grad": [*FSDP, "model.fsdp_sharding_strategy=grad"],
    "full": FSDP,
    "zero1, at once": [*ZERO1, AT_ONCE],
    "zero1, at once, NCCL": [*ZERO1, AT_ONCE, NCCL],
    "grad, at once": [*FSDP, "model.fsdp_sharding_strategy=grad", AT_ONCE],
    "ddp, NCCL": [NCCL],
    "zero1, NCCL": [*ZERO1, NCCL],
    "full, NCCL": [*FSDP, NCCL],
    "tensor": tensor(),
    "sequence": sequence(),
    "overlap": overlap(),
    "overlapped gathers": overlap("rs"),
    "overlapped scatters": overlap("ag"),
    "p2p": context("p2p"),
    "all_gather": context("all_gather"),
    "a2a": context("a2a"),
    "pipeline": pipeline(),
    "interleaved": pipeline(stages=2),
    "t5 pipeline": T5_PIPELINE,
    "alltoall": expert("alltoall"),
    "allgather": expert("allgather"),
    "alltoall, zero1": [*expert(), *ZERO1],
    "alltoall, full": [*expert(), *FSDP],
    "alltoall, sequence": [*expert(), *sequence()],
    "allgather, sequence": [*expert("allgather"), *sequence()],
    "alltoall, p2p": [*expert(), *context("p2p")],
    "flex": expert("flex"),
    "flex, full": [*expert("flex"), *FSDP],
    "flex, sequence": [*expert("flex"), *sequence()],
    "ddp, graphs": GRAPHS,
    "zero1, graphs": [*ZERO1, *GRAPHS],
    "alltoall, graphs": [*expert(), *GRAPHS],
    "flex, zero1, graphs": [*expert("flex"), *ZERO1, *GRAPHS],
    "p2p, graphs": [*context("p2p"), *GRAPHS],
    "all_gather, graphs": [*context("all_gather"), *GRAPHS],
    "a2a, graphs": [*context("a2a"), *GRAPHS],
    "pipeline, graphs": [*pipeline(), *GRAPHS],
    "interleaved, graphs": [*pipeline(stages=2), *GRAPHS],
    "t5 pipeline, graphs": [*T5_PIPELINE, *GRAPHS],
    "grad, graphs": [*FSDP, "model.fsdp_sharding_strategy=grad", *GRAPHS],
    "full, graphs": [*FSDP, *GRAPHS],
    "flex, full, graphs": [*expert("flex"), *FSDP, *GRAPHS],
}
FOUR: dict[str, list[str]] = {
    "ddp": [],
    "hybrid": HYBRID,
    "zero1, tensor": [*ZERO1, *tensor()],
    "full, sequence": [*FSDP, *sequence()],
    "tensor": tensor(4),
    "sequence": sequence(4),
    "p2p": context("p2p", 4),
    "all_gather": context("all_gather", 4),
    "a2a+p2p": RINGS_OF_HEADS,
    "p2p, sequence": [*context("p2p"), *sequence()],
    "a2a, sequence": [*context("a2a"), *sequence()],
    "pipeline": pipeline(4),
    "pipeline, tensor": [*pipeline(), *tensor()],
    "pipeline, zero1": [*pipeline(), *ZERO1],
    "pipeline, full": [*pipeline(), *FSDP],
    "interleaved, sequence": [*pipeline(stages=2), *sequence()],
    "t5 pipeline, sequence": [*T5_PIPELINE, *sequence()],
    "alltoall": expert(ranks=4),
    "alltoall 2, full": [*expert(), *FSDP],
    "allgather 2, zero1": [*expert("allgather"), *ZERO1],
    "alltoall 2, pipeline": [*expert(), *pipeline()],
    "alltoall, p2p, sequence": [*expert(ranks=4), *context("p2p"), *sequence()],
    "flex": expert("flex", 4),
    "flex 2, pipeline": [*expert("flex"), *pipeline()],
    "sequence, zero1, graphs": [*sequence(), *ZERO1, *GRAPHS],
    "pipeline, sequence, graphs": [*pipeline(), *sequence(), *GRAPHS],
    "interleaved, tensor, graphs": [*pipeline(stages=2), *tensor(), *GRAPHS],
    "a2a+p2p, graphs": [*RINGS_OF_HEADS, *GRAPHS],
    "pipeline, full, graphs": [*pipeline(), *FSDP, *GRAPHS],
    "flex 2, pipeline, graphs": [*expert("flex"), *pipeline(), *GRAPHS],
}
EIGHT: dict[str, list[str]] = {
    "ddp": [],
    "hybrid": [*FSDP, "model.fsdp_sharding_strategy=hybrid", "model.fsdp_shard_size=4"],
    "pipeline, sequence, zero1": [*pipeline(), *sequence(), *ZERO1],
    "pipeline, sequence, p2p": [*pipeline(), *sequence(), *context("p2p")],
    "interleaved 4, sequence": [*pipeline(4), *sequence()],
    "p2p": context("p2p", 8),
    "alltoall 4, pipeline, sequence": [*expert(ranks=4), *pipeline(), *sequence()],
}
LAYOUTS = {2: TWO, 4: FOUR, 8: EIGHT}
DENSE = ["ddp", "zero1", "grad", "full", "tensor", "sequence", "p2p", "all_gather", "a2a", "pipeline"]
GATHERS = ["zero1, at once", "zero1, at once, NCCL", "grad, at once"]
OVERLAPS = ["overlap", "overlapped gathers", "overlapped scatters"]
DISPATCHERS = [name for name in TWO if name.startswith(("alltoall", "allgather", "flex"))]
CAPTURED = [f"{name}, graphs" for name in ("ddp", "zero1", "p2p", "all_gather", "a2a", "pipeline", "grad", "full")]
SOME = ["zero1", "full", "sequence", "p2p", "pipeline"]
RUNS: dict[tuple[str, int], list[str]] = {
    ("gpt", 2): [*DENSE, *CAPTURED, *GATHERS, "ddp, NCCL", "zero1, NCCL", "full, NCCL", *OVERLAPS],
    ("one micro batch", 2): ["pipeline"],
    ("deep", 2): [
        "interleaved",
        "zero1",
        "zero1, NCCL",
        "grad",
        "full",
        *GATHERS,
        "zero1, graphs",
        "interleaved, graphs",
        "full, graphs",
    ],  # more layers than memory of gathered weights has slots
    ("experts", 2): ["ddp", "zero1", "full", "sequence", "p2p", "all_gather", "a2a", "pipeline", *DISPATCHERS],
    ("t5", 2): [
        *(name for name in DENSE if name not in ("p2p", "pipeline")),
        "overlap",
        "t5 pipeline",
        "zero1, graphs",
        "t5 pipeline, graphs",
    ],
    ("bert", 2): [*DENSE, "ddp, graphs"],
    ("lora", 2): [*SOME, "zero1, graphs"],
    ("recompute", 2): [*SOME, "ddp"],
    ("selective", 2): ["full", "sequence", "p2p"],
    ("offload", 2): ["ddp", "zero1", "grad", "sequence"],
    ("offloaded optimizer", 2): ["zero1", "full", "tensor"],
    ("weights in fp8", 2): ["ddp", "zero1", "zero1, NCCL", "grad", "tensor", "pipeline"],
    ("deep", 4): [name for name in FOUR if not name.startswith(("alltoall", "allgather", "flex", "t5", "a2a,"))],
    ("t5", 4): ["t5 pipeline, sequence", "a2a, sequence", "hybrid"],
    ("experts", 4): [name for name in FOUR if name.startswith(("alltoall", "allgather", "flex"))],
    ("deep", 8): [name for name in EIGHT if not name.startswith("alltoall")],
    ("experts", 8): ["alltoall 4, pipeline, sequence"],
}
COMPILED = {
    ("gpt", 2): ["ddp", "zero1", "grad", "full", "tensor", "sequence", *CAPTURED],
    ("t5", 2): ["zero1, graphs", "t5 pipeline, graphs"],
    ("deep", 4): ["pipeline, tensor", "hybrid", "pipeline, sequence, graphs"],
    ("experts", 2): ["alltoall, full", "flex, full", "flex, zero1, graphs", "flex, full, graphs"],
}


class Precision(NamedTuple):
    """Keys of a precision, and the bounds of relative differences to one rank.

    Attributes:
        keys: the keys.
        losses: bound of losses and gradient norms.
        weights: bound of the difference of a tensor, by norm; biases, which start at zero, are nothing but updates.
    """

    keys: list[str]
    losses: float
    weights: float


PRECISIONS = {
    "fp32": Precision(["trainer.precision=32", "model.compile=false", "model.enable_cuda_graph=false"], 1e-5, 1e-5),
    "bf16": Precision(["trainer.precision=bf16", "model.compile=false", "model.enable_cuda_graph=false"], 2e-2, 0.1),
    "compiled": Precision(
        ["trainer.precision=bf16-mixed", "model.compile=true", "model.enable_cuda_graph=false"], 2e-2, 0.1
    ),
}


class Case(NamedTuple):
    """A run of several ranks.

    Attributes:
        model: its name in `MODELS`.
        ranks: number of ranks.
        layout: its name.
        keys: keys of the layout.
        precision: its name in `PRECISIONS`.
        resumes: one rank goes on from its checkpoint.
    """

    model: str
    ranks: int
    layout: str
    keys: list[str]
    precision: str
    resumes: bool = False

    @property
    def group(self) -> str:
        """Return the name of the cases that run in the same processes, one after the other."""
        part = "" if self.precision == "compiled" else "others" if self.model in ("experts", "t5", "bert") else "gpt"
        return f"{self.precision} {part}"

    @property
    def shared_keys(self) -> list[str]:
        """Return the keys that one rank and several have."""
        keys = [*MODELS[self.model], *PRECISIONS[self.precision].keys]
        is_gpt = GPT[0] in keys
        if DEVICES and self.precision == "fp32" and is_gpt:
            keys.append("model.attention_backend=triton")  # without TensorFloat-32
        return keys

    def directories(self, folder: Path) -> tuple[Path, Path, Path]:
        """Return the run directories of one rank, of several, and of the one that goes on."""
        own = folder / f"{self.model}-{self.ranks}-{self.layout.replace(', ', '-')}-{self.precision}"
        return folder / f"{self.model}-{self.precision}", own / "together", own / "resumed"

    def jobs(self, folder: Path) -> list[Job]:
        """Return the runs."""
        alone, together, resumed = self.directories(folder)
        jobs = [
            job(1, alone, self.shared_keys, STEPS + MORE_STEPS),
            job(self.ranks, together, [*self.shared_keys, *self.keys], STEPS),
        ]
        if self.resumes:
            start = [f"exp_manager.resume_from_checkpoint={together}/checkpoints/step-{STEPS}"]
            jobs.append(job(1, resumed, [*self.shared_keys, *start], STEPS + MORE_STEPS))
        return jobs


def job(ranks: int, directory: Path, keys: list[str], steps: int) -> Job:
    words = {word.partition("=")[0]: word for word in [*RUN, *keys]}  # the last one of a key
    return Job(ranks, str(directory), [*words.values(), f"trainer.devices={ranks}", f"trainer.max_steps={steps}"])


def all_cases() -> list[Case]:
    cases: list[Case] = []
    resumed: set[tuple[int, str]] = set()
    for (model, ranks), names in RUNS.items():
        for name in names:
            keys = LAYOUTS[ranks][name]
            if "model.fp8=true" not in MODELS[model]:
                cases.append(Case(model, ranks, name, keys, "fp32", (ranks, name) not in resumed))
                resumed.add((ranks, name))
            cases.append(Case(model, ranks, name, keys, "bf16"))
            if name in COMPILED.get((model, ranks), []):
                cases.append(Case(model, ranks, name, keys, "compiled"))
    for name in ("ddp, NCCL", "zero1, NCCL", "full, NCCL"):
        cases.append(Case("gpt", 2, f"{name}, bf16 sums", [*TWO[name], *BF16_SUMS], "bf16"))
    return sorted(cases, key=lambda case: case.group)


def params() -> Iterator[object]:
    for case in all_cases():
        available = DEVICES if case.layout.startswith("flex") or case.layout.endswith("graphs") else RANKS
        missing = pytest.mark.skipif(case.ranks > available, reason=f"needs {case.ranks} GPUs")
        name = f"{case.model}-{case.ranks} {case.layout}-{case.precision}"
        yield pytest.param(case, id=name, marks=[missing, pytest.mark.xdist_group(case.group)])


class Batch:
    """The runs of cases, in the background.

    Args:
        forks: fork server.
        folder: parent of the run directories.
        cases: the cases.
    """

    def __init__(self, forks: ForkServer, folder: Path, cases: list[Case]) -> None:
        self._results = folder / f"{cases[0].group}.jsonl"
        jobs = {each.directory: each for case in cases for each in case.jobs(folder)}
        call = "gpu_ranks", train_all.__name__, str(self._results), list(jobs.values()), SECONDS
        self._thread = threading.Thread(target=forks.call, args=call)
        self._thread.start()

    def error(self, directory: Path) -> str:
        """Wait for the end of a run; return its error."""
        while True:
            alive = self._thread.is_alive()
            text = self._results.read_text() if self._results.exists() else ""
            for line in text.splitlines(keepends=True):
                if line.endswith("\n") and json.loads(line)[0] == str(directory):
                    return json.loads(line)[1]
            assert alive, f"{directory} did not run"
            time.sleep(0.05)

    def end(self) -> None:
        """Wait for the end of all."""
        self._thread.join()


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, forks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Yield a function that waits for the runs of a case, and returns their directories."""
    folder = tmp_path_factory.mktemp("runs")
    batches: dict[str, Batch] = {}
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    given: list[Case] = [item.callspec.params["case"] for item in items if hasattr(item, "callspec")]
    cases = [case for case in given if case.ranks <= RANKS]

    def run(case: Case) -> tuple[Path, Path, Path]:
        if case.group not in batches:
            for batch in batches.values():
                batch.end()
            batches[case.group] = Batch(forks, folder, [each for each in cases if each.group == case.group])
        directories = case.directories(folder)
        for directory in directories[: 3 if case.resumes else 2]:
            if error := batches[case.group].error(directory):
                pytest.fail(f"{directory.name}: {error}", pytrace=False)
        return directories

    yield run
    for batch in batches.values():
        batch.end()


@pytest.mark.parametrize("case", list(params()))
def test_ranks_train_what_one_trains_and_one_goes_on(case: Case, run: Run) -> None:
    precision = PRECISIONS[case.precision]
    alone, together, resumed = run(case)
    names = ("loss", "grad_norm", "val_loss")
    wanted = {key: value for key, value in rows(alone, *names).items() if key[0] <= STEPS}
    assert rows(together, *names) == pytest.approx(wanted, rel=precision.losses)
    compare_weights(together, alone, STEPS, precision.weights)
    if DEVICES or (not case.layout.startswith("overlap") and "offload" not in case.model):
        assert not [line for line in (together / "run.log").read_text().splitlines() if "has no effect" in line]
    if case.resumes:
        later = {key: value for key, value in rows(alone, *names).items() if key[0] > STEPS}
        assert rows(resumed, *names) == pytest.approx(later, rel=2 * precision.losses)
        compare_weights(resumed, alone, STEPS + MORE_STEPS, 2 * precision.weights)


def compare_weights(directory: Path, other: Path, step: int, bound: float) -> None:
    kind = "adapter" if list((directory / "checkpoints" / f"step-{step}").glob("adapter*.safetensors")) else "model"
    found, wanted = (tensors(each / "checkpoints" / f"step-{step}", kind) for each in (directory, other))
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        difference = (found[name] - weight).double().norm() / weight.double().norm().clamp(min=1e-3)
        assert difference <= bound, f"{name}: {difference:.1e}"


@pytest.mark.skipif(DEVICES < 2, reason="needs 2 GPUs")
@pytest.mark.xdist_group("graphs under autocast")
def test_graphs_have_the_bits_of_eager_layers_under_autocast(forks: ForkServer, tmp_path: Path) -> None:
    keys = [*MODELS["experts"], "trainer.precision=bf16-mixed", "model.compile=false", "trainer.deterministic=true"]
    layouts = {"alltoall": expert(), "p2p": context("p2p")}
    jobs = {
        (name, graphs): job(
            2, tmp_path / f"{name}-{graphs}", [*keys, *layout, f"model.enable_cuda_graph={graphs}"], STEPS
        )
        for name, layout in layouts.items()
        for graphs in (False, True)
    }
    results = tmp_path / "results.jsonl"
    forks.call("gpu_ranks", train_all.__name__, str(results), list(jobs.values()), SECONDS)
    assert [json.loads(line)[1] for line in results.read_text().splitlines()] == [""] * len(jobs)
    for name in layouts:
        eager, captured = (Path(jobs[name, graphs].directory) for graphs in (False, True))
        assert "layers run as CUDA graphs" in (captured / "run.log").read_text()
        compare_weights(captured, eager, STEPS, 0.0)
