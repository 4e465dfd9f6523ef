"""LoRA fine-tuning benchmark: `experiment=llama_1b_lora` and transformers with peft; see `rounds.py` for the method.

    python scripts/bench/lora_step.py [--micro-batch 4] [--rounds 3] [--only stoker hf_layers ...] [--seconds 500]
        [--results FILE.jsonl]

Shape (`conf/model/llama_1b.yaml`): 24 layers, hidden 2048, 16 heads, 4 query groups, SwiGLU 5632, vocabulary 32000.
LoRA of rank 16, alpha 32, without dropout, on the seven linear layers of each layer; the other weights are frozen in
bf16. Rows of 4096 random tokens, every one a label, AdamW, clipping to 1.0.

A row is one document, for which every contender uses its fastest attention; in `*_packed` it is several documents of
128 to 1024 tokens with attention within each document only: stoker through `data=sft`, transformers through
`position_ids` that restart, from which it builds a mask for SDPA or a block mask for FlexAttention.

The peers have bf16 adapters too, without autocast, their fastest and smallest setting; `hf_autocast` is peft's default:
fp32 adapters, bf16 autocast. In `hf_liger` Liger's kernels (norm, rotary embedding, SwiGLU, head with loss) replace
those of transformers, in `hf_layers_liger*` only its head with loss, as the compiler fuses operations within layers.
"""

from __future__ import annotations

import json
import random
import string
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from peers import Shape, finish_step
from rounds import Length, Row, result, run_benchmark, stoker_result, time_windows

RANK, ALPHA = 16, 32
DOCUMENT_TOKENS = (128, 1024)
"""Shortest and longest document in a packed row."""
LENGTH = Length(warm_up=12, windows=4, window=5)
Step = Callable[[], object]


