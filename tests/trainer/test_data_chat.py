"""Conversations: the process of templates, what it may not do, whose tokens count, where templates are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_data_tokenizer_files import byte_level, sentencepiece
from tiers import extra, looped

from stoker.trainer.conversion import tokenizer_copy
from stoker.trainer.data.tasks import chat_template, chat_template_process
from stoker.trainer.data.tasks.chat_files import chat_template_from_config, get_chat_template, load_chat_template
from stoker.trainer.data.tasks.chat_template import Chat, ChatRenderError, ChatTemplate, default_template
from stoker.trainer.data.tasks.chat_template_process import ChatRenderer, TemplateError
from stoker.trainer.data.tasks.chats import encode_chats, encode_rendered_text, encode_with_assistant_mask, parse_chat
from stoker.trainer.data.tokenizers.tokenizer import ByteTokenizer, CharTokenizer, tokenizer_state
from stoker.trainer.data.tokenizers.tokenizer_document import tokenizer_from_dict
from stoker.trainer.data.tokenizers.tokenizer_files import SpecialTokens, load_tokenizer_json
from stoker.trainer.data.tokenizers.tokenizer_json import JsonTokenizer
from stoker.trainer.utils.errors import UserError

CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "  Grüße! How?"},
    {"role": "assistant", "content": "Well, \u00e9t\u00e9."},
    {"role": "user", "content": "And\nnow?"},
    {"role": "assistant", "content": " 7 "},
]
SMOL = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}\n"
    "    {%- elif message['role'] == 'assistant' %}"
    "{% generation %}{{ ' ' + message.content | trim + ' ' + eos_token }}{% endgeneration %}\n"
    "    {%- else %}{{ raise_exception('Only user and assistant.') }}{%- endif %}\n"
    "{% endfor %}"
)
TOOLS = "{{ tools | tojson(indent=1) }}{% for m in messages %}{{ m.role }}: {{ m['content'] }}{% break %}{% endfor %}"
THINKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role != 'assistant' or loop.last %}{{ m.content }}"
    "{% else %}{{ m.content[0] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""It shortens answers that others follow, as templates do with thoughts."""
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def bpe(folder: Path, template: str | None = None, **settings: Any) -> JsonTokenizer:
    """The files of a tokenizer with marks of its own, and what they make."""
    document = byte_level()
    first = max([*document["model"]["vocab"].values(), *(token["id"] for token in document["added_tokens"])]) + 1
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    document["added_tokens"] += [
        {"id": first + n, "content": text, **flags}
        for n, text in enumerate(("<|im_start|>", "<|im_end|>", "<s>", "</s>"))
    ]
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(document))
    named = {**TOKENS, "pad_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | ({"chat_template": template} if template else {})))
    found = load_tokenizer_json(folder, "key", SpecialTokens())
    assert isinstance(found, JsonTokenizer)
    return found


@pytest.mark.parametrize("template", [SMOL, LLAMA, TOOLS], ids=["smollm2", "generation", "tools"])
def test_texts_ids_and_marks_are_those_of_transformers(template: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = bpe(tmp_path, template)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tools = [{"type": "function", "function": {"name": "é"}}]
    with get_chat_template(tokenizer).start_renderer() as renderer:
        for chat in (CHAT, CHAT[:2]):
            rendered = renderer.render(Chat(chat, tools)) if template != TOOLS else None
            ids: Any = {"tools": tools, "tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
            if rendered is not None:
                expected = theirs.apply_chat_template(chat, **ids)
                found, counted = encode_with_assistant_mask(tokenizer, rendered)
                assert rendered.text == theirs.apply_chat_template(chat, tools=tools, tokenize=False)
                assert found.tolist() == list(expected["input_ids"])
                if template == LLAMA:
                    assert counted.tolist() == [bool(mark) for mark in expected["assistant_masks"]]
                    assert counted.any()
            asked = theirs.apply_chat_template(chat[:-1], tools=tools, tokenize=False, add_generation_prompt=True)
            assert renderer.render_prompt(chat[:-1], tools) == asked


def test_answers_are_found_without_marks() -> None:
    with ChatTemplate(SMOL).start_renderer() as renderer:
        text, spans = renderer.render(Chat(CHAT))
    assert [text[a:b] for a, b in spans] == ["Well, été.<|im_end|>\n", " 7 <|im_end|>\n"]
    # What a template writes ahead of an answer that is not there belongs to the prompt as far as both agree.
    thinking = SMOL.replace("assistant\n' }}", "assistant\n<think>' }}")
    with ChatTemplate(thinking).start_renderer() as renderer:
        text, spans = renderer.render(Chat([*CHAT[:1], {"role": "assistant", "content": "<think>so</think>7"}]))
    assert [text[a:b] for a, b in spans] == ["so</think>7<|im_end|>\n"]


def test_a_template_that_changes_earlier_answers_is_refused() -> None:
    with ChatTemplate(THINKS).start_renderer() as renderer:
        assert renderer.render(Chat(CHAT[:2])).assistant_spans
        with pytest.raises(ChatRenderError, match=r"message 2 differently .* put {% generation %}") as caught:
            list(renderer.render_all([Chat(CHAT[:2])] * 70 + [Chat(CHAT)]))
    assert caught.value.index == 70
    other_head = "{{ 'now' if add_generation_prompt else 'then' }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with ChatTemplate(other_head).start_renderer() as renderer, pytest.raises(UserError, match="message 2 differently"):
        renderer.render(Chat(CHAT[:2]))


HOSTILE = {
    "attributes": ("{{ messages.__class__.__base__.__subclasses__() }}", "attribute '__class__' .* unsafe"),
    "globals": ("{{ raise_exception.__globals__['os'] }}", "attribute '__globals__' .* unsafe"),
    "format": ("{{ '{0.__class__.__mro__}'.format(messages) }}", "attribute '__class__' .* unsafe"),
    "changes": ("{{ messages.append(1) }}", "attribute 'append' .* unsafe"),
    "files": ("{% include '/etc/passwd' %}", "no loader"),
    "imports": ("{% import 'os' as os %}{{ os }}", "no loader"),
    "environment": ("{{ self._TemplateReference__context.environment }}", "unsafe"),
    "date": ("{{ strftime_now('%Y') }}", "'strftime_now' is undefined"),
    "refuses": ("{{ raise_exception('no\nsuch role') }}", "it says: no such role"),
    "syntax": ("{% for m in messages %}", "it is not a valid template: .*endfor"),
    "memory": (
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "needs more than 1,024 MiB",
    ),
    "output": ("{% for i in range(90000) %}{{ '%01000d' | format(1) }}{% endfor %}", "more than 16,777,216 characters"),
}

QUICK = ("attributes", "files", "refuses", "syntax")


@pytest.mark.parametrize("name", [name for name in HOSTILE if name in QUICK or extra(name)])
def test_a_hostile_template_ends_in_one_line(name: str) -> None:
    source, says = HOSTILE[name]
    with (
        pytest.raises(UserError, match=f"the chat template cannot be used: .*{says}") as caught,
        ChatTemplate(source).start_renderer() as renderer,
    ):
        renderer.render_prompt(CHAT)
    assert len(caught.value.lines) == 1


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}", id="loops"),
        *extra(
            pytest.param(
                "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
                id="nested",
            )
        ),
    ],
)
def test_a_template_without_end_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_TIMEOUT", 1.0)
    with (
        pytest.raises(UserError, match=r"stopped: it exceeded the limit of 1 seconds|needs more than"),
        ChatTemplate(source).start_renderer() as renderer,
    ):
        renderer.render_prompt(CHAT)


