"""Keys are stable across processes, unambiguous, and hashed once."""

from array import array
from hashlib import sha256

import pytest

from quire.contracts.blocks import KVComponent, KVGeometry, KVGroup, StateComponent, StateGroup
from quire.kv.hashing import KeyChain, block_key, extras_digest, namespace_digest


def geometry(
    heads: int = 2, layers: tuple[int, ...] = (0, 1), window: int | None = None, states: str = ""
) -> KVGeometry:
    parts = tuple(KVComponent(name, heads, 64, "bfloat16", 2) for name in "kv")
    matrix = StateGroup(layers=(2,), components=(StateComponent("matrix", (2, 8, 8), states, 4),))
    group = KVGroup(block_size=4, layers=layers, components=parts, window=window)
    return KVGeometry(groups=(group,), states=(matrix,) if states else ())


def namespace(**changes: object) -> bytes:
    fields: dict = {"model": "m", "revision": "r", "dtype": "bfloat16", "block_size": 4, "geometry": geometry()}
    return namespace_digest(**(fields | changes))


ROOT = bytes(range(32))
TAGS = [("salt", "s")]


def test_namespace_depends_on_every_field():
    variants = [
        namespace(),
        namespace(model="n"),
        namespace(revision="s"),
        namespace(dtype="float8_e4m3fn"),
        namespace(block_size=8),
        namespace(weights="fp8"),
        namespace(geometry=geometry(heads=4)),
        namespace(geometry=geometry(layers=(0, 1, 2))),
        namespace(geometry=geometry(window=128)),
        *(namespace(geometry=geometry(states=dtype)) for dtype in ("float32", "bfloat16")),
    ]
    assert len(set(variants)) == len(variants)
    assert all(len(digest) == 32 for digest in variants)
    assert namespace() == namespace()


def test_neighbouring_fields_cannot_be_mixed_up():
    assert namespace(model="ab", revision="c") != namespace(model="a", revision="bc")
    assert extras_digest([("salt", "ab")]) != extras_digest([("salta", "b")])


def test_extras_are_tagged():
    salt, adapter = extras_digest([("salt", "x")]), extras_digest([("adapter", "x")])
    both = extras_digest([("salt", "x"), ("adapter", "y")])
    assert len({salt, adapter, both, extras_digest([("salt", "y"), ("adapter", "x")])}) == 4
    assert both == extras_digest([("adapter", "y"), ("salt", "x")])
    assert extras_digest([]) == b""
    assert extras_digest([("salt", "")]) != b""
    assert extras_digest([("salt", "\ud800")]) != extras_digest([("salt", "\ud801")])


def test_a_key_is_sha256_of_parent_tokens_and_extras():
    tokens = (1).to_bytes(4, "little") + (2**32 - 1).to_bytes(4, "little")
    assert block_key(ROOT, tokens, b"e") == sha256(ROOT + tokens + b"e").digest()
    assert KeyChain(ROOT, 2, array("I", [1, 2**32 - 1]), TAGS).keys(1) == [
        block_key(ROOT, memoryview(tokens), extras_digest(TAGS))
    ]


def test_keys_do_not_change_between_versions():
    # Stored and shared blocks are found by these bytes: a change here must come with a new namespace tag.
    assert namespace().hex().startswith("97f7d9f41afda72f")
    assert extras_digest([("salt", "x")]).hex().startswith("762e3a9027bb38a8")
    assert KeyChain(ROOT, 2, array("I", [1, 2, 3, 4])).keys(2)[1].hex().startswith("ea271eac604ceaf1")


def test_incremental_equals_at_once():
    tokens = array("I", range(50))
    at_once = KeyChain(ROOT, 4, tokens, TAGS).keys(12)
    growing = array("I", range(3))
    chain = KeyChain(ROOT, 4, growing, TAGS)
    assert chain.keys(0) == []
    for token in range(3, 50):
        growing.append(token)
        assert chain.keys(len(growing) // 4) == at_once[: (token + 1) // 4]
    assert chain.num_hashed == 12


def test_a_block_is_hashed_once():
    tokens = array("I", range(8))
    chain = KeyChain(ROOT, 4, tokens)
    before = chain.keys(2)
    tokens[0] = 99  # breaks the append-only rule on purpose: a second hash would see it
    assert chain.keys(2) == before
    assert chain.keys(2, 1) == before[1:]


def test_every_token_and_the_extras_reach_all_later_keys():
    base = KeyChain(ROOT, 4, array("I", range(12))).keys(3)
    for position in range(12):
        tokens = array("I", range(12))
        tokens[position] = 77
        changed = KeyChain(ROOT, 4, tokens).keys(3)
        assert [a == b for a, b in zip(base, changed, strict=True)] == [i < position // 4 for i in range(3)]
    salted = KeyChain(ROOT, 4, array("I", range(12)), TAGS).keys(3)
    assert not set(salted) & set(base)


def test_an_unfinished_block_has_no_key():
    with pytest.raises(AssertionError, match="not full"):
        KeyChain(ROOT, 4, array("I", range(7))).keys(2)
    with pytest.raises(AssertionError, match="not full"):
        KeyChain(ROOT, 4, array("I", range(3))).keys(1)


@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize("at_once", [True, False])
def test_private_blocks_have_keys_of_their_own(first: int, at_once: bool) -> None:
    """From the first private block on no key is that of another name; before it all are the ordinary ones."""
    tokens = array("I", range(20))
    open_, *private = (
        KeyChain(bytes(32), 4, tokens, (), own) for own in (None, (first, "a"), (first, "b"), (first, "a"))
    )
    for chain in private if at_once else ():
        chain.keys(first)
    one, two, again = (chain.keys(5) for chain in private)
    assert one == again and one[:first] == open_.keys(first)
    assert not set(one[first:]) & set(two[first:]) and not set(one[first:]) & set(open_.keys(5))
