"""The ways models write reasoning and tool calls, a row each: what is true of one family only is here.

Knows tags and their order. `tools` reads a text by a row, `tool_grammar` holds a model to one.
"""

import msgspec


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True):
    """names: as users know it, ours first;  marks: texts in the chat templates of its models;  start, end: its tags."""

    names: tuple[str, ...]
    marks: tuple[str, ...]
    start: str
    end: str


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """One way to write calls: JSON objects, or where a field below says so, names with arguments of some form.

    names      as users know it, ours first;  marks: texts in the chat templates of its models, all of them
    starts     tags that open calls;  opens: what then begins a call, or a list "[";  bare: opens[0] needs no start
    closes     what may follow a call and is no text;  drops: all text after a call is none
    before, between   around a name;  python: arguments as in Python
    key, ...   arguments in tags: before the name of one, after it, before the value if not there, after it, after all;
               after a name may stand whether the value is a string, after a value the next key where its end is lost
    printed    as models write it: before calls, a name, the arguments; after those; between calls and after them
    """

    names: tuple[str, ...]
    marks: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    opens: tuple[str, ...]
    bare: bool = False
    closes: tuple[str, ...] = ()
    drops: bool = False
    before: str = ""
    between: tuple[str, ...] = ("",)
    python: bool = False
    key: str = ""
    key_ends: tuple[str, ...] = ()
    value: str = ""
    value_ends: tuple[str, ...] = ()
    end: str = ""
    printed: tuple[str, str, str, str, str, str]


TAG, TAG_END, CALL_ID, DSML = "<tool_call>", "</tool_call>", "[CALL_ID]", "｜DSML｜"
SECTION, SECTION_END, SEPARATOR = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
NAME, ARGUMENTS = '{"name": ', ', "arguments": '
REASONING_FORMATS = (
    ReasoningFormat(names=("deepseek_r1", "deepseek_v3", "qwen3", "glm45", "glm47"), marks=("</think>",),
                    start="<think>", end="</think>"),
    ReasoningFormat(names=("mistral",), marks=("[/THINK]",), start="[THINK]", end="[/THINK]"))
TOOL_FORMATS = (  # in the order in which a chat template is compared with the marks
    ToolFormat(names=("deepseek_v32",), marks=(DSML,), starts=(f"<{DSML}function_calls>",), bare=True, drops=True,
               opens=(f'<{DSML}invoke name="',), between=('">', '"/>'), key=f'<{DSML}parameter name="',
               key_ends=('" string="true">', '" string="false">'), value_ends=(f"</{DSML}parameter>",),
               end=f"</{DSML}invoke>", closes=(f"</{DSML}function_calls>",),
               printed=(f"<{DSML}function_calls>", f'\n<{DSML}invoke name="', '">\n', f"</{DSML}invoke>", "",
                        f"\n</{DSML}function_calls>")),
    ToolFormat(names=("qwen3_coder", "qwen3_xml"), marks=("<function=", "<parameter="), starts=(TAG,), bare=True,
               opens=("<function=",), between=(">",), key="<parameter=", key_ends=(">\n", ">"), end="</function>",
               value_ends=("\n</parameter>", "</parameter>", "\n<parameter="), closes=(TAG_END,),
               printed=(TAG, "\n<function=", ">\n", f"</function>\n{TAG_END}", f"\n{TAG}", "")),
    *(ToolFormat(names=(name,), marks=(f"</arg_key>{mark}",), starts=(TAG,), opens=("",), key="<arg_key>",
                 key_ends=("</arg_key>",), value="<arg_value>", value_ends=("</arg_value>",), end=TAG_END,
                 printed=(TAG, "", line, TAG_END, line + TAG, ""))
      for name, mark, line in (("glm47", "<arg_value>", ""), ("glm45", "", "\n"))),
    ToolFormat(names=("mistral",), marks=("[TOOL_CALLS]",), starts=("[TOOL_CALLS]",), opens=("[", ""), bare=True,
               between=("[ARGS]", CALL_ID, ""), closes=("]",), drops=True,
               printed=("[", NAME, ARGUMENTS, "}", ", ", "]")),
    ToolFormat(names=("deepseek_v3", "deepseek_r1"), marks=(SECTION, "```json"), starts=(SECTION,), opens=(CALL,),
               bare=True, before=f"function{SEPARATOR}", between=("```json",), closes=("```", CALL_END, SECTION_END),
               drops=True, printed=(SECTION, f"{CALL}function{SEPARATOR}", "\n```json\n", f"\n```{CALL_END}", "\n",
                                    SECTION_END)),
    ToolFormat(names=("deepseek_v31",), marks=(SECTION,), starts=(SECTION,), opens=(CALL,), bare=True, drops=True,
               between=(SEPARATOR,), closes=(CALL_END, SECTION_END),
               printed=(SECTION, CALL, SEPARATOR, CALL_END, "", SECTION_END)),
    ToolFormat(names=("hermes", "qwen25"), marks=(TAG,), starts=(TAG,), opens=("{",), closes=(TAG_END,),
               printed=(TAG, f"\n{NAME}", ARGUMENTS, f"}}\n{TAG_END}", f"\n{TAG}", "")),
    ToolFormat(names=("pythonic", "llama4_pythonic"), marks=("[func_name1(",), starts=("<|python_start|>",),
               opens=("[",), bare=True, python=True, closes=("]", "<|python_end|>"),
               printed=("[", "", "(", ")", ", ", "]")),
    ToolFormat(names=("llama3_json", "llama4_json"), marks=('{"name": function name, "parameters":',), bare=True,
               starts=("<|python_tag|>",), opens=("{",), closes=(";",),
               printed=("", NAME, ', "parameters": ', "}", "; ", "")),
    ToolFormat(names=("plain",), opens=("{",), bare=True, closes=(";",), printed=("", NAME, ARGUMENTS, "}", "; ", "")))
PLAIN = TOOL_FORMATS[-1]  # what a model without a format of its own is held to


class OutputStyles(msgspec.Struct, frozen=True):
    """How a model writes calls and reasoning (None: not at all), and why we think so, in one line."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    why: str
