"""Plain decoding of many kinds of requests: the truth of every test of drafts, made once in a process."""

from functools import cache
from typing import Any

import numpy as np

from quire import LLM, SamplingParams
from quire.contracts.structured import StructuredOutputsParams

CODE = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef add(a, b):"
PROSE = "The module provides"
LONG = f"{CODE}\n\n{PROSE} a class. {PROSE} a function. " * 4
COLD, WARM = {"temperature": 0.0}, {"temperature": 0.7, "seed": 11}
SCHEMA = {
    "type": "object",
    "properties": {
        "function": {"enum": ["add", "sub"]},
        "arguments": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 3},
    },
    "required": ["function", "arguments"],
    "additionalProperties": {"type": "integer"},
}


SYNTHETIC = {"rejection_sample_method": "synthetic"}


def structured(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": StructuredOutputsParams(**fields)}


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CODE, COLD),
    (PROSE, COLD),
    (LONG, COLD),
    (LONG, WARM),
    (CODE, WARM | {"n": 3}),
    (LONG, COLD | {"logprobs": 2, "prompt_logprobs": 1}),
    (CODE, WARM | {"presence_penalty": 0.6, "logprobs": 1}),
    (LONG, COLD | {"repetition_penalty": 1.2, "frequency_penalty": 0.3}),
    (LONG, COLD | {"stop": ["a function", "sub("]}),
    (CODE, WARM | {"bad_words": [" return", "(a"]}),
    (PROSE, WARM | {"logit_bias": {5: 3.0, 9: -100.0}, "min_p": 0.05}),
    (CODE, COLD | structured(regex="[a-z ]{20}")),
    (LONG, WARM | {"top_k": 20, "top_p": 0.9, "speculative_tokens": 1}),
    (CODE, COLD | {"speculative_tokens": 0}),
    (LONG, COLD | {"min_tokens": 12, "ignore_eos": False}),
    (CODE, WARM | {"allowed_token_ids": [*range(20, 300)]}),
    (LONG, COLD | structured(json=SCHEMA)),
    (CODE, WARM | {"n": 2, "logprobs": 1} | structured(json=SCHEMA)),
    (LONG, WARM | structured(regex="(The module provides a (class|function)\\. )+", after="sub", budget=7)),
    (LONG, COLD | structured(regex="( The module provides a [a-z]+\\.)+")),
    (PROSE, COLD | {"min_tokens": 9} | structured(after="\n\n", budget=5)),
    (LONG, COLD | {"stop_token_ids": [297]}),
    (LONG, COLD | {"max_tokens": 18}),
    (CODE, WARM | {"max_tokens": 7}),
    (LONG, WARM | {"prompt_logprobs": 1, "top_p": 0.8}),
]
OPTIONS = {
    "dtype": "float32",
    "num_threads": 1,
    "max_num_seqs": 12,
    "use_tqdm_on_load": False,
    "block_size": 16,
    "max_model_len": 384,
}


class Truth:
    """Answers of plain decoding by the bundled model.

    texts   seed of a request -> its tokens, prompt and output
    """

    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}
        with LLM(**OPTIONS) as llm:
            finisher = llm.engine.core._finisher
            end = finisher.end
            finisher.end = lambda request, *args, **more: (
                self.texts.update({request.new.sampler.seed: [*request.tokens]}),
                end(request, *args, **more),
            )[1]
            self.answers = answers(llm, undrafted())


def params(fields: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 48, "ignore_eos": True} | fields))


def answers(llm: LLM, requests: list[tuple[str, dict[str, Any]]], place: slice = slice(None)) -> list[Any]:
    """Every completion in parts that must be equal, then the numbers that rounding may change."""
    found = []
    seeded = [params(fields | {"seed": 11 + i}) for i, (_, fields) in enumerate(requests)][place]
    by_priority = llm.engine.config.scheduler.scheduling_policy == "priority"
    priority = [i * 7 % 3 for i in range(len(seeded))] if by_priority else None
    outputs = llm.generate([prompt for prompt, _ in requests][place], seeded, use_tqdm=False, priority=priority)
    for output in outputs:
        rows = [*(output.prompt_logprobs or []), *(row for one in output.outputs for row in one.logprobs or [])]
        exact = [(one.text, one.token_ids, one.finish_reason, one.stop_reason) for one in output.outputs]
        numbers = [value.logprob for row in rows if row for value in row.values()]
        ids = [(token, value.rank) for row in rows if row for token, value in row.items()]
        found.append((exact, ids, np.array(numbers)))
    return found


def undrafted() -> list[tuple[str, dict[str, Any]]]:
    """Return REQUESTS for an engine without drafts."""
    return [(prompt, {k: v for k, v in f.items() if k != "speculative_tokens"}) for prompt, f in REQUESTS]


def check(found: list[Any], expected: list[Any], place: slice = slice(None)) -> None:
    for (_, fields), one, other in zip(REQUESTS[place], found, expected, strict=True):
        assert one[:2] == other[:2], fields
        np.testing.assert_allclose(one[2], other[2], atol=2e-4, err_msg=str(fields))


@cache
def bundled_truth() -> Truth:
    """Plain decoding of all requests by the bundled model, in float32."""
    return Truth()
