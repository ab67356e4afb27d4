"""Turns with tool calls in the forms that templates read, above all gpt-oss's; its dates, efforts and refusals."""

from pathlib import Path
from typing import Any

import pytest

from quire.contracts.errors import InvalidParameter
from quire.text.chat import ChatTemplate
from quire.text.output_styles import choose_styles
from quire.text.sandbox import Sandbox

from ...support.harmony_tokenizer import HarmonyTokenizer

USER = {"role": "user", "content": "hi"}
DATE = {"strftime_now": "2026-01-02"}


@pytest.fixture(scope="module")
def template(shared: Path) -> ChatTemplate:
    path = shared / "hf" / "templates" / "gpt_oss.jinja"
    if not path.is_file():
        pytest.skip("the template of gpt-oss is not here")
    return ChatTemplate({"default": path.read_text("utf-8")}, {"bos_token": "<|startoftext|>"})


def call(name: str, call_id: str, arguments: str = '{"a": "x"}') -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def turns(template: ChatTemplate, *messages: dict[str, Any], **options: Any) -> str:
    """The prompt of a conversation after the first message of the user."""
    text = template.render([USER, *messages], **DATE, **options)
    return text.partition("<|start|>user<|message|>hi<|end|>")[2].removesuffix("<|start|>assistant")


def test_the_prompt_ends_before_the_header_of_the_answer(template: ChatTemplate) -> None:
    text = template.render([USER], **DATE)
    assert text == (
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        "Knowledge cutoff: 2024-06\nCurrent date: 2026-01-02\n\nReasoning: medium\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>"
        "<|start|>user<|message|>hi<|end|><|start|>assistant"
    )
    assert "Reasoning: high\n" in template.render([USER], **DATE, reasoning_effort="high")


def test_a_fixed_time_reaches_the_child_process(template: ChatTemplate) -> None:
    assert template.render_apart([USER], **DATE) == template.render([USER], **DATE)
    assert "Current date: 2026-01-02\n" in template.render([USER], strftime_now="2026-01-02T03:04:05")
    for wrong in ("today", "", "2026-13-01"):
        with pytest.raises(InvalidParameter, match="strftime_now"):
            template.render([USER], strftime_now=wrong)


def test_reasoning_stays_within_a_loop_of_calls_and_goes_with_the_answer(template: ChatTemplate) -> None:
    turn = {"role": "assistant", "reasoning": "think", "tool_calls": [call("f", "1")]}
    called = '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": "x"}<|call|>'
    answered = '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"r"<|end|>'
    thought = "<|start|>assistant<|channel|>analysis<|message|>think<|end|>"
    assert turns(template, turn, result("1", "r")) == thought + called + answered
    done = {"role": "assistant", "reasoning": "think more", "content": "done"}
    assert turns(template, turn, result("1", "r"), done, USER) == (
        called + answered + "<|start|>assistant<|channel|>final<|message|>done<|end|><|start|>user<|message|>hi<|end|>"
    )


def test_content_beside_reasoning_and_a_call_is_joined_to_the_reasoning(template: ChatTemplate) -> None:
    turn = {"role": "assistant", "reasoning": "think", "content": "I look.", "tool_calls": [call("f", "1")]}
    assert turns(template, turn, result("1", "r")).startswith(
        "<|start|>assistant<|channel|>analysis<|message|>think\nI look.<|end|><|start|>assistant to=functions.f"
    )


@pytest.mark.parametrize("results", [("1", "2"), ("2", "1")])
def test_several_calls_of_a_turn_become_turns_with_their_results(
    template: ChatTemplate, results: tuple[str, str]
) -> None:
    turn = {"role": "assistant", "reasoning": "think", "tool_calls": [call("f", "1"), call("g", "2")]}
    assert turns(template, turn, *(result(each, f"r{each}") for each in results)) == (
        "<|start|>assistant<|channel|>analysis<|message|>think<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": "x"}<|call|>'
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"r1"<|end|>'
        '<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{"a": "x"}<|call|>'
        '<|start|>functions.g to=assistant<|channel|>commentary<|message|>"r2"<|end|>'
    )


