"""GPT, T5 and BERT: which keys each has, how a family is found, and what is said of another family's keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_helpers import historical, load, problems, write

from stoker.models.config.model import FAMILIES, Family
from stoker.models.config.stack import StackKeys
from stoker.trainer.cli import main
from stoker.trainer.config import render
from stoker.trainer.config.load import config_from_document
from stoker.trainer.config.problems import ConfigError
from stoker.trainer.config.schema.key_index import schema_blocks, schema_keys
from stoker.trainer.config.schema.root import BertModelBlock, ModelBlock, RootBlock, T5ModelBlock

pytestmark = pytest.mark.usefixtures("in_tmp_path")
PRESETS = {"gpt": "gpt_tiny", "t5": "t5_tiny", "bert": "bert_tiny"}
NEMO_T5 = """
name: megatron_t5
trainer: {devices: 1, precision: 32, max_steps: 10, val_check_interval: 5}
model:
  mcore_t5: false
  micro_batch_size: 4
  global_batch_size: 8
  tensor_model_parallel_size: 1
  pipeline_model_parallel_split_rank: 0
  seq_length: 128
  max_position_embeddings: ${.seq_length}
  share_token_embeddings: true
  share_decoder_tokens_head_embeddings: true
  tokens_head_bias: true
  embedding_dropout: 0.1
  label_smoothing: 0.0
  encoder: &stack
    arch: transformer
    num_layers: 12
    hidden_size: 768
    ffn_hidden_size: 3072
    num_attention_heads: 12
    kv_channels: null
    apply_query_key_layer_scaling: false
    position_embedding_type: learned_absolute
    relative_position_bias_self_attention_only: true
    layernorm_epsilon: 1e-5
    persist_layer_norm: true
    bias_activation_fusion: true
    bias_dropout_add_fusion: true
    masked_softmax_fusion: true
    bias: true
    normalization: layernorm
    activation: gelu
    headscale: false
    transformer_block_type: pre_ln
    hidden_steps: 32
    num_self_attention_per_cross_attention: 1
    openai_gelu: false
    onnx_safe: false
    fp32_residual_connection: false
    activations_checkpoint_method: null
    activations_checkpoint_num_layers: 1
    activations_checkpoint_granularity: null
    megatron_legacy: false
    normalize_attention_scores: true
    num_moe_experts: 1
    moe_frequency: 1
    moe_dropout: 0.0
    use_flash_attention: false
  data: {data_impl: mock, dataset_type: t5}
"""


def nemo_t5(folder: Path, more: str = "") -> None:
    """NeMo's T5 file, both stacks alike; `more` are further keys of `model`."""
    head, stack = NEMO_T5.split("  encoder: &stack\n")
    stack, data = stack.split("  data:")
    write(folder, "t5", f"{head}  encoder:\n{stack}  decoder:\n{stack}{more}  data:{data}")


@pytest.mark.parametrize(("family", "block"), [("gpt", ModelBlock), ("t5", T5ModelBlock), ("bert", BertModelBlock)])
def test_a_document_is_of_the_family_it_names(family: Family, block: type) -> None:
    config = load(f"model={PRESETS[family]}")
    assert type(config.root.model) is block
    assert config_from_document(config.document).root == config.root
    assert {path for path in config.origins if path.startswith("model.")} >= {
        path for path in schema_keys(family) if path.startswith("model.") and path != "model.data.dataset_kwargs"
    }
    assert RootBlock.model_validate(config.document) == config.root


def test_nemos_t5_is_found_by_its_stacks(tmp_path: Path) -> None:
    nemo_t5(tmp_path)
    config = load(name="t5", directory=tmp_path)
    model = config.root.model
    assert isinstance(model, T5ModelBlock)
    assert (model.max_position_embeddings, model.decoder.num_layers, model.embedding_dropout) == (128, 12, 0.1)
    assert "model.decoder.persist_layer_norm" in historical(config)
    assert not [finding for finding in config.findings if finding.level == "warning"]


FLAT = """
model:
  {length}: 128
  num_layers: 2
  hidden_size: 32
  num_attention_heads: 2
  tokenizer: {{library: byte-level}}
  data: {{data_impl: mock, {data}}}
  {model}
"""


