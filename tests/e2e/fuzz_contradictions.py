"""Requests whose fields are right one by one and contradict each other; the same ones for a seed.

`request(seed, index, words)` is a function of its arguments alone. It draws from few values, so that they often meet.
"""

import random
from typing import Any

ENDS = (2, 3)  # of the bundled model
USER = [{"role": "user", "content": "a"}]
FUNCTION = {
    "name": "f",
    "strict": True,
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
GRAMMARS = (
    'start: "a"',
    "start: <|im_end|>",
    'start: "a" <|endoftext|>',
    'start: "a"* <|im_end|>',
    'start: ""',
    "start: <[0]>",
    'root ::= "a"*',
    "start: start",
    "",
)
SCHEMAS: tuple[Any, ...] = (
    {},
    False,
    {"const": 1},
    {"enum": []},
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"type": "array", "minItems": 3, "maxItems": 1},
    {"type": "integer", "minimum": 5, "maximum": 2},
    {"$ref": "#"},
    {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]},
)
STRUCTURED = (
    *({"grammar": one} for one in GRAMMARS),
    *({"json": one} for one in SCHEMAS),
    {"choice": ["a"]},
    {"choice": [""]},
    {"choice": ["<|im_end|>"]},
    {"regex": ""},
    {"regex": "a{3}"},
    {"regex": "(ab)*"},
    {"regex": "[^\\x00-\\x{10ffff}]"},
    {"json_object": True},
)
TEXTS = ("a", " ", "\x00", "<|im_end|>", "</think>", "{{ 7 }}", "\ufffd", "\u202e\u0301", "ab" * 60)


def request(seed: int, index: int, words: dict[str, int]) -> tuple[str, dict[str, Any]]:
    """A path and a body. `words`: tokens of the model by their texts."""
    rng = random.Random(f"{seed}/{index}")
    ids, texts = [*words.values(), *ENDS], list(words)

    def some(values: Any, most: int = 3) -> list[Any]:
        return [rng.choice(values) for _ in range(rng.randint(1, most))]

    fields: dict[str, Any] = {
        "min_tokens": rng.choice((0, 1, 2, 4)),
        "max_tokens": rng.choice((0, 1, 4, 6)),
        "allowed_token_ids": some(ids),
        "stop_token_ids": rng.choice((some(ids), [*range(1024)])),
        "bad_words": some([*texts, *(one + other for one in texts for other in texts)]),
        "logit_bias": rng.choice(({str(i): -100 for i in range(1024)}, {str(i): 100 for i in ENDS})),
        "ignore_eos": rng.random() < 0.5,
        "n": rng.choice((1, 2)),
        "temperature": rng.choice((0, 1e-320, 0.01, 2)),
        "top_p": rng.choice((0, 1e-300, 1)),
        "top_k": rng.choice((-1, 1, 2**62)),
        "min_p": rng.choice((0, 1)),
        "repetition_penalty": rng.choice((0.01, 100)),
        "seed": rng.choice((-(2**63), 2**64 - 1)),
        "stop": some(texts),
        "stream": rng.random() < 0.7,
        "stream_interval": rng.choice((1, 2**62)),
        "truncate_prompt_tokens": rng.choice((-1, 1, 2**40)),
        "prompt_logprobs": 1,
        "priority": 0,
        "logprob_token_ids": some(ids),
        "skip_special_tokens": False,
        "return_token_ids": True,
    }
    structured = {"structured_outputs": rng.choice(STRUCTURED)}
    tool = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": rng.choice(("required", "auto"))}
    path = rng.choice(("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"))
    if path == "/v1/embeddings":
        given = rng.choice((rng.choice(TEXTS), some(TEXTS), ids, [ids]))
        return path, {"input": given, "dimensions": rng.choice((1, 2))}
    if path == "/v1/messages":
        schema = {"name": "f", "input_schema": rng.choice(SCHEMAS[1:])}
        return path, {
            "model": "quire-tiny",
            "messages": USER,
            "max_tokens": rng.choice((0, 1, 4, 2**40)),
            "tools": [schema],
            "tool_choice": {"type": rng.choice(("any", "auto"))},
            "stop_sequences": some(texts),
        }
    body = {name: fields[name] for name in rng.sample(sorted(fields), rng.randint(1, 4))}
    for name in rng.sample(("min_tokens", "allowed_token_ids", "bad_words", "stop_token_ids"), rng.randint(1, 3)):
        body[name] = fields[name]
    body |= {"max_tokens": 5} | body | (structured if rng.random() < 0.6 else {})
    if path == "/v1/completions":
        prompt = rng.choice((rng.choice(TEXTS), some(TEXTS), ids, [ids, [5]]))
        return path, body | {"prompt": prompt} | ({"echo": True, "logprobs": 1} if rng.random() < 0.2 else {})
    body |= {"thinking_token_budget": rng.choice((0, 1))} if rng.random() < 0.1 else {}
    body |= tool if rng.random() < 0.1 else {}
    if path == "/v1/chat/completions":
        return path, body | {"messages": [{"role": "user", "content": rng.choice(TEXTS)}]}
    ours = (
        "temperature",
        "top_k",
        "seed",
        "structured_outputs",
        "min_tokens",
        "allowed_token_ids",
        "bad_words",
        "stop_token_ids",
        "ignore_eos",
        "stream",
    )
    asked = {name: body[name] for name in ours if name in body}
    return path, {"input": rng.choice(TEXTS), "max_output_tokens": 5} | asked
