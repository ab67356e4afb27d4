"""Chat templates against transformers on every collected template, and the errors users meet."""

import enum
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.contracts.errors import ConfigError, InvalidParameter, UnsupportedModel
from quire.text.chat import ChatTemplate, no_template
from quire.text.tokenizer import Tokenizer

from ...support.byte_tokenizer import ByteTokenizer

NAMES = """chatml deepseek_r1 deepseek_r1_0528 deepseek_r1_distill_llama deepseek_r1_distill_qwen deepseek_r1_llamacpp
deepseek_r1_tools_vllm deepseek_v2_chat deepseek_v3 deepseek_v3.1 deepseek_v3.1_tools_vllm deepseek_v3.2
deepseek_v3.2_exp deepseek_v3_tools_vllm glm4.5 glm4.6 glm4.7_flash glm5 glm5.2 gpt_oss hermes2_pro_tool_use
hermes3_tool_use hermes_vllm llama3.1 llama3.1_json_vllm llama3.2 llama3.2_json_vllm llama3.2_pythonic llama3.3
llama4_pythonic mistral_7b_v0.3 mistral_nemo mistral_parallel_vllm mistral_vllm mixtral_8x7b_v0.1 qwen2.5 qwen3
qwen3_coder qwen3_coder_vllm qwen3_hub_rev2 qwen3_instruct_2507 qwen3_thinking_2507""".split()
USER = {"role": "user", "content": "Wie heißt du? <b>&'\" 中文 😀"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "n": 2}}}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": '{"sun": true}'}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather <now>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "where"}}},
        },
    }
]
TALKS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, {"role": "assistant", "content": "Ich? "}, {"role": "user", "content": " Ja.\n"}],
    "thinking": [USER, {"role": "assistant", "reasoning": "hmm", "content": "<think>a</think>b"}, USER],
    "call": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT],
    "null content": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT],
    "text call": [
        USER,
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": '{"a": 1}'}}]},
        RESULT,
    ],
}
Collected = Callable[[str], ChatTemplate]
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def outcome(render: Callable[[], str]) -> str:
    """The text, or that it raised."""
    try:
        return render()
    except Exception as error:
        assert not isinstance(error, AssertionError)
        return "raised"


@pytest.fixture(scope="module")
def transformers_tokenizer() -> Any:
    """A transformers tokenizer with named special tokens, whose templates are given per call."""
    transformers = pytest.importorskip("transformers", reason="transformers is the reference here")
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    return transformers.PreTrainedTokenizerFast(tokenizer_object=Backend(models.BPE()), **SPECIALS)


@pytest.fixture(scope="module")
def collected(shared: Path) -> Collected:
    """Returns a collected template by its name. Each is compiled, and its style is found out, once."""

    @functools.cache
    def load(name: str) -> ChatTemplate:
        source = (shared / "hf" / "templates" / f"{name}.jinja").read_text("utf-8")
        return ChatTemplate({"default": source}, SPECIALS)

    return load


def test_every_collected_template_is_named_here(shared: Path) -> None:
    assert sorted(path.stem for path in (shared / "hf" / "templates").glob("*.jinja")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_renders_as_transformers(shared: Path, transformers_tokenizer: Any, name: str) -> None:
    source = (shared / "hf" / "templates" / f"{name}.jinja").read_text("utf-8")
    ours = ChatTemplate({"default": source}, SPECIALS)
    variants: list[dict[str, Any]] = [
        {},
        {"tools": TOOLS},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"enable_thinking": False},
        {"tools": [], "thinking": True, "documents": [{"title": "t", "text": "x"}]},
    ]
    rendered = 0
    for talk in TALKS.values():
        for options in variants:
            options = {"add_generation_prompt": True, **options}
            want = outcome(
                lambda talk=talk, options=options: transformers_tokenizer.apply_chat_template(
                    talk, chat_template=source, tokenize=False, **options
                )
            )
            got = outcome(lambda talk=talk, options=options: ours.render_here(talk, adapt_turns=False, **options))
            assert got == want, (talk, options)
            rendered += want != "raised"
    assert rendered >= 12  # [user] and [system, user] work with every template


TEXT_ARGUMENTS = {"deepseek_v3", "deepseek_v3.2_exp", "deepseek_r1", "deepseek_r1_distill_llama"}
NULL_CONTENT = {"deepseek_r1", "deepseek_r1_distill_llama"}
NO_CALLS = {"chatml", "deepseek_v2_chat", "mixtral_8x7b_v0.1", "deepseek_r1_llamacpp"}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NO_CALLS])
@pytest.mark.parametrize("arguments", [{"city": "Köln"}, '{"city": "Köln"}'])
@pytest.mark.parametrize("content", ["", None])
def test_past_calls_reach_the_prompt_however_they_are_given(
    collected: Collected, name: str, arguments: Any, content: str | None
) -> None:
    template = collected(name)
    style = template.call_style()
    assert style.arguments_as_text == (name in TEXT_ARGUMENTS) and style.null_content == (name in NULL_CONTENT)
    call = {**CALL, "function": {"name": "forecast", "arguments": arguments}}
    talk = [USER, {"role": "assistant", "content": content, "tool_calls": [call]}, {**RESULT, "name": "forecast"}]
    text = template.render(talk, tools=TOOLS)
    assert "forecast" in text and "city" in text and "Köln" in text and "sun" in text
    assert '\\"city' not in text and "None" not in text