@pytest.mark.parametrize(
    ("model", "data", "family", "told_by"),
    [
        ("bert_binary_head: false", "", "bert", "model.bert_binary_head is set"),
        ("mcore_bert: true", "", "bert", "model.mcore_bert is set"),
        ("add_lm_head: true", "", "bert", "model.add_lm_head is set"),
        ("add_pooler: false", "seq_length_dec: 64", "t5", "model.data.seq_length_dec is set"),
        ("", "dataset_type: t5", "t5", "model.data.dataset_type is t5"),
        ("\nexp_manager: {name: megatron_t5_glue}", "", "t5", "exp_manager.name is megatron_t5_glue"),
        ("\nname: megatron_bert", "", "bert", "name is megatron_bert"),
        ("\nname: megatron_t5x", "", "gpt", ""),
        ("mcore_gpt: true\nname: megatron_t5", "", "gpt", ""),
        ("bert_binary_head: false\n  mcore_gpt: true", "", "gpt", ""),
        ("bert_binary_head: false\n  family: gpt", "", "gpt", ""),
    ],
)
def test_the_family_of_a_flat_file_is_told_by_its_keys(
    tmp_path: Path, model: str, data: str, family: Family, told_by: str
) -> None:
    length = "seq_length" if family == "t5" else "encoder_seq_length"
    write(tmp_path, "flat", FLAT.format(length=length, data=data, model=model))
    config = load(name="flat", directory=tmp_path)
    assert config.root.model.family == family
    notes = [(finding.message, finding.origin) for finding in config.findings if finding.keys == ("model.family",)]
    assert notes == ([(f"`{family}`, since {told_by}", "")] if told_by else [])
    if family == "t5":
        assert isinstance(config.root.model, T5ModelBlock)
        assert config.root.model.decoder.num_layers == 2


def test_the_family_of_a_file_is_told_before_a_fix_takes_its_key_away(tmp_path: Path) -> None:
    key = "model.bert_binary_head"
    write(tmp_path, "flat", FLAT.format(length="encoder_seq_length", data="", model="bert_binary_head: true"))
    assert problems(name="flat", directory=tmp_path)[key].fix == f"{key}=false"
    assert load(f"~{key}", name="flat", directory=tmp_path).root.model.family == "bert"
    assert load("model.family=gpt", f"~{key}", name="flat", directory=tmp_path).root.model.family == "gpt"


def test_word_pieces_are_those_of_a_bert(tmp_path: Path) -> None:
    write(tmp_path, "flat", "model:\n  tokenizer: {library: megatron, type: BertWordPieceCase}\n")
    with pytest.raises(ConfigError) as caught:
        load(name="flat", directory=tmp_path)
    assert caught.value.findings[0].message == "`bert`, since model.tokenizer.type is BertWordPieceCase"


@pytest.mark.parametrize(
    ("text", "key", "called"),
    [
        ("name: megatron_mamba_8b\nmodel: {num_layers: x}\n", "name", "Mamba"),
        ("name: megatron_griffin\n", "name", "Griffin"),
        ("exp_manager: {name: megatron_retro}\nmodel: {bert_binary_head: true}\n", "exp_manager.name", "RETRO"),
        ("model: {bert_binary_head: true, data: {data_impl: retmmap}}\n", "model.data.data_impl", "RETRO"),
        ("model: {mamba_ssm_ngroups: null, nonsense: 1}\n", "model.mamba_ssm_ngroups", "Mamba"),
        ("model: {hybrid_override_pattern: null}\n", "model.hybrid_override_pattern", "Mamba"),
        ("model: {activations_checkpoint_recurrent: false}\n", "model.activations_checkpoint_recurrent", "Griffin"),
        ("model: {retro: {retro_num_neighbors: 2}}\n", "model.retro.retro_num_neighbors", "RETRO"),
        (
            "model: {language_model: {config: {hidden_size: 768}}}\n",
            "model.language_model.config.hidden_size",
            "models on",
        ),
        ("model: {encoder: {library: nemo}, head: {num_layers: 1}}\n", "model.head.num_layers", "TransformerLMModel"),
    ],
)
def test_a_file_of_another_model_of_nemos_is_one_error(tmp_path: Path, text: str, key: str, called: str) -> None:
    write(tmp_path, "other", text)
    found = problems(name="other", directory=tmp_path)
    assert list(found) == [key]
    assert f"NeMo's {called}" in found[key].rule
    assert found[key].origin.startswith("other.yaml:")


def test_a_task_of_t5s_asks_a_gpt_for_another_family() -> None:
    (problem,) = problems("model.data.dataset_type=t5").values()
    assert problem.fix == "model.family=t5 (a preset: model=t5_small)"


def test_what_is_not_there_yet_is_refused_in_a_stack_too(tmp_path: Path) -> None:
    nemo_t5(tmp_path)
    found = problems(
        "model.encoder.add_qkv_bias=true",
        "model.decoder.arch=perceiver",
        "model.decoder.normalization=low_precision_layernorm",
        name="t5",
        directory=tmp_path,
    )
    assert found["model.encoder.add_qkv_bias"].rule.startswith("not yet")
    assert found["model.decoder.arch"].rule.startswith("refused")
    assert found["model.decoder.normalization"].rule.startswith("refused")
    assert len(found) == 3