def hf_lora(
    shape: Shape,
    *,
    compiled: Literal["no", "layers", "whole"] = "no",
    liger: bool = False,
    autocast: bool = False,
    packed: bool = False,
    attention: str = "sdpa",
) -> Step:
    """Train step of transformers' LlamaForCausalLM in bf16 with peft's LoRA.

    Args:
        shape: of the model and the batch.
        compiled: compile nothing, each layer, or the whole model.
        liger: use Liger's kernels; if layers are compiled, only its head with loss.
        autocast: fp32 adapters under bf16 autocast.
        packed: several documents per row.
        attention: transformers' name of the attention implementation.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config_values: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.groups,
        "max_position_embeddings": shape.sequence,
        "tie_word_embeddings": False,
        "use_cache": False,
        "attn_implementation": attention,
    }
    with torch.device("cuda"):
        base: Any = LlamaForCausalLM(LlamaConfig(**config_values))
    base.to(torch.bfloat16)
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        in_layers = compiled == "no"
        apply_liger_kernel_to_llama(model=base, rope=in_layers, rms_norm=in_layers, swiglu=in_layers)
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = get_peft_model(base, lora, autocast_adapter_dtype=autocast)
    model.train()
    run = model
    if compiled == "layers":
        # so the mask is built outside of compiled code, where transformers detects that it is causal and omits it
        for layer in base.model.layers:
            layer.compile()
    elif compiled == "whole":
        run = torch.compile(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=True)
    generator, rng = torch.Generator(device="cuda").manual_seed(0), random.Random(0)

    def loss_of(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        more: dict[str, Any] = {"position_ids": position_ids(shape, rng).cuda()} if packed else {}
        if liger:  # fused head and loss; transformers shifts `labels` itself unless `shift_labels` is given
            return run(input_ids=tokens, labels=labels, shift_labels=labels, **more).loss
        logits = run(input_ids=tokens, **more).logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    def step() -> object:
        size = (shape.micro_batch, shape.sequence + 1)
        drawn = torch.randint(0, shape.vocab, size, device="cuda", generator=generator)
        with torch.autocast("cuda", torch.bfloat16) if autocast else nullcontext():
            loss = loss_of(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())
        return finish_step(loss, trained, optimizer)

    return step


def document_length(rng: random.Random) -> int:
    return rng.randint(*DOCUMENT_TOKENS)


def position_ids(shape: Shape, rng: random.Random) -> torch.Tensor:
    """Positions within each document, (B, S) int64; documents of random lengths fill each row."""
    rows = []
    for _ in range(shape.micro_batch):
        row: list[int] = []
        while len(row) < shape.sequence:
            row += range(min(document_length(rng), shape.sequence - len(row)))
        rows.append(row)
    return torch.tensor(rows)


def write_pairs(file: Path) -> None:
    """Write random prompts with answers, one token per byte, enough for all steps."""
    rng = random.Random(0)
    with file.open("w") as out:
        for _ in range(4000):
            text = "".join(rng.choices(string.ascii_lowercase, k=document_length(rng) - 2))
            half = len(text) // 2
            out.write(json.dumps({"input": text[:half], "output": text[half:]}) + "\n")


STOKER: dict[str, tuple[str, list[str]]] = {
    "stoker": ("stoker: `stoker train experiment=llama_1b_lora`", []),
    "stoker_no_graph": ("stoker, `model.enable_cuda_graph=False`", ["model.enable_cuda_graph=False"]),
    "stoker_packed": (
        "stoker, packed: `data=sft`",
        ["data=sft", "model.answer_only_loss=false", "model.data.splits_string='1,0,0'"],
    ),
}
PEERS: dict[str, tuple[str, Callable[[Shape], Step]]] = {
    "hf": ("HF + peft", hf_lora),
    "hf_autocast": ("HF + peft, fp32 adapters under autocast", partial(hf_lora, autocast=True)),
    "hf_layers": ("HF + peft, each layer compiled", partial(hf_lora, compiled="layers")),
    "hf_whole": ("HF + peft, the whole model compiled", partial(hf_lora, compiled="whole")),
    "hf_liger": ("HF + peft + Liger", partial(hf_lora, liger=True)),
    "hf_layers_liger": (
        "HF + peft, each layer compiled, Liger's head and loss",
        partial(hf_lora, compiled="layers", liger=True),
    ),
    "hf_layers_packed": ("HF + peft, packed, each layer compiled", partial(hf_lora, compiled="layers", packed=True)),
    "hf_layers_flex_packed": (
        "HF + peft, packed, each layer compiled, FlexAttention",
        partial(hf_lora, compiled="layers", packed=True, attention="flex_attention"),
    ),
    "hf_layers_flex_liger_packed": (
        "HF + peft, packed, each layer compiled, FlexAttention, Liger's head and loss",
        partial(hf_lora, compiled="layers", liger=True, packed=True, attention="flex_attention"),
    ),
    "hf_layers_liger_packed": (
        "HF + peft, packed, each layer compiled, Liger's head and loss",
        partial(hf_lora, compiled="layers", liger=True, packed=True),
    ),
}
TITLES = {name: title for name, (title, _) in {**STOKER, **PEERS}.items()}


def measure(name: str, micro_batch: int) -> Row:
    """Run one contender in this process."""
    shape = Shape(micro_batch=micro_batch)
    tokens = shape.micro_batch * shape.sequence
    if name in STOKER:
        batch = [f"model.micro_batch_size={shape.micro_batch}", f"model.global_batch_size={shape.micro_batch}"]
        with tempfile.TemporaryDirectory() as folder:
            more = list(STOKER[name][1])
            if "data=sft" in more:
                write_pairs(Path(folder) / "pairs.jsonl")
                more.append(f"model.data.path={folder}/pairs.jsonl")
            return stoker_result(name, ["experiment=llama_1b_lora", *batch, *more], LENGTH, tokens)
    return result(name, time_windows(PEERS[name][1](shape), LENGTH), tokens)


if __name__ == "__main__":
    run_benchmark(
        __file__, __doc__, TITLES, measure, lambda _: ["lora", "lora_packed"], option="--micro-batch", cases=[4]
    )
