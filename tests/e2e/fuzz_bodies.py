"""Request bodies that no client should send: valid ones with something wrong in them, the same ones for a seed.

`body(seed, index)` is a function of its arguments alone, so that a failure can be repeated by its number.
"""

import gzip
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire.entry.http.openai.decode import IGNORED, REFUSED
from quire.entry.http.openai.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

Node = Any  # dict, list, scalar or Raw
Path = tuple[str | int, ...]


class Raw(str):
    """JSON, or what looks like it, as it is."""


@dataclass(frozen=True)
class Shot:
    """A request: a POST of `data` to `path`."""

    path: str
    data: bytes
    headers: dict[str, str]
    chunked: bool = False
    leaves: bool = False  # the client hangs up without waiting for an answer


TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "\u00e9\U0001f642"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "hm",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "content": "3", "tool_call_id": "c", "name": "f"},
    {"role": "user", "content": "And now?"},
]
SAMPLING = {
    "model": "quire-tiny",
    "max_tokens": 4,
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "stop": ["a", "b"],
    "logit_bias": {"5": -1.5},
    "stop_token_ids": [9],
    "bad_words": ["bad"],
    "allowed_token_ids": [1, 2, 3, 4],
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "prompt_logprobs": 1,
    "frequency_penalty": 0.5,
    "user": "me",
    "request_id": None,
    "cache_salt": "s",
}
VALID: dict[str, dict[str, Node]] = {
    "/v1/completions": SAMPLING | {"prompt": [[5, 6, 7], [8, 9]], "echo": True, "logprobs": 2},
    "/v1/chat/completions": SAMPLING
    | {"messages": TURNS, "logprobs": True, "top_logprobs": 2, "chat_template_kwargs": {"enable_thinking": False}},
    "/tokenize": {"messages": TURNS, "return_token_strs": True, "add_generation_prompt": True},
    "/detokenize": {"tokens": [5, 6, 7], "skip_special_tokens": True},
}
SHORT: dict[str, dict[str, Node]] = {
    "/v1/completions": {"prompt": "Once", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/tokenize": {"prompt": "Once"},
    "/detokenize": {"tokens": []},
}
FIELDS = {
    "/v1/completions": CompletionRequest.__struct_fields__,
    "/v1/chat/completions": ChatRequest.__struct_fields__,
    "/tokenize": TokenizeRequest.__struct_fields__,
    "/detokenize": DetokenizeRequest.__struct_fields__,
}
OTHERS = sorted(REFUSED | dict.fromkeys(IGNORED)) + ["", "no_such", "__class__", "\u00fc\n", "x" * 5000, "\U0001f642"]
ODD = [
    Raw(text)
    for text in (
        "null",
        "true",
        "false",
        "0",
        "-0",
        "1",
        "-1",
        "-2",
        "2",
        "20",
        "128",
        "129",
        "1.0",
        "1.5",
        "-0.0",
        "0.1",
        "1e400",
        "-1e400",
        "1e-400",
        "NaN",
        "Infinity",
        "-Infinity",
        "01",
        "+1",
        ".5",
        "1.",
        "0x10",
        "2147483648",
        "-2147483649",
        "9223372036854775807",
        "9223372036854775808",
        "-9223372036854775809",
        "18446744073709551616",
        "9" * 400,
        "-" + "9" * 400,
        "1" + "0" * 5000,
        '""',
        '"x"',
        '"0"',
        '"1"',
        '"true"',
        '"null"',
        '"NaN"',
        '"quire-tiny"',
        '"\\u0000"',
        '"\\ud800"',
        '"\\udc00\\ud800"',
        '"\\ud83d\\ude42"',
        '"\u202e\u0301"',
        '"\\x41"',
        '"\\u12"',
        '"a\nb"',
        "'x'",
        '"<|im_start|>system"',
        '"{{ 7*7 }}"',
        '"%s%n"',
        "[]",
        "[null]",
        "[true]",
        "[0]",
        "[1,2,3]",
        "[-1]",
        "[8191]",
        "[8192]",
        "[9223372036854775808]",
        "[1.5]",
        '["x"]',
        '[""]',
        '["x",1]',
        "[1,[2]]",
        "[[]]",
        "[[1],[]]",
        "[[[1]]]",
        "[[1,-5]]",
        '[["x"]]',
        "[{}]",
        '[{"role":"user"}]',
        '[{"role":"user","content":[]}]',
        '[{"role":"user","content":[{"type":"image_url"}]}]',
        '[{"role":"user","content":[{"type":"text"}]}]',
        '[{"role":[],"content":{}}]',
        '[{"content":"x"}]',
        '[{"role":"assistant","content":"x"}]',
        '[{"role":"user","content":"x","tool_calls":{}}]',
        "{}",
        '{"x":1}',
        '{"0":1}',
        '{"-1":1}',
        '{"8192":1}',
        '{"5":101}',
        '{"5":null}',
        '{"99999999999999999999":1}',
        '{"5":1,"5":2}',
        '{"":""}',
        '{"include_usage":1}',
        '{"type":"text"}',
        '{"type":"json_object"}',
        '{"messages":[]}',
        '{"tokenize":1,"chat_template":"x"}',
        '{"__proto__":{"__class__":"x"}}',
        "undefined",
        "",
        ",",
        "[1,]",
        '{"a":1,}',
        "[1 2]",
        "tru",
    )
]
LARGE = [
    Raw(text)
    for text in (
        "[" * 200 + "]" * 200,
        "[" * 100_000,
        "[" * 100_000 + "]" * 100_000,
        '{"a":' * 50_000 + "1" + "}" * 50_000,
        "[" + ",".join(["7"] * 100_000) + "]",
        "[" + ",".join(["[7]"] * 100_000) + "]",
        "[" + ",".join(['"x"'] * 100_000) + "]",
        "[" + ",".join(["{}"] * 100_000) + "]",
        "[" + "null," * 100_000 + "1]",
        '"' + "x" * 300_000 + '"',
        '"' + "\U0001f642" * 100_000 + '"',
        '"' + "\\n" * 100_000 + '"',
        '"' + " " * 300_000 + '"',
        "{" + ",".join(f'"{i}":1' for i in range(100_000)) + "}",
        "9" * 300_000,
    )
]
PRODUCT = [(path, field, value) for path, fields in FIELDS.items() for field, value in itertools.product(fields, ODD)]
random.Random(0).shuffle(PRODUCT)
TYPES = (
    "application/json; charset=utf-8",
    "application/json;charset=utf-16",
    "APPLICATION/JSON",
    "text/plain",
    "application/x-www-form-urlencoded",
    "",
    "application/json, text/html",
    "multipart/form-data; boundary=x",
)
HEADERS = {
    "x-request-id": ("", "a b", "\u00ff" * 20, "x" * 5000, "1"),
    "accept": ("text/html", "*/*;q=-1"),
    "x-request-timeout": ("", "-1", "0", "nan", "inf", "1e999", "soon", "60"),
    "content-encoding": ("gzip", "x"),
}


def body(seed: int, index: int) -> Shot:
    """The request of a number: in turn one schema field with one odd value, and anything."""
    rng = random.Random(f"{seed}/{index}")
    if index % 2 == 0:
        path, field, value = PRODUCT[index // 2 % len(PRODUCT)]
        request = rng.choice((VALID, SHORT))[path] | {field: value}
        data = dump(request | ({"stream": True} if rng.random() < 0.3 and field != "stream" else {})).encode()
    else:
        path = rng.choice((*VALID, "/v1/completions", "/v1/chat/completions"))
        data = damaged(rng, mutated(rng, path))
    headers = {"content-type": "application/json"}
    if rng.random() < 0.05:
        headers["content-type"] = rng.choice(TYPES)
    if rng.random() < 0.05:
        name = rng.choice(sorted(HEADERS))
        headers[name] = rng.choice(HEADERS[name])
    return Shot(path, data, headers, chunked=rng.random() < 0.1, leaves=rng.random() < 0.02)


def dump(node: Node) -> str:
    """JSON with the raw pieces in their places."""
    if isinstance(node, Raw):
        return str(node)
    if isinstance(node, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{dump(value)}" for key, value in node.items()) + "}"
    if isinstance(node, list):
        return "[" + ",".join(map(dump, node)) + "]"
    return json.dumps(node)


def paths(node: Node, at: Path = ()) -> Iterator[Path]:
    """Return the paths of every entry, at every depth."""
    inside = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in inside:
        yield (*at, key)
        yield from paths(value, (*at, key))


def put(node: Node, path: Path, value: Node) -> Node:
    """A copy with another value somewhere."""
    if not path:
        return value
    if isinstance(node, dict):
        return {key: put(old, path[1:], value) if key == path[0] else old for key, old in node.items()}
    return [put(old, path[1:], value) if key == path[0] else old for key, old in enumerate(node)]


def mutated(rng: random.Random, path: str) -> str:
    """A valid request with up to three values replaced, moved, left out or added."""
    request: Node = dict(rng.choice((VALID, VALID, SHORT))[path])
    if rng.random() < 0.3:
        request["stream"] = True
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        if not isinstance(request, dict) or not request:
            break
        value: Node = rng.choice(LARGE if rng.random() < 0.02 else ODD)
        where = rng.choice(list(paths(request)))
        action = rng.randrange(6)
        if action == 0:  # of another request, or of another field
            value = rng.choice(list(VALID[rng.choice(sorted(VALID))].values()))
        if action == 1:
            request.pop(rng.choice(sorted(request)))
        elif action == 2:
            request = request | {rng.choice(OTHERS): value}
        elif action == 3:
            request = request | {rng.choice(FIELDS[path]): value}
        else:
            request = put(request, where, value)
    text = dump(request)
    wrapped = rng.random()
    if wrapped < 0.03:
        return rng.choice(("[%s]", '{"body":%s}', "%s%s", "\ufeff%s", " \n\t%s\r\n ", "%s,")).replace("%s", text)
    if wrapped < 0.06:
        return dump(rng.choice(ODD))
    if wrapped < 0.10 and text.startswith("{"):  # a key twice
        return "{" + f"{json.dumps(rng.choice(FIELDS[path]))}:{dump(rng.choice(ODD))}," + text[1:]
    return text


def damaged(rng: random.Random, text: str) -> bytes:
    """Mostly as it is; else cut, overwritten or in an encoding that JSON does not have."""
    data, kind = text.encode("utf-8", "surrogatepass"), rng.random()
    at = rng.randrange(len(data) + 1)
    if kind < 0.06:
        return data[:at]
    if kind < 0.12:
        return data[:at] + rng.randbytes(rng.choice((1, 1, 2, 8))) + data[at + 1 :]
    if kind < 0.15:
        return data[:at] + rng.choice((b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\x00")) + data[at:]
    if kind < 0.16:
        return text.encode(rng.choice(("utf-16", "utf-32", "utf-7")), "replace")
    if kind < 0.17:
        return gzip.compress(data, mtime=0)
    return rng.randbytes(at % 300) if kind < 0.18 else data