def test_a_key_of_a_stack_at_model_is_for_both_with_a_warning() -> None:
    config = load("model=t5_tiny", "model.num_layers=2", "model.attention_backend=unfused")
    model = config.root.model
    assert isinstance(model, T5ModelBlock)
    assert (model.encoder.num_layers, model.decoder.num_layers) == (2, 2)
    assert model.decoder.attention_backend == "unfused"
    warned = [finding for finding in config.findings if finding.level == "warning"]
    assert [finding.keys[0] for finding in warned] == ["model.encoder.num_layers", "model.encoder.attention_backend"]
    assert "num_layers=2" in warned[0].fix
    assert config.origins["model.num_layers"].text == "model.num_layers=2"


def test_a_key_of_a_stack_at_model_must_not_contradict_a_stack(tmp_path: Path) -> None:
    nemo_t5(tmp_path, "  hidden_size: 768\n  num_layers: 6\n")
    found = problems(name="t5", directory=tmp_path)
    assert set(found) == {"model.encoder.num_layers", "model.decoder.num_layers"}
    assert "6" in found["model.encoder.num_layers"].rule
    typed = problems("model=t5_tiny", "model.num_layers=2", "model.decoder.num_layers=5")
    assert set(typed) == {"model.decoder.num_layers"}


def test_a_key_of_the_decoder_at_model_is_read_for_the_decoder() -> None:
    key = "relative_position_bias_self_attention_only"
    config = load("model=t5_tiny", f"model.{key}=false")
    model = config.root.model
    assert isinstance(model, T5ModelBlock)
    assert model.decoder.relative_position_bias_self_attention_only is False
    assert not historical(config)
    (warned,) = [finding for finding in config.findings if finding.level == "warning"]
    assert warned.keys == (f"model.decoder.{key}",)
    assert "applied to the decoder" in warned.message
    assert "decoder" in problems("model=t5_tiny", f"model.{key}=false", f"model.decoder.{key}=true").popitem()[1].rule


def test_a_window_as_long_as_all_texts_is_warned_of_in_each_stack() -> None:
    def warned(stack: str, window: str, kind: str = "rope") -> list[str]:
        at = f"model.{stack}"
        length = "model.data.seq_length_dec=100"
        config = load("model=t5_tiny", length, f"{at}.position_embedding_type={kind}", f"{at}.window_size={window}")
        return [found.keys[0] for found in config.findings if found.level == "warning" and "window" in found.keys[0]]

    assert warned("decoder", "[99,0]") == ["model.decoder.window_size"]
    assert warned("decoder", "[98,0]") == warned("decoder", "[99,0]", "alibi") == []
    assert warned("encoder", "[255,255]") == ["model.encoder.window_size"]
    assert warned("encoder", "[255,254]") == []


def test_stacks_of_unequal_width_are_refused() -> None:
    found = problems("model=t5_tiny", "model.decoder.hidden_size=96", "model.decoder.kv_channels=32")
    assert list(found) == ["model.decoder.hidden_size"]
    assert "128" in found["model.decoder.hidden_size"].fix
    other = load(
        "model=t5_tiny",
        "model.decoder.num_layers=1",
        "model.decoder.num_attention_heads=2",
        "model.decoder.ffn_hidden_size=64",
    )
    assert isinstance(other.root.model, T5ModelBlock)


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (["model=t5_tiny", "model.encoder.normalization=rmsnrom"], "model.encoder.normalization", "rmsnorm"),
        (["model=t5_tiny", "model.encoder.num_layer=2"], "model.encoder.num_layer", "model.encoder.num_layers"),
        (["model=t5_tiny", "model.decoder.n_heads=2"], "model.decoder.n_heads", "model.decoder.num_attention_heads"),
        (["model=t5_tiny", "model.n_layer=2"], "model.n_layer", "model.encoder.num_layers"),
        (["model=t5_tiny", "model.encoder_seq_length=64"], "model.encoder_seq_length", "model.seq_length"),
        (["model=bert_tiny", "model.bert.token_type=1"], "model.bert.token_type", "model.bert.token_types"),
        (["model=gpt_tiny", "model.bert.token_types=1"], "model.bert.token_types", "~model.bert"),
        (["model=gpt_tiny", "model.decoder.num_layers=1"], "model.decoder.num_layers", "~model.decoder"),
        (["model=t5_tiny", "model.family=t6"], "model.family", "t5"),
        (["model=t5_tiny", "model.encoder=3"], "model.encoder", "below"),
    ],
)
def test_unknown_and_foreign_keys(overrides: list[str], key: str, says: str) -> None:
    assert says in problems(*overrides)[key].fix


