"""Chat templates: they render a conversation to the prompt format a model was trained on.

Knows Jinja templates and messages as JSON values. Renders as transformers' `apply_chat_template` does (same
environment, same variables, same treatment of absent and reasoning fields); tests compare both for every template.
A template is a program that runs on untrusted values. It renders in this process while that is cheap, else in a child
process that can be stopped. Knows nothing of HTTP, of tool-call parsing or of token ids.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from quire.contracts.errors import ConfigError, InvalidParameter, UnsupportedModel, shown
from quire.text.sandbox import Sandbox
from quire.text.sandbox_meter import TooCostly, compile_metered
from quire.text.special import SpecialTokens, read_json
from quire.text.template_instructions import Instructions, need_probe, probe_instructions
from quire.text.template_tool_calls import REASONING as REASONING
from quire.text.template_tool_calls import CallStyle, probe_style

TEMPLATE_FILE = "chat_template.jinja"
EXTRA_TEMPLATES = "additional_chat_templates"
# Parameters of `render_here`, which cannot be variables of a template.
ARGUMENTS = ("messages", "tools", "chat_template", "adapt_turns")
ROLES = ("system", "developer", "user", "assistant", "tool")
ROLE_ASKED = re.compile(r"""role["']?\]?\s*(?:[!=]=|(?:not\s+)?in)\s*[\[(]?((?:\s*["']\w+["']\s*,?)+)""")
NOW = "strftime_now"  # function of templates; as a variable, a text: the time that it shows
SWITCHES = ("add_generation_prompt", "continue_final_message")
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # type -> its field
MAX_WORDS = 500  # characters of a template's own error, which may hold whole messages
CONTINUE_MARK = "QUIRE-CONTINUES-HERE "  # the space shows whether the template trims the message
# Errors of a template besides Jinja's own: it is a program that runs on the caller's values.
PROGRAM_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class ChatTemplate:
    """A model's chat template, or several by name ("default", "tool_use")."""

    def __init__(
        self,
        sources: Mapping[str, str],
        variables: Mapping[str, str] | None = None,
        *,
        compiler: Callable[[str], jinja2.Template | None] | None = compile_metered,
        sandbox: Sandbox | None = None,
    ) -> None:
        """Compile templates. Raises `jinja2.TemplateSyntaxError`, which `load` turns into a user error.

        sources     templates by name;  variables  visible to the templates (bos_token, ...)
        compiler    None = untrusted templates, which are compiled and rendered only in a child process
        """
        self.sources = dict(sources)
        self._variables = dict(variables or {})
        self._trusted = compiler is not None
        self._compiled = {name: compiler(source) for name, source in self.sources.items()} if compiler else {}
        self._styles: dict[str, CallStyle] = {}  # filled when a conversation with tool calls first comes
        self._instructions: dict[str, Instructions] = {}  # filled as above, for instructions
        self._sandbox = sandbox or Sandbox()

    def replaced(self, source: str) -> "ChatTemplate":
        """Return a template with the text `source`, for the same model. Untrusted: only a child process renders it."""
        return ChatTemplate({"default": source}, self._variables, compiler=None, sandbox=self._sandbox)

    @staticmethod
    def load(
        folder: Path, override: str | Path | None = None, *, sandbox: Sandbox | None = None
    ) -> "ChatTemplate | None":
        """Load the template of a checkpoint folder; None if it has none. `override`: a template's text, the path of a
        template file, or the name of one of the folder's templates. Raises `ConfigError` for an override that is none
        of these or does not compile, `UnsupportedModel` when the folder's own template does not compile."""
        sources = _folder_sources(folder)
        origin = f"the chat template of {folder}"
        if override is not None:
            sources, origin = {"default": _override_source(override, sources)}, "the given chat template"
        if not sources:
            return None
        try:
            return ChatTemplate(sources, SpecialTokens.read(folder).named, sandbox=sandbox)
        except jinja2.TemplateSyntaxError as error:
            problem = f"{origin} is not valid Jinja (line {error.lineno}: {error.message})"
            if override is not None:
                raise ConfigError(f"{problem}: correct it.") from error
            raise UnsupportedModel(f"{problem}: give a working one as chat_template.") from error

    @functools.cached_property
    def words(self) -> frozenset[str]:
        """All words in the text of the templates, among them the names of the variables that they read."""
        return frozenset(re.findall(r"\w+", " ".join(self.sources.values())))

    @functools.cached_property
    def roles(self) -> frozenset[str]:
        """Roles that a message may have: system, user, ..., and those that the template compares a role with."""
        asked = (names for source in self.sources.values() for names in ROLE_ASKED.findall(source))
        return frozenset(ROLES).union(*(re.findall(r"\w+", names) for names in asked))

    def source(self, *, tools: bool = False) -> str:
        """Return the text of the template that renders requests with `tools`, or without them."""
        return self.sources[self._choose(tools)]

    def render(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        """Render the prompt, in this process or, if too costly, in a child process. `options`: see `render_here`."""
        try:
            return self.render_here(messages, **options)
        except TooCostly:
            return self.render_apart(messages, **options)

    def render_apart(
        self, messages: Sequence[Mapping[str, Any]], over: Future[None] | None = None, /, **options: Any
    ) -> str:
        """Render the prompt in a child process, which is killed after some seconds. `options`: see `render_here`.
        `over`: future that the caller sets when nobody waits for the prompt any more; then the rendering stops."""
        param = "messages" if self._trusted else "chat_template"
        arguments = _plain(messages, "messages"), _plain(options, "chat_template_kwargs")
        return self._sandbox.render((self.sources, self._variables), arguments, param, over)

    def render_here(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        adapt_turns: bool = True,
        **kwargs: Any,
    ) -> str:
        """Render the prompt of a conversation in this process. Takes milliseconds at most.

        messages   mappings with "role"; "content" is a string, or text parts, which are joined with newlines
        tools      JSON schemas; `kwargs` are further variables of the template (enable_thinking, documents, ...)
        continue_final_message   leave the last message open, to be continued; excludes `add_generation_prompt`
        adapt_turns   convert the assistant's turns to the format that this template reads (see `template_tool_calls`),
                      and instructions to those it keeps (see `template_instructions`); transformers does neither

        Raises `InvalidParameter` when the template refuses the messages, `TooCostly` when only a child may render it.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidParameter(
                "continue_final_message and add_generation_prompt exclude each other: switch one off.",
                param="continue_final_message",
            )
        name = self._choose(tools is not None)
        if not isinstance(messages, (list, tuple)) or not messages:
            raise InvalidParameter("messages must be a list with at least one message.", param="messages")
        chat = [_normal_message(message, at) for at, message in enumerate(messages)]
        if adapt_turns:
            style = self.call_style(name) if any(message.get("tool_calls") for message in chat) else CallStyle()
            chat = self._instructed(name, style.turns(chat))
        last = chat[-1].get("content")
        if continue_final_message:
            if not isinstance(last, str) or "content" not in self.sources[name]:
                raise InvalidParameter(
                    "continue_final_message needs text in the last message, which the template "
                    "renders: add text, or leave the parameter out.",
                    param="messages",
                )
            chat[-1]["content"] = last + CONTINUE_MARK
        if adapt_turns:
            _complete_texts(chat)
        variables = {**_plain(kwargs, "chat_template_kwargs"), "add_generation_prompt": add_generation_prompt}
        text = self._render_with(name, chat, _plain(tools, "tools"), variables)
        return _cut_at_mark(text, str(last)) if continue_final_message else text

    def call_style(self, name: str = "default") -> CallStyle:
        """Return the format in which the template `name` expects past tool calls. Found by trial renderings."""
        if name not in self._styles:
            self._styles[name] = probe_style(lambda messages, tools: self._render(name, messages, tools, {}))
        return self._styles[name]

    def _instructed(self, name: str, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return a conversation of whose instructions the template `name` drops none."""
        if not need_probe(chat):
            return chat
        if name not in self._instructions:
            render = functools.partial(self._render, name, tools=None, variables={})
            self._instructions[name] = probe_instructions(render, self.sources[name])
        return self._instructions[name].turns(chat)

    def _choose(self, tools: bool) -> str:
        if tools and "tool_use" in self.sources:
            return "tool_use"
        if "default" in self.sources:
            return "default"
        raise InvalidParameter(
            f"the model has chat templates {sorted(self.sources)} and none is the default: name one as chat_template.",
            param="messages",
        )

    def _render_with(self, name: str, messages: list[dict[str, Any]], tools: Any, variables: dict[str, Any]) -> str:
        """Render, and if the template refuses, once more with plain tools: each has a description, which may be empty,
        and the default of a parameter is a text."""
        try:
            return self._render(name, messages, tools, variables)
        except InvalidParameter:
            described = [_described(_with_text_defaults(tool)) for tool in tools or ()]
            if described == (tools or []):
                raise
        return self._render(name, messages, described, variables)

    def _render(self, name: str, messages: list[dict[str, Any]], tools: Any, variables: dict[str, Any]) -> str:
        given = {"documents": None, "add_generation_prompt": False, **self._variables, **variables}
        if isinstance(given.get(NOW), str):
            given[NOW] = fixed_time(given[NOW])
        template = self._compiled.get(name)
        if template is None:
            raise TooCostly
        try:
            return template.render(given, messages=messages, tools=tools)
        except jinja2.TemplateError as error:
            words = (error.message or type(error).__name__)[:MAX_WORDS]
            raise InvalidParameter(f"the chat template refused the messages: {words}", param="messages") from error
        except PROGRAM_ERRORS as error:
            words = f"{type(error).__name__}: {error}"[:MAX_WORDS]
            raise InvalidParameter(
                f"the chat template cannot render these messages ({words}): correct the messages, "
                "or give another template as chat_template.",
                param="messages",
            ) from error


def fixed_time(text: str) -> Callable[[str], str]:
    """Return the function `strftime_now` of a template for a fixed time in ISO format. Raises `InvalidParameter`."""
    try:
        return datetime.fromisoformat(text).strftime
    except ValueError:
        raise InvalidParameter(
            f"chat_template_kwargs.{NOW} is {shown(text)}: it must be a date or time such as 2026-11-28.",
            param="chat_template_kwargs",
        ) from None


def _described(tool: Any) -> Any:
    """Return a tool that has a description, which may be empty."""
    function = tool.get("function") if isinstance(tool, dict) else None
    return {**tool, "function": {"description": "", **function}} if isinstance(function, dict) else tool


def _with_text_defaults(schema: Any) -> Any:
    """Return a JSON schema whose defaults, at any depth, are texts: JSON for those that were none. In names of
    properties "default" has no such meaning: a mapping behind it is searched, not written as a text."""
    if isinstance(schema, list):
        return [_with_text_defaults(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: json.dumps(item, ensure_ascii=False)
        if key == "default" and not isinstance(item, (str, dict))
        else _with_text_defaults(item)
        for key, item in schema.items()
    }


def no_template(model: str) -> InvalidParameter:
    """Return the error for a chat request to a model without a template."""
    return InvalidParameter(
        f"{model} has no chat template (it is probably a base model): use plain completions, or "
        "give a template file as chat_template.",
        param="messages",
    )


def _folder_sources(folder: Path) -> dict[str, str]:
    """Return templates by name. Template files override tokenizer_config.json, as in transformers."""
    files = {"default": folder / TEMPLATE_FILE} if (folder / TEMPLATE_FILE).is_file() else {}
    files |= {path.stem: path for path in sorted((folder / EXTRA_TEMPLATES).glob("*.jinja"))}
    if files:
        return {name: _file_text(path, UnsupportedModel) for name, path in files.items()}
    path = folder / "tokenizer_config.json"
    template = read_json(path).get("chat_template") or {}
    if isinstance(template, str):
        template = {"default": template}
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        template = {entry.get("name"): entry.get("template") for entry in template}
    if isinstance(template, dict) and all(isinstance(text, str) for item in template.items() for text in item):
        return template
    raise UnsupportedModel(
        f"{path}: chat_template must be a text, or a list of them with names: correct it, or give one as chat_template."
    )


def _file_text(path: Path, kind: type[UnsupportedModel] | type[ConfigError]) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        raise kind(f"chat_template={str(path)!r} is not UTF-8 text: fetch it again, or give another.") from None


def _override_source(override: str | Path, sources: Mapping[str, str]) -> str:
    if isinstance(override, str):
        if override in sources:
            return sources[override]
        if any(mark in override for mark in ("{{", "{%", "{#", "\n")):
            return override
    path = Path(override)
    if not path.is_file():
        raise ConfigError(f"chat_template={str(override)!r} is neither a file nor a Jinja template: check the path.")
    return _file_text(path, ConfigError)


def _normal_message(message: Any, at: int) -> dict[str, Any]:
    """Return a new message without null fields, with content as one string, and with reasoning under all its names."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidParameter(f"messages[{at}] must be an object with a role.", param="messages")
    where = f"messages[{at}]"
    plain = {key: _plain(value, where) for key, value in message.items() if value is not None}
    if "content" in plain:
        plain["content"] = _flat_content(plain["content"], where)
    reasoning = next((plain[name] for name in REASONING if name in plain), None)
    if reasoning is not None:
        plain = {**dict.fromkeys(REASONING, reasoning), **plain, "reasoning_content": reasoning}
    return plain


def _complete_texts(chat: Sequence[dict[str, Any]]) -> None:
    """Give an assistant's turn without text and calls the empty text, in place. Raises `InvalidParameter` for a message
    of another role without text."""
    for at, message in enumerate(chat):
        if message["role"] == "assistant":
            if not message.get("tool_calls"):
                message.setdefault("content", "")
        elif "content" not in message:
            raise InvalidParameter(
                f"messages[{at}].content is missing: a message of role {message['role']} needs a text.",
                param="messages",
            )


def _flat_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise InvalidParameter(f"{where}: content must be a string or a list of text parts.", param="messages")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        field = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        text = part if isinstance(part, str) else part.get(field) if field else None
        if not isinstance(text, str):
            name = shown(kind) if kind else f"a {type(part).__name__} without a type"
            raise InvalidParameter(
                f'{where}: this model reads text only; content part {name} must be {{"type": "text", "text": ...}}.',
                param="messages",
            )
        texts.append(text)
    return "\n".join(texts)


def _plain(value: Any, where: str) -> Any:
    """Return a copy made of JSON values only, so that a template gets no objects with methods of their own."""
    if value is None or type(value) in (str, bool, int, float):
        return value
    if type(value) is dict or isinstance(value, Mapping):
        return {_plain(key, where): _plain(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    if isinstance(value, str):  # a subclass, such as an enum: its value, not its name
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise InvalidParameter(
        f"{where}: a value of type {type(value).__name__} is not a JSON value: send a string, "
        "number, boolean, null, list or dict.",
        param="messages",
    )


def _cut_at_mark(text: str, last: str) -> str:
    """Cut the rendered text at the end of the last message; trim it there if the template trims messages."""
    at = text.rfind(CONTINUE_MARK.strip())
    if at < 0 or last.strip() not in text:
        raise InvalidParameter(
            "continue_final_message: the chat template drops or changes the last message; use another template.",
            param="continue_final_message",
        )
    return text[:at] if text.startswith(CONTINUE_MARK, at) else text[:at].rstrip()