def test_a_template_stops_though_nobody_waits() -> None:
    """The process gives itself so much time, in case that its parent was killed."""
    pytest.importorskip("resource")
    line = json.dumps({"template": "{{ messages }}", "tokens": {}})
    program = Path(chat_template_process.__file__)
    seen = subprocess.run(
        [sys.executable, "-c", f"import runpy, resource; runpy.run_path({str(program)!r}, run_name='__main__'); "
         "print(resource.getrlimit(resource.RLIMIT_CPU)[0])"],
        input=line + "\n", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert 0 < int(seen.stdout.splitlines()[-1]) <= chat_template_process.MAX_SECONDS + 10


def test_a_renderer_leaves_no_process_behind() -> None:
    with ChatTemplate(SMOL).start_renderer() as renderer:
        process = renderer._process.process
        assert process.poll() is None
    assert process.poll() is not None


def test_marks_are_found_where_the_text_is_moved() -> None:
    source = (
        "{% macro said(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% set all %}{% for m in messages %}{{ said(m) if m.role == 'assistant' else m.content }};{% endfor %}"
        "{% endset %}"
        "head {{ all | trim }}"
    )
    renderer = ChatRenderer(source, {})
    text, spans = renderer.render(CHAT, None)
    assert text == "head Grüße! How?;Well, été.;And\nnow?; 7 ;"
    assert [text[a:b] for a, b in spans] == ["Well, été.", " 7 "]
    with pytest.raises(TemplateError, match="not a valid template"):
        ChatRenderer("{% endgeneration %}", {})


# ---------------------------------------------------------------- tokens


def test_ends_become_tokens_of_every_tokenizer() -> None:
    chat = Chat(CHAT)
    for tokenizer in (ByteTokenizer(), sentencepiece()):
        (example,) = encode_chats([chat], tokenizer, answer_only=True)
        assert tokenizer.eos_id is not None
        assert (example.tokens[example.loss_mask] == tokenizer.eos_id).sum() == 2
        assert (example.tokens == tokenizer.eos_id).sum() == 2
        spoken = tokenizer.decode(example.tokens[example.loss_mask])
        assert "été" in spoken
        assert "now" not in spoken
        assert example.answer_text == " 7 "
        last = example.tokens[example.prompt_length :]
        assert "7" in tokenizer.decode(last)
        assert "now" not in tokenizer.decode(last)
        (whole,) = encode_chats([chat], tokenizer, answer_only=False)
        assert whole.loss_mask[1:].all()
        assert not whole.loss_mask[0]
        assert np.array_equal(whole.tokens, example.tokens)


def test_a_prompt_is_what_training_shows_before_an_answer(tmp_path: Path) -> None:
    for tokenizer in (ByteTokenizer(), bpe(tmp_path, SMOL)):
        (example,) = encode_chats([Chat(CHAT)], tokenizer, answer_only=True)
        with get_chat_template(tokenizer).start_renderer() as renderer:
            assert (
                encode_rendered_text(tokenizer, renderer.render_prompt(CHAT[:-1]))
                == example.tokens[: example.prompt_length].tolist()
            )


def test_a_conversation_that_a_template_refuses_is_named(tmp_path: Path) -> None:
    tokenizer = bpe(tmp_path, LLAMA)
    refused = Chat([{"role": "system", "content": "Be  brief"}, *CHAT])
    with pytest.raises(UserError, match=r"begins with 'Be brief': .* it says: Only user and assistant"):
        list(encode_chats([Chat(CHAT), refused], tokenizer, answer_only=True))
    placed = refused._replace(location="line 7 of chats.jsonl")
    with pytest.raises(UserError, match=r"^line 7 of chats\.jsonl, the conversation that begins with 'Be brief': "):
        list(encode_chats([Chat(CHAT), placed], tokenizer, answer_only=True))


def test_characters_have_no_default_template() -> None:
    with pytest.raises(UserError, match="EOS token to end answers"):
        get_chat_template(CharTokenizer("ab"))


# ---------------------------------------------------------------- objects


@looped(
    ("found", "says"),
    [
        ({"text": "x"}, "must have a list `messages` or `conversations`; it has `text`$"),
        ({"input": "x", "output": "y"}, "it has `input`, `output`; data=sft reads texts$"),
        (
            {"messages": [*CHAT, {"role": "assistent", "content": "x"}]},
            "message 5 has role `assistent`; did you mean `assistant`",
        ),
        ({"messages": [{"role": "usr", "content": "x"}, CHAT[1]]}, "message 1 has role `usr`; did you mean `user`"),
        ({"messages": [*CHAT, {"role": "gpt", "content": "x"}]}, "message 5 has role `gpt`; did you mean `assistant`"),
        ({"messages": [{"role": "critic", "content": "x"}, CHAT[1]]}, "role `critic`; known are system, user"),
        (
            {"conversations": [{"from": "humn", "value": "a"}, {"from": "gpt", "value": "b"}]},
            "message 1 has role `humn`",
        ),
        ({"messages": [{"role": "user", "content": "x"}]}, "no message of the assistant"),
        ({"messages": []}, "no message of the assistant"),
        ({"messages": [{"content": "x"}]}, "message 1 must be an object with a text `role`"),
        ({"messages": [{"role": "assistant", "content": 3}]}, "message 1 must have a text `content`"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}, "parts of type text"),
        ({"messages": [{"role": "assistant", "content": "\ud800"}]}, "message 1: .* lone surrogate"),
        ({"conversations": [{"from": "human"}]}, "texts `from` and `value`"),
        ({"messages": CHAT, "tools": "x"}, "`tools` must be a list"),
    ],
)
def test_objects_that_are_no_conversation(found: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=f"^line 3: ?.*{says}|^line 3 .*{says}"):
        parse_chat(found, "line 3")