def test_a_key_of_another_family_is_named_as_such() -> None:
    found = problems("model=t5_tiny", "model.logits_soft_cap=30", "model.logits_soft_capp=30")
    assert found["model.logits_soft_cap"].rule == "there is no such key in a model of `family: t5`, only with gpt"
    assert found["model.logits_soft_capp"].rule == "there is no such key"


def test_bert_without_its_head_is_refused() -> None:
    assert problems("model=bert_tiny", "model.skip_head=true")["model.skip_head"].fix == "~model.skip_head"
    load("model=bert_tiny", "model.skip_head=false")


def test_a_list_of_text_or_numbers_is_asked_for_in_the_plural() -> None:
    rule = problems("model.data.data_prefix=100")["model.data.data_prefix"].rule
    assert rule == "must be text, or a list of text or numbers, or a block of names and values, or null"


def test_a_list_of_two_numbers_is_asked_for_in_the_plural() -> None:
    rule = problems("model.window_size=4")["model.window_size"].rule
    assert rule == "must be a list of 2 integers >= -1, or null"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["model.share_decoder_tokens_head_embeddings=false", "model.scale_tied_logits=true"], "scale_tied_logits"),
        (["model.max_position_embeddings=64"], "max_position_embeddings"),
        (["model.max_position_embeddings=64", "model.encoder.position_embedding_type=rope"], "max_position_embeddings"),
        (
            [
                "model.decoder.relative_position_bias_self_attention_only=false",
                "model.decoder.position_embedding_type=alibi",
            ],
            "decoder.relative_position_bias_self_attention_only",
        ),
    ],
)
def test_a_key_without_effect_is_told(overrides: list[str], key: str) -> None:
    findings = load("model=t5_tiny", *overrides).findings
    assert [finding.keys[0] for finding in findings if finding.level == "warning"] == [f"model.{key}"]


def test_positions_that_cannot_be() -> None:
    learned = "model.encoder.position_embedding_type=learned_absolute"
    assert "model.max_position_embeddings" in problems("model=t5_tiny", learned, "model.max_position_embeddings=8")
    for model, stack in (("t5_tiny", "model.encoder."), ("bert_tiny", "model.")):
        path = f"{stack}position_embedding_type"
        assert path in problems(f"model={model}", f"{path}=xpos")
    load("model=t5_tiny", "model.decoder.position_embedding_type=xpos")


def test_one_bias_of_cross_attention_is_not_for_packed_pairs() -> None:
    key = "model.decoder.relative_position_bias_self_attention_only"
    pieces = "model.data.respect_document_boundaries=true"
    load("model=t5_tiny", f"{key}=false", pieces)
    assert list(problems("model=t5_tiny", f"{key}=false", pieces, "model.data.packed_sequence=true")) == [key]


# ---------------------------------------------------------------- what is shown


@pytest.mark.parametrize("family", FAMILIES)
def test_the_json_schema_is_that_of_the_family(family: Family, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["config", "--schema", f"model={PRESETS[family]}"]) == 0
    schema = json.loads(capsys.readouterr().out)
    block = schema
    for name in ("model", "encoder"):
        while "$ref" in block:
            block = schema["definitions"][block["$ref"].rpartition("/")[2]]
        block = block["properties"][name]
    encoder = schema["definitions"][block["$ref"].rpartition("/")[2]]
    assert encoder["description"].startswith("acts: " if family == "t5" else "refused: acts with model.family=t5")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_effective_configuration_can_be_used_again(
    family: Family, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["config", f"model={PRESETS[family]}", "data=mock"]) == 0
    text = capsys.readouterr().out
    for block in schema_blocks(family):
        assert f"{block.rpartition('.')[2]}:" in text
    assert main.main(["config", "--all", f"model={PRESETS[family]}"]) == 0
    listed = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()}
    assert {listed[path] for path in schema_keys(family)} == {"acts"}


def test_the_docs_list_every_key_of_every_family() -> None:
    page = render.as_docs_page()
    common, t5 = page.split("## Keys of T5")
    t5, bert = t5.split("## Keys of BERT")
    for name in ("seq_length", "share_token_embeddings", "tokens_head_bias", "scale_tied_logits"):
        assert f"| `{name}" in t5
    for name in StackKeys.model_fields:
        assert f"| `{name}`" in common
        assert f"| `{name}`" in t5
    assert "| `relative_position_bias_self_attention_only`" in t5.partition("### `model.decoder`")[2]
    assert "| `token_types` *own*" in bert
