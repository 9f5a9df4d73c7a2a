"""Prompts: chat templates, plain text, system messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relaybatch.engines import Engine, ModelSettings, load
from relaybatch.errors import ModelError

Make = Callable[..., Path]
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
)


def text_of(engine: Engine, prompt: Any, **how: Any) -> str:
    prompting: Any = engine
    return str(prompting.prompting.tokenizer.decode(engine.tokenize([prompt], **how)[0].tolist()))


def test_a_text_is_one_message_of_the_users(engine: Engine) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert text_of(engine, "hi") == text_of(engine, messages) == "<|user|>hi<|end|><|assistant|>"


def test_the_system_message_stands_first_unless_there_is_one(engine: Engine) -> None:
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "hi"}]
    assert text_of(engine, "hi", system="be brief").startswith("<|system|>be brief<|end|><|user|>hi")
    assert text_of(engine, own, system="be brief") == text_of(engine, own)


def test_plain_text_is_sent_as_it_is(engine: Engine) -> None:
    assert text_of(engine, "hi", prompt_format="plain") == "hi"
    assert text_of(engine, "hi", prompt_format="plain", system="be brief") == "be brief\n\nhi"


def test_prompts_of_both_kinds_keep_their_order(engine: Engine) -> None:
    tokens = engine.tokenize(["one", [{"role": "user", "content": "two"}], "three"])
    assert [len(t) for t in tokens] == [len(engine.tokenize([p])[0]) for p in ("one", "two", "three")]
    assert all(t.dtype == "int32" for t in tokens)
    assert engine.tokenize([]) == []


def test_every_character_survives(engine: Engine) -> None:
    text = "one\u2028two\u2029three\u0085four\x0b\x0c\r\n\ttab 漢字 🏁 \u200b"
    assert text_of(engine, text, prompt_format="plain") == text
    assert text in text_of(engine, text)


def test_a_template_without_a_system_role(make: Make) -> None:
    settings = ModelSettings(str(make(template=None)), chat_template=STRICT, device="cpu")
    engine = load("torch", settings)
    assert text_of(engine, "hi", system="be brief") == "[user:be brief\n\nhi]"


def test_a_conversation_the_template_refuses_fails_alone(make: Make) -> None:
    engine = load("torch", ModelSettings(str(make(template=None)), chat_template=STRICT, device="cpu"))
    refused = [{"role": "assistant", "content": "x"}]
    assert [len(t) > 0 for t in engine.tokenize(["fine", refused, "fine too"])] == [True, False, True]


def test_a_template_from_a_file(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }}!")
    folder = str(make(template=None))
    assert text_of(load("torch", ModelSettings(folder, chat_template=str(file), device="cpu")), "hi") == "hi!"
    with pytest.raises(ModelError, match="no such file"):
        load("torch", ModelSettings(folder, chat_template=str(tmp_path / "none.jinja"), device="cpu"))