def test_both_forms_are_read() -> None:
    turns = [{"from": "Human", "value": "a"}, {"from": "gpt", "value": "b"}]
    chat = parse_chat({"conversations": turns, "system": "s", "mask": "User"}, "line 1")
    assert [(m["role"], m["content"]) for m in chat.messages] == [("system", "s"), ("user", "a"), ("assistant", "b")]
    called = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "tool_calls": []}]
    assert parse_chat({"messages": called, "tools": []}, "line 1") == Chat(called, [], "line 1")


def test_a_template_may_know_other_roles() -> None:
    critic, model = ([{"role": role, "content": "a"}, CHAT[1]] for role in ("critic", "model"))
    template = """{% if m.role == 'critic' or m.role == "model" %}"""
    assert parse_chat({"messages": critic}, "line 1", template).messages == critic
    # Its name for the assistant is that of the text: answers are found by the one in the file.
    with pytest.raises(UserError, match="role `model`; did you mean `assistant`"):
        parse_chat({"messages": model}, "line 1", template)


def test_parts_of_a_message_are_one_text_unless_the_template_reads_them(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "  Grüße!"}, {"type": "text", "text": " How?"}]
    chats = [parse_chat({"messages": [{"role": "user", "content": parts}, *CHAT[1:]]}, "line 1")]
    for tokenizer in (ByteTokenizer(), bpe(tmp_path, SMOL)):
        (found,) = encode_chats(chats, tokenizer, answer_only=True)
        (expected,) = encode_chats([Chat(CHAT)], tokenizer, answer_only=True)
        assert found.tokens.tolist() == expected.tokens.tolist()
    reads = "{% for m in messages %}{% for part in m.content %}[{{ part.text or part }}]{% endfor %}{% endfor %}"
    (found,) = encode_chats(chats, bpe(tmp_path, reads), answer_only=False)
    assert bpe(tmp_path).decode(found.tokens).startswith("[  Grüße!][ How?][W]")


