"""Every field that a client may send is used, ignored by design, or refused by name."""

import json
from contextlib import suppress
from typing import Any

import pytest

from quire.contracts.errors import InvalidParameter
from quire.entry.http.anthropic.messages import DECODER as MESSAGES
from quire.entry.http.errors import HttpError
from quire.entry.http.openai.chat import DECODER as CHAT
from quire.entry.http.openai.completions import DECODER as COMPLETIONS
from quire.entry.http.openai.decode import IGNORED, REFUSED, ROUTES, RequestDecoder
from quire.entry.http.openai.embeddings import DECODER as EMBEDDINGS
from quire.entry.http.openai.models import DETOKENIZE, TOKENIZE
from quire.entry.http.openai.rerank import RERANK, SCORE
from quire.entry.http.openai.responses import DECODER as RESPONSES
from quire.entry.http.openai.schema import ChatRequest, CompletionRequest, SamplingFields
from quire.entry.http.openai.unknown import HINTS

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
        fates += ["told" for one in unknown if one == ascii(name) + HINTS.get(name, "")]
    return fates


@pytest.mark.parametrize("name", sorted({*OPENAI_CHAT, *EXTENSIONS, *EXTENSIONS_CHAT}))
def test_chat(name: str) -> None:
    assert len(fates(name, ChatRequest, CHAT)) == 1


@pytest.mark.parametrize("name", sorted({*OPENAI_COMPLETION, *EXTENSIONS}))
def test_completions(name: str) -> None:
    assert len(fates(name, CompletionRequest, COMPLETIONS)) == 1


DECODERS = {
    "chat": CHAT,
    "completions": COMPLETIONS,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "embeddings": EMBEDDINGS,
    "rerank": RERANK,
    "score": SCORE,
    "tokenize": TOKENIZE,
    "detokenize": DETOKENIZE,
}
NOT_IN_A_PROMPT = {*SamplingFields.__struct_fields__, "max_completion_tokens"}
EVERYWHERE = sorted({name for names in ROUTES.values() for name in names} - IGNORED)


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
def test_no_route_takes_what_only_others_read(decoder: RequestDecoder[Any]) -> None:
    own = {field.encode_name for field in decoder._type.fields}  # type: ignore[attr-defined]
    for name in EVERYWHERE:
        if name in own or (decoder is DECODERS["tokenize"] and name in NOT_IN_A_PROMPT):
            continue
        for value in ({"odd": [1]}, "odd", [7], 7):
            with pytest.raises(HttpError) as caught:
                decoder.decode(json.dumps({name: value}).encode())
            assert caught.value.param == name and f"{name} is not" in caught.value.message
        with pytest.raises(InvalidParameter):  # what is missing
            decoder.decode(json.dumps({name: None}).encode())
            raise InvalidParameter("nothing is missing")


@pytest.mark.parametrize(
    ("decoder", "name", "words"),
    [
        (MESSAGES, "stop", "send stop_sequences instead"),
        (MESSAGES, "max_completion_tokens", "send max_tokens instead"),
        (MESSAGES, "functions", '{"name": ..., "input_schema"'),
        (MESSAGES, "guided_json", "output_config"),
        (MESSAGES, "seed", "send it to /v1/chat/completions"),
        (MESSAGES, "structured_outputs", "output_config"),
        (CHAT, "stop_sequences", "send stop instead"),
        (CHAT, "system", "send messages instead"),
        (CHAT, "thinking", "reasoning_effort"),
        (CHAT, "reasoning", "reasoning_effort"),
        (CHAT, "suffix", "/v1/completions"),
        (CHAT, "max_output_tokens", "max_completion_tokens"),
        (CHAT, "previous_response_id", "/v1/responses"),
        (CHAT, "enable_thinking", "chat_template_kwargs"),
        (COMPLETIONS, "messages", "send prompt instead"),
        (COMPLETIONS, "top_logprobs", "/v1/chat/completions"),
        (EMBEDDINGS, "pooling_type", "--pooler-config"),
        (EMBEDDINGS, "prompt_name", "as they are sent"),
        (RESPONSES, "documents", "/v1/chat/completions"),
        (RESPONSES, "echo", "/v1/chat/completions"),
        (RESPONSES, "functions", '"name": ..., "parameters"'),
    ],
)
def test_what_is_read_elsewhere_is_refused_with_what_to_send(
    decoder: RequestDecoder[Any], name: str, words: str
) -> None:
    with pytest.raises(HttpError) as caught:
        decoder.decode(json.dumps({name: {"odd": 1}}).encode())
    assert caught.value.param == name and words in caught.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 1),
        ("stream", False),
        ("presence_penalty", 0),
        ("frequency_penalty", 0.0),
        ("parallel_tool_calls", True),
        ("include_reasoning", True),
        ("tools", []),
        ("stop", []),
        ("logit_bias", {}),
        ("response_format", {"type": "text"}),
    ],
)
def test_what_asks_for_nothing_is_taken_by_every_route(name: str, value: Any) -> None:
    for decoder in DECODERS.values():
        with suppress(InvalidParameter):  # of what is missing
            decoder.decode(json.dumps({name: value}).encode())


def test_the_lists_are_the_client_library_s() -> None:
    library = pytest.importorskip("openai.types")
    of_chat = library.chat.completion_create_params.CompletionCreateParamsStreaming.__annotations__
    of_completions = library.completion_create_params.CompletionCreateParamsStreaming.__annotations__
    assert set(of_chat) <= set(OPENAI_CHAT) and set(of_completions) <= set(OPENAI_COMPLETION)


def test_a_refusal_names_the_way_that_works() -> None:
    for name, words in {
        "guided_json": '{"json": ...}',
        "guided_regex": '{"regex": ...}',
        "functions": "tools",
        "function_call": "tool_choice",
        "guided_grammar": '{"grammar": ...}',
    }.items():
        assert words in REFUSED[name].reason and REFUSED[name].reason.startswith("send ")
