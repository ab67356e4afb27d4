"""The formats of reasoning and tool calls, one row per model family. Facts about single families stand only here.

Knows tags and their order. `tools` parses a text by a row; `tool_grammar` makes a grammar from a row.
"""

import msgspec


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A format of reasoning in a model's output.

    names        names for --reasoning-parser; Quire shows the first
    marks        texts that a chat template must have, all of them, for this format to be detected
    start, end   tags around the reasoning
    """

    names: tuple[str, ...]
    marks: tuple[str, ...]
    start: str
    end: str


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A format of tool calls in a model's output: JSON objects, or a tool's name followed by its arguments.

    names        names for --tool-call-parser; Quire shows the first
    marks        texts that a chat template must have, all of them, for this format to be detected
    starts       tags before the first call
    opens        texts that begin a call after such a tag, or "[" for a list of calls
    bare         True: opens[0] may begin a call without a tag of `starts`
    closes       texts after a call that are not content
    drops        True: all text after a call is dropped
    before, between   text before a tool's name, and texts between the name and its arguments
    python       True: arguments are written as in a Python call
    key, key_ends       of arguments in tags: text before a key; texts after a key, of which some mark a string value
    value, value_ends   of arguments in tags: text before a value; texts after it, also that before the next key, since
                 some models forget the closing tag
    end          of arguments in tags: text after all arguments
    printed      texts that models write, for grammars: before the first call, before a name, before the arguments,
                 after the arguments, between calls, after the last call
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
PLAIN = TOOL_FORMATS[-1]  # for models without a format of their own


class OutputStyles(msgspec.Struct, frozen=True):
    """The formats of a model's tool calls and reasoning; None = the model has none. `why`: reason for the choice."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    why: str
