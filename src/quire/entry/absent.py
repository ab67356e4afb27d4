"""What callers of other engines' offline class know and `LLM` has not: said by name, with what is there instead."""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from quire.contracts.errors import InvalidParameter
from quire.contracts.named import asks_nothing

POOLED = "embed and score are there; models that classify or reward are not implemented"
SLEEP = "close the LLM, and make a new one, to give its memory back for a while"
WORKERS = "code is not run in the engine; `engine` has its configuration and plans"
METHODS = {
    "encode": POOLED, "classify": POOLED, "reward": POOLED, "sleep": SLEEP, "wake_up": SLEEP,
    "collective_rpc": WORKERS, "apply_model": WORKERS, "llm_engine": "`engine` is what is behind",
    "get_metrics": "outputs have `metrics` of their own, and a server has /metrics",
    "start_profile": "`quire bench profile` says where the time goes",
    "stop_profile": "`quire bench profile` says where the time goes"}
ARGUMENTS = {  # of methods
    "lora_request": "adapters (LoRA) are not loaded", "prompt_adapter_request": "adapters are not loaded",
    "pooling_params": "`dimensions` of embed, and pooler_config, say how texts are embedded",
    "tokenization_kwargs": "tokenize the prompt yourself and give prompt_token_ids",
    "mm_processor_kwargs": "only text goes in", "guided_options_request": "use SamplingParams(structured_outputs=...)",
    "chat_template_content_format": "content is given to the template as it is written",
    "concurrency_limit": "max_num_seqs bounds what runs at once"}
# Their values beside None that ask for nothing.
HARMLESS: dict[str, tuple[object, ...]] = {
    "chat_template_content_format": ("auto",), "tokenization_kwargs": ({},), "mm_processor_kwargs": ({},)}


def check_arguments(method: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise `InvalidParameter` for the first argument that `method` has not, unless it is known and asks for nothing.
    """
    name = method.__qualname__
    for argument, value in given.items():
        if (why := ARGUMENTS.get(argument)) is None:
            own = method.__kwdefaults__ or {}
            near = difflib.get_close_matches(argument, own, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(own)}."
            raise InvalidParameter(f"{name} has no parameter {argument!r}: {hint}", param=argument)
        if not asks_nothing(value, HARMLESS.get(argument, ())):
            raise InvalidParameter(f"{name}: {argument} is not implemented: {why}.", param=argument)


def no_attribute(kind: str, name: str) -> AttributeError:
    """The error for a name that the class has not."""
    if name in METHODS:
        return AttributeError(f"{kind}.{name} is not implemented: {METHODS[name]}.")
    return AttributeError(f"{kind!r} object has no attribute {name!r}")