def test_arguments_that_are_no_json_stay_as_they_are() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}{% endfor %}"
    )
    broken = {"id": "a", "function": {"name": "f", "arguments": '{"a": '}}
    talk = [USER, {"role": "assistant", "tool_calls": [broken]}]
    assert ChatTemplate({"default": source}).render(talk) == '{"a": '


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NO_CALLS])
@pytest.mark.parametrize("arguments", ['{"city": "K', "[1]", "1", "null", "", [1], None])
def test_a_call_whose_arguments_are_no_object_can_be_followed(collected: Collected, name: str, arguments: Any) -> None:
    """`max_tokens` cuts arguments. The turn stays in the conversation, so every later prompt must render."""
    template = collected(name)
    call = {**CALL, "function": {"name": "forecast", "arguments": arguments}}
    text = template.render([USER, {"role": "assistant", "tool_calls": [call]}, RESULT], tools=TOOLS)
    assert "forecast" in text and "sun" in text


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NO_CALLS])
def test_a_call_is_of_a_function_unless_it_says_otherwise(collected: Collected, name: str) -> None:
    template = collected(name)
    bare = {key: value for key, value in CALL.items() if key != "type"}
    texts = {
        template.render([USER, {"role": "assistant", "tool_calls": [call]}, RESULT], tools=TOOLS)
        for call in (CALL, bare)
    }
    assert len(texts) == 1


@pytest.mark.parametrize("name", ["mistral_7b_v0.3", "mistral_nemo", "mistral_vllm", "mistral_parallel_vllm"])
def test_ids_of_calls_have_the_length_that_a_template_wants(collected: Collected, name: str) -> None:
    template = collected(name)

    def prompt(*ids: str) -> str:
        calls = [{**CALL, "id": given} for given in ids]
        results = [{**RESULT, "tool_call_id": given} for given in ids]
        return template.render([USER, {"role": "assistant", "tool_calls": calls}, *results], tools=TOOLS)

    for given in ("c1", "call_ee89ad884f5787be480e14e1", "functions.weather:0"):
        text = prompt(given)
        (used,) = set(re.findall(r'(?:"id"|"call_id"): "(.*?)"', text))
        assert re.fullmatch("[0-9a-zA-Z]{9}", used), text
        assert prompt(given, used).count(used) == text.count(used) * 2  # the same id is the same text
    assert "abcdefgh1" in prompt("abcdefgh1")


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "user", "content": None}, {"role": "tool"}])
def test_a_message_without_a_text_is_refused_by_name(tiny_folder: Path, message: Any) -> None:
    template = ChatTemplate.load(tiny_folder)
    assert template is not None
    with pytest.raises(InvalidParameter, match=r"messages\[1\].content is missing: a message of role (user|tool)"):
        template.render([USER, message])


def test_errors_carry_the_templates_own_words(shared: Path) -> None:
    source = (shared / "hf" / "templates" / "mistral_7b_v0.3.jinja").read_text("utf-8")
    with pytest.raises(InvalidParameter, match="roles must alternate") as caught:
        ChatTemplate({"default": source}, SPECIALS).render([USER, USER])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].content + 1 }}", "{{ 1 / 0 }}", "{{ messages[7].role.x }}", "{{ [].append(1) }}"],
)
def test_a_failing_template_is_a_request_error(source: str) -> None:
    with pytest.raises(InvalidParameter, match="chat template"):
        ChatTemplate({"default": source}).render([USER])


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
        ("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=True) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{% set ns = namespace(self=1) %}{% set ns.x = dict(a=3) %}{{ ns.x.a + ns.self }}", "4"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ bos_token }}{{ pad_token is defined }}{{ documents is none }}", "<s>FalseTrue"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
    ],
)
def test_the_dialect(source: str, text: str) -> None:
    assert ChatTemplate({"default": source}, SPECIALS).render([USER]) == text


def test_private_names_stay_out_of_namespaces() -> None:
    for source in ("{% set ns = namespace(_a=1) %}", "{% set ns = namespace() %}{% set ns._a = 1 %}"):
        with pytest.raises(InvalidParameter, match="underscore"):
            ChatTemplate({"default": source}).render([USER])


ECHO = ChatTemplate({"default": "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"})


