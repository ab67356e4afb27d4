"""Names come once in an object, however tokens cut them."""

import json
import random

import pytest

from quire.answers.json_names import Names, TokenIndex

BYTES = [bytes([i]) for i in range(256)]
MORE = [
    b'"a":',
    b'{"a"',
    b',"a":1',
    b'a"',
    b'a":',
    b'b":1,"a":2',
    b'},"a"',
    b'":{"',
    b"ab",
    b'b"',
    b'""',
    b'"":',
    b"\\u00",
    b'"\\""',
    b'":1,"',
    b'"}',
    b'\\n"',
]
TOKENS = BYTES + MORE


def written(*parts: bytes) -> Names:
    names = Names(TokenIndex(TOKENS))
    assert not any([names.add(part) for part in parts])
    return names


@pytest.mark.parametrize(
    ("text", "repeating"),
    [
        ('{"a":1,"', [b'a"', b'a":']),
        ('{"a":1,"b', []),
        ('{"ab":1,"a', [b'b"']),
        ('{"a":{"', []),
        ('{"a":1', [b',"a":1']),
        ('{"a":[1', [b'},"a"']),
        ('{"a":{"b":1', [b'},"a"']),
        ('{"":1,', [b'""', b'"":']),
        ('{"":"', []),
        ('{"":1,"', [b'"', b'"}', b'":{"', b'":1,"', b'""', b'"":', b'"a":', b'"\\""']),
        ('{"a\\n":1,"a', [b'\\n"']),
        ('{"\\"":1,', [b'"\\""']),
        ('{"a":"', []),
        ('[{"a":1},{"', []),
        ('{"a":"{\\"b","', [b'a"', b'a":']),
    ],
    ids=str,
)
def test_what_may_not_come(text: str, repeating: list[bytes]) -> None:
    """The tokens that end a name again; and in a name none that spells a character by its number."""
    found = {TOKENS[i] for i in written(text.encode()).repeating()}
    assert found - {b"\\u00", b'b":1,"a":2'} == {*repeating}, found


def test_a_name_is_spelled_in_one_way() -> None:
    assert b"\\u00" in {TOKENS[i] for i in written(b'{"a').repeating()}
    assert b"u" in {TOKENS[i] for i in written(b'{"a\\').repeating()}
    assert not {b"u", b"\\u00"} & {TOKENS[i] for i in written(b'{"a":"\\').repeating()}


def test_what_leads_to_a_name_again() -> None:
    for text, leading in (('{"ab":1,"', [b"a", b"ab"]), ('{"ab":1,"a', [b"b"]), ('{"ab":"', []), ('{"ab":1,', [b'"'])):
        names = written(text.encode())
        found = [i for i in names.leading() if names.after(i).is_again()]
        assert {TOKENS[i] for i in found} - {b'{"a"', b'a"', b'b"', b'\\n"'} == {*leading}, text


def test_random_texts_of_tokens_have_every_name_once() -> None:
    """Whatever is drawn of what may come, judged by a reader that knows nothing of tokens."""
    rng, count = random.Random(0), 0

    def pairs(found: list[tuple[str, object]]) -> None:
        assert len({name for name, _ in found}) == len(found), found

    for _ in range(400):
        names, text = Names(TokenIndex(TOKENS)), b""
        members = [b'"%b":1' % rng.choice([b"", b"a", b"ab", b"b", b'\\"', b"\\n", b"aa"]) for _ in range(5)]
        wanted = b"{" + b",".join(members[: rng.randint(1, 5)]) + b"}"
        while text != wanted:
            fitting = [i for i, token in enumerate(TOKENS) if wanted.startswith(token, len(text))]
            left = sorted({*fitting} - {*names.repeating()})
            if not left:
                break
            token = TOKENS[rng.choice(left)]
            names.add(token)
            text += token
        else:
            count += 1
            json.loads(text, object_pairs_hook=pairs)
        repeated = len({*members}) < len(members)
        assert text == wanted or repeated
    assert count > 100
