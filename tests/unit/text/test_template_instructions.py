"""Messages of the system and the developer: no chat template drops one of them."""

from pathlib import Path

import pytest

from quire.contracts.errors import InvalidParameter
from quire.text.chat import ChatTemplate

ROLES = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
CHATS = ("su", "du", "us", "ssu", "dsu", "sdu", "usu", "suasu", "dsusu")
FIRST_ONLY = "{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.content }}]{% endif %}{% endfor %}"
LAST_ONLY = (
    "{% set ns = namespace(text='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.text = m.content %}{% endif %}{% endfor %}<{{ ns.text }}>"
    "{% for m in messages %}{% if m.role != 'system' %}[{{ m.content }}]{% endif %}{% endfor %}"
)
ANYWHERE = "{% for m in messages %}[{{ m.role }} {{ m.content }}]{% endfor %}"
FUSSY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('only the first') }}{% endif %}{{ m.content }}{% endfor %}"
)


def chat(kinds: str) -> list[dict[str, str]]:
    return [{"role": ROLES[kind], "content": f"text{at}."} for at, kind in enumerate(kinds)]


def rendered(source: str, kinds: str, **options: bool) -> str:
    return ChatTemplate({"default": source}).render(chat(kinds), **options)


def test_instructions_that_a_template_would_drop_go_to_the_beginning() -> None:
    assert rendered(FIRST_ONLY, "usdu") == "[text1.\n\ntext2.][text0.][text3.]"
    assert rendered(LAST_ONLY, "sus") == "<text0.\n\ntext2.>[text1.]"
    assert rendered(FIRST_ONLY, "ssu", adapt_turns=False) == "[text0.][text2.]"  # as the template reads it


def test_other_conversations_stay_as_they_are() -> None:
    assert rendered(ANYWHERE, "usu") == "[user text0.][system text1.][user text2.]"
    assert rendered(ANYWHERE, "du") == "[system text0.][user text1.]"
    assert rendered(FIRST_ONLY, "sua") == "[text0.][text1.][text2.]"
    with pytest.raises(InvalidParameter, match="only the first"):
        rendered(FUSSY, "usu")


def test_no_template_of_a_real_model_drops_one(shared: Path) -> None:
    files = sorted((shared / "hf" / "templates").glob("*.jinja"))
    if not files:
        pytest.skip("the templates of real models are not here")
    for path in files:
        template = ChatTemplate({"default": path.read_text("utf-8")}, {"bos_token": "<s>", "eos_token": "</s>"})
        for kinds in CHATS:
            messages = chat(kinds)
            try:
                text = template.render(messages)
            except InvalidParameter:
                continue
            assert all(message["content"] in text for message in messages), (path.stem, kinds)
