"""Methods and arguments of vLLM's `LLM` that Quire's does not have. Each is refused by name, with what to use instead.
"""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from quire.contracts.errors import InvalidParameter
from quire.contracts.unknown_fields import has_no_effect

POOLED = "use embed or score; classification and reward models are not implemented"
SLEEP = "call close() to free the memory, and make a new LLM later"
WORKERS = "functions cannot be run in the engine; read its configuration and plans from `engine`"
METHODS = {
    "encode": POOLED, "classify": POOLED, "reward": POOLED, "sleep": SLEEP, "wake_up": SLEEP,
    "collective_rpc": WORKERS, "apply_model": WORKERS, "llm_engine": "use `engine`",
    "get_metrics": "read `metrics` of each output, or /metrics of a server",
    "start_profile": "run `quire bench profile`", "stop_profile": "run `quire bench profile`"}
ARGUMENTS = {  # of methods
    "lora_request": "adapters (LoRA) are not supported", "prompt_adapter_request": "adapters are not supported",
    "pooling_params": "use `dimensions` of embed, or pooler_config of the LLM",
    "tokenization_kwargs": "tokenize the prompt yourself and give prompt_token_ids",
    "mm_processor_kwargs": "prompts are text only",
    "guided_options_request": "use SamplingParams(structured_outputs=...)",
    "chat_template_content_format": "text parts are joined into one string",
    "concurrency_limit": "set max_num_seqs of the LLM"}
# Values of these arguments that have no effect and are accepted, as None always is.
HARMLESS: dict[str, tuple[object, ...]] = {
    "chat_template_content_format": ("auto",), "tokenization_kwargs": ({},), "mm_processor_kwargs": ({},)}


def check_arguments(method: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise `InvalidParameter` for the first argument in `given` that `method` does not have.
    Arguments of vLLM in `ARGUMENTS` are accepted with a value without effect: None, or a value in `HARMLESS`."""
    name = method.__qualname__
    for argument, value in given.items():
        if (why := ARGUMENTS.get(argument)) is None:
            own = method.__kwdefaults__ or {}
            near = difflib.get_close_matches(argument, own, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(own)}."
            raise InvalidParameter(f"{name} has no parameter {argument!r}: {hint}", param=argument)
        if not has_no_effect(value, HARMLESS.get(argument, ())):
            raise InvalidParameter(f"{name}: {argument} is not implemented: {why}.", param=argument)


def no_attribute(kind: str, name: str) -> AttributeError:
    """Return the `AttributeError` for attribute `name` of class `kind`; vLLM's own methods get a hint."""
    if name in METHODS:
        return AttributeError(f"{kind}.{name} is not implemented: {METHODS[name]}.")
    return AttributeError(f"{kind!r} object has no attribute {name!r}")
