"""Fields of other servers' requests that this one does not act on, and what happens to each.

REFUSED fields would change the answer: any value but the listed harmless ones is refused. IGNORED ones do not change
it and are taken silently. Every further name that a schema does not have is told back in a header.
"""

from dataclasses import dataclass

CONSTRAINED = "output cannot be constrained to a schema, regex or grammar."
TOOLS = "the model cannot be given tools."
SAMPLERS = "there is no such sampler; temperature, top_k, top_p and min_p are there."
EXTENSIONS = "the engine has no such extension."


@dataclass(frozen=True)
class Refused:
    """Why a field is refused, and the values (beside null) that ask for nothing and are let through."""

    reason: str
    harmless: tuple[object, ...] = ()


_OFF = (0, 0.0, False)

REFUSED: dict[str, Refused] = {
    "tools": Refused(TOOLS, ([],)),
    "tool_choice": Refused(TOOLS, ("none", "auto")),
    "functions": Refused(TOOLS, ([],)),
    "function_call": Refused(TOOLS, ("none", "auto")),
    "web_search_options": Refused(TOOLS),
    "response_format": Refused(CONSTRAINED, ({"type": "text"},)),
    "structured_outputs": Refused(CONSTRAINED, ({},)),
    "structural_tag": Refused(CONSTRAINED),
    "guided_json": Refused(CONSTRAINED),
    "guided_regex": Refused(CONSTRAINED),
    "guided_choice": Refused(CONSTRAINED),
    "guided_grammar": Refused(CONSTRAINED),
    "guided_decoding": Refused(CONSTRAINED, ({},)),
    "json_schema": Refused(CONSTRAINED),
    "regex": Refused(CONSTRAINED),
    "ebnf": Refused(CONSTRAINED),
    "grammar": Refused(CONSTRAINED, ("",)),
    "suffix": Refused("text cannot be filled into a gap; put everything into the prompt.", ("",)),
    "best_of": Refused("ask for n completions with logprobs and choose.", (1,)),
    "use_beam_search": Refused("the server samples only; the offline LLM class has beam_search.", (False,)),
    "length_penalty": Refused("it belongs to beam search, which the server does not have.", (1, 1.0)),
    "early_stopping": Refused("it belongs to beam search, which the server does not have.", (False,)),
    "modalities": Refused("the answer is text.", (["text"],)),
    "audio": Refused("the answer is text."),
    "thinking_token_budget": Refused("max_tokens limits thinking and answer together.", (-1,)),
    "repetition_detection": Refused("repetition_penalty and frequency_penalty work against loops."),
    "chat_template": Refused(
        "a request cannot bring its own template; start the server with --chat-template to use another one."
    ),
    "prompt_embeds": Refused("a prompt is text or token ids."),
    "input_embeds": Refused("a prompt is text or token ids."),
    "lora_request": Refused("adapters are not loaded."),
    "lora_path": Refused("adapters are not loaded."),
    "logprobs_mode": Refused("logprobs are those of the raw logits.", ("raw_logprobs",)),
    "logits_processors": Refused("logit_bias, allowed_token_ids and bad_words change logits.", ([],)),
    "custom_logit_processor": Refused("logit_bias, allowed_token_ids and bad_words change logits."),
    "vllm_xargs": Refused(EXTENSIONS, ({},)),
    "kv_transfer_params": Refused(EXTENSIONS, ({},)),
    "ec_transfer_params": Refused(EXTENSIONS, ({},)),
    "typical_p": Refused(SAMPLERS, (1, 1.0)),
    "tfs_z": Refused(SAMPLERS, (1, 1.0)),
    "top_a": Refused(SAMPLERS, _OFF),
    "mirostat": Refused(SAMPLERS, _OFF),
    "mirostat_mode": Refused(SAMPLERS, _OFF),
    "dry_multiplier": Refused(SAMPLERS, _OFF),
    "xtc_probability": Refused(SAMPLERS, _OFF),
}

IGNORED: frozenset[str] = frozenset(
    {
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "verbosity",
        "prediction",  # a hint that would only save time
        "parallel_tool_calls",
        "session_id",
        "include_reasoning",
        "separate_reasoning",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "media_io_kwargs",
        "mm_processor_kwargs",
    }
)
