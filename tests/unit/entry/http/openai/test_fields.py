"""What becomes of every field that a client may send: it is used, ignored by design, or refused by name."""

import json
from typing import Any

import pytest

from quire.contracts.errors import InvalidParameter
from quire.entry.http.errors import HttpError
from quire.entry.http.openai.chat import DECODER as CHAT
from quire.entry.http.openai.completions import DECODER as COMPLETIONS
from quire.entry.http.openai.decode import IGNORED, REFUSED, RequestDecoder
from quire.entry.http.openai.schema import ChatRequest, CompletionRequest

# OpenAI's, as of its API description 2.3.0 and its Python library 3.52.
BOTH = "model stream stream_options n stop seed logit_bias temperature top_p frequency_penalty presence_penalty user"
OPENAI_CHAT = f"""{BOTH} messages max_tokens max_completion_tokens logprobs top_logprobs tools tool_choice
    parallel_tool_calls functions function_call response_format reasoning_effort modalities audio metadata store
    service_tier prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier verbosity prediction
    web_search_options moderation""".split()
OPENAI_COMPLETION = f"{BOTH} prompt max_tokens echo suffix best_of logprobs".split()
# What clients of other open engines send beside them, to both.
EXTENSIONS = """top_k min_p repetition_penalty min_tokens ignore_eos stop_token_ids include_stop_str_in_output
    skip_special_tokens spaces_between_special_tokens allowed_token_ids bad_words prompt_logprobs logprob_token_ids
    return_token_ids return_tokens_as_token_ids return_token_offsets return_prompt_text cache_salt priority request_id
    structured_outputs response_format guided_json guided_regex guided_choice guided_grammar guided_decoding
    guided_decoding_backend guided_whitespace_pattern structural_tag truncate_prompt_tokens truncation_side
    add_special_tokens use_beam_search length_penalty stream_interval thinking_token_budget repetition_detection
    kv_transfer_params ec_transfer_params vllm_xargs logits_processors mm_processor_kwargs session_id""".split()
EXTENSIONS_CHAT = """echo add_generation_prompt continue_final_message documents chat_template chat_template_kwargs
    include_reasoning separate_reasoning media_io_kwargs""".split()


def fates(name: str, kind: type, decoder: RequestDecoder[Any]) -> list[str]:
    """Every way in which a route treats a field."""
    needed = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    body = {known: needed[known] for known in needed if known in kind.__struct_fields__}  # type: ignore[attr-defined]
    body |= {name: {"odd": [1]}}
    used, ignored = name in kind.__struct_fields__, name in IGNORED  # type: ignore[attr-defined]
    fates = ["used"] * used + ["ignored"] * (ignored and not used)
    try:
        _, unknown = decoder.decode(json.dumps(body).encode())
    except HttpError as error:
        assert error.param == name and name in error.message
        fates.append("refused")
    except InvalidParameter as error:
        assert used and error.param == name
    else:
        assert ignored or ascii(name) not in unknown, f"{name} is unknown"
    return fates


@pytest.mark.parametrize("name", sorted({*OPENAI_CHAT, *EXTENSIONS, *EXTENSIONS_CHAT}))
def test_chat(name: str) -> None:
    assert len(fates(name, ChatRequest, CHAT)) == 1


@pytest.mark.parametrize("name", sorted({*OPENAI_COMPLETION, *EXTENSIONS}))
def test_completions(name: str) -> None:
    assert len(fates(name, CompletionRequest, COMPLETIONS)) == 1


def test_the_lists_are_the_client_library_s() -> None:
    library = pytest.importorskip("openai.types")
    of_chat = library.chat.completion_create_params.CompletionCreateParamsStreaming.__annotations__
    of_completions = library.completion_create_params.CompletionCreateParamsStreaming.__annotations__
    assert set(of_chat) <= set(OPENAI_CHAT) and set(of_completions) <= set(OPENAI_COMPLETION)


def test_a_refusal_names_the_way_that_works() -> None:
    for name, words in {"guided_json": '{"json": ...}', "guided_regex": '{"regex": ...}', "functions": "tools",
                        "function_call": "tool_choice", "guided_grammar": '{"grammar": ...}'}.items():
        assert words in REFUSED[name].reason and REFUSED[name].reason.startswith("send ")