def test_text_parts_become_one_string() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    assert ECHO.render([{"role": "user", "content": parts}]) == "[user:a\nb\nc]"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, r"messages\[0\].*'image_url'"),
        ({"role": "user", "content": [{"text": "a"}]}, "a dict without a type"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "content part 'text'"),
        ({"role": "user", "content": 5}, "must be a string"),
        ({"content": "a"}, "with a role"),
        ("hello", "with a role"),
        ({"role": "user", "content": "a", "x": object()}, "object is not a JSON value"),
    ],
)
def test_bad_messages_are_refused_by_name(message: Any, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        ECHO.render([message])


def test_a_conversation_is_a_list_of_messages() -> None:
    for messages in ([], "hello", None):
        with pytest.raises(InvalidParameter, match="at least one message"):
            ECHO.render(messages)  # type: ignore[arg-type]


def test_the_callers_messages_are_left_alone() -> None:
    class Colour(str, enum.Enum):  # noqa: UP042 - str() of it is its name
        RED = "red"

    messages = [{"role": "user", "content": Colour.RED, "reasoning": "why"}]
    before = json.dumps(messages)
    assert ECHO.render(messages, add_generation_prompt=False, continue_final_message=True) == "[user:red"
    assert json.dumps(messages) == before


def test_continuing_needs_a_message_that_is_shown() -> None:
    with pytest.raises(InvalidParameter, match="exclude each other"):
        ECHO.render([USER], continue_final_message=True)
    for template, talk in (
        (ChatTemplate({"default": "{{ messages[0].content }}"}), [USER, SYSTEM]),
        (ECHO, [{"role": "user"}]),
    ):
        with pytest.raises(InvalidParameter, match="last message"):
            template.render(talk, add_generation_prompt=False, continue_final_message=True)


def test_where_a_template_comes_from(save: Callable[..., Path], tmp_path: Path) -> None:
    assert ChatTemplate.load(save(tokenizer_config={"bos_token": {"content": "<s>"}})) is None
    folder = save(tokenizer_config={"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}config"})
    assert _render(ChatTemplate.load(folder)) == "<s>config"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    folder = save(tokenizer_config={"chat_template": named})
    template = ChatTemplate.load(folder)
    assert _render(template) == "plain" and _render(template, tools=TOOLS) == "tools"
    assert template is not None and template.source(tools=True) == "tools"
    assert _render(ChatTemplate.load(folder, "tool_use")) == "tools"
    (tmp_path / "mine.jinja").write_text("mine {{ eos_token is defined }}")
    assert _render(ChatTemplate.load(folder, tmp_path / "mine.jinja")) == "mine False"
    assert _render(ChatTemplate.load(folder, str(tmp_path / "mine.jinja"))) == "mine False"
    assert _render(ChatTemplate.load(folder, "{{ messages[0].role }}")) == "user"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert _render(ChatTemplate.load(folder)) == "file"


def _render(template: ChatTemplate | None, **options: Any) -> str:
    assert template is not None
    return template.render([USER], **options)


def test_templates_that_cannot_be_used_name_the_fix(save: Callable[..., Path]) -> None:
    folder = save(tokenizer_config={"chat_template": "a\n{% if %}"})
    with pytest.raises(UnsupportedModel, match="line 2"):
        ChatTemplate.load(folder)
    with pytest.raises(ConfigError, match="not valid Jinja"):
        ChatTemplate.load(folder, "{% for %}")
    with pytest.raises(ConfigError, match="neither a file nor a Jinja template"):
        ChatTemplate.load(folder, "missing.jinja")
    template = ChatTemplate({"rag": "x", "tool_use": "y"})
    with pytest.raises(InvalidParameter, match="none is the default"):
        template.render([USER])
    assert "has no chat template" in str(no_template("base-model"))


def test_chat_text_gets_no_second_bos(tiny: Tokenizer, tiny_folder: Path) -> None:
    assert ByteTokenizer(add_bos=True).encode("<|bos|>hi", add_special_tokens=False) == [256, 104, 105]
    template = ChatTemplate.load(tiny_folder)
    text = _render(template)
    assert text.startswith("<|im_start|>user\n") and text.endswith("<|im_start|>assistant\n")
    assert tiny.encode(text, add_special_tokens=False)[0] == tiny.token_id("<|im_start|>")


@pytest.mark.parametrize(
    "damage",
    [[{"x": 1}], [{"name": "default"}], [{"name": "default", "template": 5}], ["plain"], {"default": 5}, 5],
    ids=str,
)
def test_templates_in_another_form_name_the_file(save: Callable[..., Path], damage: object) -> None:
    folder = save(tokenizer_config={"chat_template": damage})
    with pytest.raises(UnsupportedModel, match=r"tokenizer_config\.json: chat_template .*as chat_template") as error:
        ChatTemplate.load(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/rag.jinja"])
def test_template_files_that_are_no_text_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / name).write_bytes(b"\xff\xfe{{")
    with pytest.raises(UnsupportedModel, match=f"{name}.*not UTF-8"):
        ChatTemplate.load(tmp_path)
    with pytest.raises(ConfigError, match=f"chat_template=.*{name}.*not UTF-8"):
        ChatTemplate.load(tmp_path / "additional_chat_templates" / "none", tmp_path / name)
