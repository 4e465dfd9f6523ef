"""Adapters in the format of Hugging Face's peft, both ways, and merged models, against peft and transformers."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapter_runs import base_folder, finetune, our_logits, some_tokens, their_logits
from hf_folders import random_model, tensors_of
from safetensors.torch import load_file, save_file
from tiers import extra

from stoker.models.parallel.layout import ParallelLayout
from stoker.trainer.conversion.adapter_weights import load_pretrained_adapter
from stoker.trainer.conversion.convert_adapters import convert_adapter
from stoker.trainer.conversion.load_model import load_model
from stoker.trainer.distributed.process_group import DistributedContext
from stoker.trainer.utils.errors import UserError

pytestmark = pytest.mark.skipif(not find_spec("peft"), reason="peft is not installed")
DRAWN = "model.peft.lora_tuning.row_init_method=normal"
FAST = [("llama", "lora")]
EVERY = [
    (name, scheme)
    for name in ("llama", "qwen2", "gpt2", "gpt_neox", "mixtral", "t5_v1_1", "bert")
    for scheme in ("lora", "ia3")
    if (name, scheme) in FAST or (extra(name) and (name, scheme) != ("mixtral", "ia3"))  # experts have no factors
]


THEIR_WARNINGS = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"
)


def convert(source: Path, target: Path, **options: Any) -> list[str]:
    arguments: dict[str, Any] = {
        "merge": False, "to": None, "base": None, "dtype": None, "tokenizer": None, "model_type": None,
    }  # fmt: skip
    return convert_adapter(source, target, **{**arguments, **options})


def loaded(name: str, adapter: Path) -> Any:
    import peft

    return peft.PeftModel.from_pretrained(random_model(name), adapter).eval()


@pytest.mark.parametrize(("name", "scheme"), EVERY)
@THEIR_WARNINGS
def test_an_adapter_is_the_same_model_in_peft_and_merged(name: str, scheme: str, tmp_path: Path) -> None:
    base = base_folder(name, tmp_path / name)
    run = finetune(base, tmp_path / "run", *([DRAWN] if scheme == "lora" else []), peft=scheme).directory
    tokens, is_t5 = some_tokens(), name.startswith("t5")
    ours = our_logits(load_model(run, "cpu"), tokens)
    plain = their_logits(random_model(name), tokens, is_t5=is_t5)
    assert not torch.allclose(ours, plain, atol=1e-2), "the adapter does something"

    convert(run, tmp_path / "adapter")
    torch.testing.assert_close(
        their_logits(loaded(name, tmp_path / "adapter"), tokens, is_t5=is_t5), ours, atol=2e-4, rtol=1e-4
    )

    assert len(convert(run, tmp_path / "merged", merge=True)) == 1
    merged = type(random_model(name)).from_pretrained(tmp_path / "merged").eval()
    merged.config._experts_implementation = "eager"  # the others need widths that tiny experts have not
    torch.testing.assert_close(their_logits(merged, tokens, is_t5=is_t5), ours, atol=2e-4, rtol=1e-4)
    convert(run, tmp_path / "whole", merge=True, to="stoker")
    torch.testing.assert_close(our_logits(load_model(tmp_path / "whole", "cpu"), tokens), ours, atol=2e-4, rtol=1e-4)

    convert(tmp_path / "adapter", tmp_path / "back")
    torch.testing.assert_close(our_logits(load_model(tmp_path / "back", "cpu"), tokens), ours, atol=1e-5, rtol=1e-5)
    convert(tmp_path / "back", tmp_path / "again")
    first, again = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("adapter", "again"))
    assert first.keys() == again.keys()
    if not name.startswith("gpt"):  # where they have one module for three projections, ranks differ on the way back
        assert all(torch.equal(first[key], again[key]) for key in first)


@pytest.mark.parametrize("to", ["hf", "stoker"])
def test_merging_in_a_wider_dtype_does_not_round_to_that_of_the_base(to: str, tmp_path: Path) -> None:
    base = base_folder("llama", tmp_path / "llama")
    save_file({key: tensor.bfloat16() for key, tensor in tensors_of(base).items()}, base / "model.safetensors")
    run = finetune(base, tmp_path / "run", DRAWN).directory
    rounded, kept, asked = (
        convert(run, tmp_path / name, merge=True, to=to, dtype=dtype)
        for name, dtype in (("rounded", None), ("merged", torch.float32), ("asked", torch.bfloat16))
    )
    assert rounded[1:] == ["merged weights are rounded to bf16, as those of the base are; --dtype fp32 keeps them"]
    without_effect = finetune(base, tmp_path / "zero", "model.optim.lr=1e-300").directory  # B stays 0
    assert len(kept) == len(asked) == len(convert(without_effect, tmp_path / "same", merge=True, to=to)) == 1
    tokens = some_tokens()
    ours, merged = (our_logits(load_model(folder, "cpu"), tokens) for folder in (run, tmp_path / "merged"))
    torch.testing.assert_close(merged, ours, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", *extra("llama")])
@THEIR_WARNINGS
def test_virtual_tokens_are_the_same_in_peft(name: str, tmp_path: Path) -> None:
    base = base_folder(name, tmp_path / name)
    few = ["model.peft.p_tuning.virtual_tokens=3", "model.peft.p_tuning.init_std=0.5"]
    run = finetune(base, tmp_path / "run", *few, peft="ptuning").directory
    tokens = some_tokens()
    ours = our_logits(load_model(run, "cpu"), tokens)
    convert(run, tmp_path / "adapter")
    logits = their_logits(loaded(name, tmp_path / "adapter"), tokens)[:, 3:]
    torch.testing.assert_close(logits, ours, atol=2e-4, rtol=1e-4)
    with pytest.raises(UserError, match="lora, ia3 and selective can be merged"):
        convert(run, tmp_path / "merged", merge=True)


# ---------------------------------------------------------------- adapters that peft wrote


def theirs(name: str, folder: Path, **fields: Any) -> tuple[Any, Path]:
    """An adapter with random numbers on a random model, and the folder that peft saves it in."""
    import peft

    kind: Any = peft.IA3Config if "feedforward_modules" in fields else peft.LoraConfig
    model = peft.get_peft_model(random_model(name), kind(task_type="CAUSAL_LM", **fields)).eval()
    generator = torch.Generator().manual_seed(5)
    for key, parameter in model.named_parameters():
        if "lora_" in key or "ia3" in key:
            parameter.data.normal_(0, 0.3, generator=generator)
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        *extra(
            ("llama", {"r": 5, "lora_alpha": 9, "target_modules": ["q_proj", "v_proj"]}),
            (
                "llama",
                {"r": 4, "use_rslora": True, "target_modules": ["down_proj", "o_proj"], "layers_to_transform": [1]},
            ),
        ),
        (
            "qwen2",
            {
                "r": 4,
                "target_modules": ["gate_proj", "k_proj"],
                "rank_pattern": {"k_proj": 2},
                "alpha_pattern": {r"^model.layers\.0.self_attn.k_proj": 5, "k_proj": 7, "self_attn.k_proj": 9},
            },
        ),
        ("gpt2", {"r": 3, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
        *extra(("gpt_neox", {"r": 3, "target_modules": ["query_key_value", "dense"]})),
        ("llama", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value["target_modules"]),
)
@THEIR_WARNINGS
def test_their_adapter_is_the_same_model_here(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    base = base_folder(name, tmp_path / name)
    model, folder = theirs(name, tmp_path / "adapter", **fields)
    tokens = some_tokens()
    convert(folder, tmp_path / "ours", base=base)
    wanted = their_logits(model, tokens)
    torch.testing.assert_close(our_logits(load_model(tmp_path / "ours", "cpu"), tokens), wanted, atol=2e-4, rtol=1e-4)
    run = finetune(base, tmp_path / "run", f"model.peft.restore_from_path={folder}", "model.optim.lr=1e-12", peft=None)
    loaded = load_model(run.directory, "cpu")
    torch.testing.assert_close(our_logits(loaded, tokens), wanted, atol=2e-4, rtol=1e-4)
    ranks: Any = SimpleNamespace(layout=ParallelLayout(pipeline=2), tensor=None, stages=DistributedContext(1, 2))
    part, whole = load_model(run.directory, "cpu", ranks=ranks).model, dict(loaded.model.named_parameters())
    own = {parameter_name: each for parameter_name, each in part.named_parameters() if each.requires_grad}
    for parameter in own.values():
        parameter.data.fill_(7.0)
    list(load_pretrained_adapter(loaded.run, part, loaded.tokenizer, None))
    for parameter_name, parameter in own.items():
        torch.testing.assert_close(parameter, whole[parameter_name])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use_dora": True}, "`use_dora` (true) must be false"),
        ({"bias": "all"}, "`bias` (all) must be none"),
        ({"peft_type": "VERA"}, "`peft_type` (VERA) must be LORA or IA3"),
        ({"lora_alpha": "__import__"}, "`lora_alpha`"),
        ({"alpha_pattern": ["q_proj"]}, "`alpha_pattern`"),
        ({"alpha_pattern": {"layers.[01].*q_proj": 3}}, "a regular expression; write the names"),
    ],
)
@THEIR_WARNINGS
def test_what_is_not_done_here_is_told(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    base = base_folder("llama", tmp_path / "llama")
    _, folder = theirs("llama", tmp_path / "adapter", target_modules=["q_proj"])
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError) as caught:
        convert(folder, tmp_path / "ours", base=base)
    assert said in "\n".join(caught.value.lines)
    assert not (tmp_path / "ours").exists()


@THEIR_WARNINGS
def test_tensors_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    base = base_folder("llama", tmp_path / "llama")
    _, folder = theirs("llama", tmp_path / "adapter", target_modules=["q_proj"])
    file = folder / "adapter_model.safetensors"
    tensors = tensors_of(folder)
    first = next(key for key in tensors if key.endswith("lora_A.weight"))
    save_file({**tensors, first: torch.zeros(8, 7)}, file)
    with pytest.raises(UserError, match="do not fit a layer of 36 to 60"):
        convert(folder, tmp_path / "ours", base=base)
    save_file({key.replace("q_proj", "x_proj"): tensor for key, tensor in tensors.items()}, file)
    with pytest.raises(UserError, match="x_proj is not a linear layer of this model"):
        convert(folder, tmp_path / "ours", base=base)
    save_file({**tensors, "base_model.model.lm_head.lora_magnitude_vector": torch.ones(8)}, file)
    with pytest.raises(UserError) as caught:
        convert(folder, tmp_path / "ours", base=base)
    assert [line.split()[0] for line in caught.value.lines[1:]] == ["lm_head.lora_magnitude_vector"]
    save_file({**tensors, first: tensors[first].to(torch.int32)}, file)
    with pytest.raises(UserError, match="lora_A"):
        convert(folder, tmp_path / "ours", base=base)
    save_file({}, file)
    with pytest.raises(UserError, match="any tensor is missing"):
        convert(folder, tmp_path / "ours", base=base)
    save_file({key: tensor for key, tensor in tensors.items() if key != first}, file)
    with pytest.raises(UserError, match="lora_A"):
        convert(folder, tmp_path / "ours", base=base)


def test_an_adapter_of_other_weights_is_refused(tmp_path: Path) -> None:
    base = base_folder("llama", tmp_path / "llama")
    run = finetune(base, tmp_path / "run").directory
    tensors, weights = tensors_of(base), base / "model.safetensors"
    original = weights.read_bytes()
    save_file({key: tensor + 1 for key, tensor in tensors.items()}, weights)
    for act in (lambda: load_model(run, "cpu"), lambda: convert(run, tmp_path / "merged", merge=True)):
        with pytest.raises(UserError, match=r"the weights in .* differ from those"):
            act()
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="which does not exist; give its current path with --base FOLDER"):
        load_model(run, "cpu")
    (tmp_path / "elsewhere" / "model.safetensors").write_bytes(original)
    assert load_model(run, "cpu", tmp_path / "elsewhere").state.base
    convert(run, tmp_path / "adapter", base=tmp_path / "elsewhere")
    named = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(tmp_path / "elsewhere")
    for options in ({"tokenizer": "x"}, {"merge": True, "to": "stoker", "model_type": "llama"}):
        with pytest.raises(UserError, match=r"^--(tokenizer x|model-type llama).* leave it out$"):
            convert(run, tmp_path / "x", **options)