def test_a_tool_needs_no_description(template: ChatTemplate) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    assert "// \ntype f = () => any;" in template.render([USER], tools=tools)
    with pytest.raises(InvalidParameter, match="refused"):  # another reason
        template.render([{"role": "tool", "content": "a"}], tools=tools)


def test_a_message_can_be_continued(template: ChatTemplate) -> None:
    message = {"role": "assistant", "content": "one two"}
    text = template.render([USER, message], add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|start|>assistant<|channel|>final<|message|>one two")


def test_the_format_is_found_by_template_and_tokens(template: ChatTemplate) -> None:
    styles = choose_styles(template, token_id=HarmonyTokenizer().token_id)
    assert styles.messages is not None and styles.messages.names[0] == "harmony"
    assert styles.why == "tool calls and reasoning: harmony, for '<|start|>assistant' in the chat template"
    less = HarmonyTokenizer(("<|start|>", "<|message|>"))
    assert choose_styles(template, token_id=less.token_id).messages is None


def test_the_sandbox_knows_the_template(template: ChatTemplate) -> None:
    own = ChatTemplate(template.sources, compiler=None, sandbox=Sandbox())
    assert "Reasoning: low" in own.render([USER], reasoning_effort="low")


# A template that writes results of calls only where the calling turn has them, in the way of Gemma 4's.
INNER = """
{%- for message in messages -%}
<|turn>{{ message.role }}
{% for call in message.tool_calls or [] -%}
<|tool_call>call:{{ call.function.name }}{{ call.function.arguments | tojson }}<tool_call|>
{%- endfor -%}
{%- for one in message.tool_responses or [] -%}
<|tool_response>response:{{ one.name }}
{%- if one.response is mapping %}{{ one.response | tojson }}{% else %}{value:{{ one.response }}}{% endif -%}
<tool_response|>
{%- endfor -%}
{{ message.content }}
{%- if not (message.tool_responses and not message.content) %}<turn|>
{% endif -%}
{%- endfor -%}
"""


def test_results_stand_in_the_turn_of_their_calls_where_a_template_has_a_form_for_that() -> None:
    template = ChatTemplate({"default": INNER})
    turn = {"role": "assistant", "tool_calls": [call("f", "1"), call("g", "2")]}
    text = template.render([USER, turn, result("1", '{"x": 1}'), result("2", "[2]"), USER])
    assert text == (
        '<|turn>user\nhi<turn|>\n<|turn>assistant\n<|tool_call>call:f{"a": "x"}<tool_call|>'
        '<|tool_call>call:g{"a": "x"}<tool_call|><|tool_response>response:f{"x": 1}<tool_response|>'
        "<|tool_response>response:g{value:[2]}<tool_response|><|turn>user\nhi<turn|>\n"
    )
    assert "<|tool_response>" not in template.render([USER, turn, USER])


def test_calls_without_ids_get_one_result_each(template: ChatTemplate) -> None:
    bare = [{"type": "function", "function": {"name": name, "arguments": "{}"}} for name in ("f", "g")]
    results = [{"role": "tool", "content": text} for text in ("r1", "r2")]
    text = turns(template, {"role": "assistant", "tool_calls": bare}, *results)
    assert text.index('functions.f to=assistant<|channel|>commentary<|message|>"r1"') < text.index(
        'functions.g to=assistant<|channel|>commentary<|message|>"r2"'
    )


@pytest.mark.parametrize("default", [1, None, False, 0.5, [1], ["a"]], ids=str)
def test_a_default_that_is_no_text_does_not_refuse_a_tool(template: ChatTemplate, default: Any) -> None:
    kinds = ({"type": "integer", "enum": [1, 2]}, {"type": "string", "enum": ["a"]}, {"oneOf": [{"type": "string"}]})
    for kind in kinds:
        fields = {"default": {**kind, "default": default}}  # a property may have the name "default"
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": fields}}}
        text = template.render([USER], tools=[tool], **DATE)
        assert "// default: " in text or kind.get("type") != "integer"
        assert "type f = (_: {" in text and "default?:" in text
