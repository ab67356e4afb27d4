"""Helpers of the offline classes for an engine in the same process: its front end, its tokenizer, chat prompts."""

from collections.abc import Sequence
from typing import Any

from quire.assemble.engine import Engine
from quire.contracts.adapters import Adapter, LoRARequest
from quire.contracts.errors import InvalidParameter
from quire.contracts.request import NewRequest
from quire.engine.replicas import check_adapter as check_fit
from quire.entry.adapters import NamedAdapters
from quire.entry.front_end import FrontEnd
from quire.entry.prompts import Prompt, piece_prompt
from quire.text.chat import ARGUMENTS, SWITCHES, ChatTemplate, no_template
from quire.text.kv_chunk_marks import MarkedParts
from quire.text.output_styles import choose_styles
from quire.text.tokenizer import Tokenizer

Messages = Sequence[dict[str, Any]]


def front_end(engine: Engine, *, processors: bool = False) -> FrontEnd:
    """Make the `FrontEnd` of an engine: it turns prompts into requests of the core, and tokens into outputs.
    `processors`: the caller hands logits processors to the engine, if its model is in this process."""
    return FrontEnd.of(
        engine.config,
        engine.core.facts,
        engine.tokenizer,
        engine.eos_ids,
        width=engine.pooling.width,
        processors=processors and engine.runner is not None,
    )


def set_processors(engine: Engine, requests: Sequence[NewRequest], processors: Sequence[Any]) -> None:
    """Hand the logits processors of requests to the model runner, or take them back: ()."""
    for request in requests:
        engine.worker.features.controls["set_processors"](request.request_id, processors)


def named_adapters(engine: Engine) -> NamedAdapters:
    """Make the record of the adapters that requests of an engine have named."""
    return NamedAdapters(engine.config.load, enabled=engine.config.adapters.enable_lora)


def check_adapter(engine: Engine, named: NamedAdapters, request: LoRARequest) -> Adapter:
    """Return the adapter of a request. Raises a `UserError` if it cannot be read, or does not fit the model."""
    adapter, new = named.find(request)
    if new:
        check_fit(engine.core, adapter)
    return adapter


def tokenizer_of(front: FrontEnd) -> Tokenizer:
    """Return the tokenizer. Raises `InvalidParameter` when the engine was made without one."""
    if front.tokenizer is None:
        raise InvalidParameter("this engine has no tokenizer: make it without skip_tokenizer_init=True.")
    return front.tokenizer


def render_chat(
    engine: Engine,
    messages: Messages,
    /,
    *,
    chat_template: str | None = None,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template_kwargs: dict[str, Any] | None = None,
    **variables: Any,
) -> Prompt:
    """Render one conversation. Return a prompt with its text and token ids; BOS is not added twice.
    `chat_template_kwargs`, `variables`: further variables of the template. Raises `InvalidParameter` if
    `chat_template_kwargs` has a parameter of this function, such as `tools` or `add_generation_prompt`."""
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise InvalidParameter(
            "chat needs a tokenizer: make this engine without skip_tokenizer_init=True.", param="messages"
        )
    template = engine.chat_template
    if chat_template is not None:
        template = ChatTemplate.load(engine.tokenizer_folder, override=chat_template)
    if template is None:
        raise no_template(engine.config.model.model)
    marked = MarkedParts(engine.core.facts.blends, choose_styles(template, token_id=tokenizer.token_id).turn_tokens)
    text = template.render(
        marked.mark(messages),
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **{**variables, **_checked_variables(chat_template_kwargs)},
    )
    return piece_prompt(tokenizer, marked.pieces(text), special=False)


def _checked_variables(given: Any) -> dict[str, Any]:
    variables: Any = {} if given is None else given
    if not isinstance(variables, dict) or not all(isinstance(name, str) for name in variables):
        raise InvalidParameter("chat_template_kwargs must be a dict with string keys.", param="chat_template_kwargs")
    for name in (*ARGUMENTS, *SWITCHES):
        if name in variables:
            raise InvalidParameter(
                f"chat_template_kwargs may not hold {name}, which is not a variable of the "
                "template: pass it as an argument.",
                param="chat_template_kwargs",
            )
    return variables