# ---------------------------------------------------------------- where templates are


def test_templates_come_with_the_files_and_travel_in_checkpoints(tmp_path: Path) -> None:
    assert bpe(tmp_path).chat_template is None
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    assert bpe(tmp_path, chat_template=named).chat_template == ChatTemplate("y", {**TOKENS, "pad_token": "</s>"})
    tokenizer = bpe(tmp_path, SMOL, bos_token={"content": "<s>"})
    assert tokenizer.chat_template == ChatTemplate(SMOL, {**TOKENS, "pad_token": "</s>"})
    assert "chat" not in tokenizer.to_dict()
    again = tokenizer_from_dict(json.loads(json.dumps(tokenizer_state(tokenizer))))
    assert again.chat_template == tokenizer.chat_template
    (tmp_path / "chat_template.jinja").write_text("{{ z }}")
    beside = load_chat_template(tmp_path, "key")
    assert beside is not None
    assert beside.source == "{{ z }}"
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        load_chat_template(tmp_path, "key")


def test_templates_are_handed_back(tmp_path: Path) -> None:
    """The files that `stoker convert` writes for transformers, from a checkpoint or copied from where they were."""
    tokenizer = bpe(tmp_path / "theirs", SMOL)
    tokenizer_copy.write_tokenizer(tmp_path, tokenizer)
    again = load_chat_template(tmp_path, "key")
    assert again == ChatTemplate(SMOL, {**TOKENS, "pad_token": "</s>"})
    tokenizer_copy.write_template(tmp_path / "theirs", tokenizer)
    assert not (tmp_path / "theirs" / "chat_template.jinja").exists()
    tokenizer.chat_template = ChatTemplate("{{ other }}")
    tokenizer_copy.write_template(tmp_path / "theirs", tokenizer)
    assert (tmp_path / "theirs" / "chat_template.jinja").read_text() == "{{ other }}"


def test_a_key_gives_a_template_or_its_file(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    tokens = {"eos_token": "</s>", "pad_token": "<pad>"}
    assert chat_template_from_config("{{ messages }}", tokenizer) == ChatTemplate("{{ messages }}", tokens)
    (tmp_path / "t.jinja").write_text(SMOL)
    assert chat_template_from_config(str(tmp_path / "t.jinja"), tokenizer).source == SMOL
    with pytest.raises(UserError, match=r"chat_template`: cannot read .*other\.jinja"):
        chat_template_from_config(str(tmp_path / "other.jinja"), tokenizer)
    assert ByteTokenizer().chat_template is None
    assert get_chat_template(ByteTokenizer()) == default_template("</s>")


@looped(
    "chat", [3, {"template": "x"}, {"template": 3, "tokens": {}}, {"template": "x", "tokens": {"a": "b"}},
             {"template": "x", "tokens": {"eos_token": 3}}, {"template": "x" * (1 << 21), "tokens": {}}]
)  # fmt: skip
def test_documents_that_are_refused(chat: Any) -> None:
    with pytest.raises(ValueError, match="`chat"):
        tokenizer_from_dict({"tokenizer": "byte-level", "chat": chat})
