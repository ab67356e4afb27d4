"""Why a prompt was not reused: every reason, and that what is remembered has a bound."""

from array import array

import pytest

from quire.contracts.blocks import KVComponent, KVGeometry, KVGroup
from quire.contracts.prefix import Miss
from quire.kv import miss_reasons
from quire.kv.hashing import KeyChain
from quire.kv.miss_reasons import PrefixHistory
from quire.kv.pool import BlockPool
from quire.kv.prefix import PrefixIndex
from quire.kv.states import StateCheckpoints

ROOT, OTHER_ROOT = bytes(32), bytes(range(32))
SIZE = 4


class Cache:
    """A pool whose prompts are remembered under the number of their admission."""

    def __init__(self, num_blocks: int = 400, *, enabled: bool = True, states: StateCheckpoints | None = None) -> None:
        self.pool, self.now = BlockPool(num_blocks), 100.0
        group = KVGroup(block_size=SIZE, layers=(0,), components=(KVComponent("k", 1, 8, "float32", 4),))
        self.index = PrefixIndex(self.pool, KVGeometry(groups=(group,)), states)
        self.history = PrefixHistory(self.pool, enabled=enabled, states=states, clock=lambda: self.now)
        self.count = 0

    def admit(self, tokens, tags=(), root=ROOT, *, published=None, reads=True, limit=None):
        """Return the reason for a prompt; then compute and free it. The first `published` blocks are indexed."""
        chain = KeyChain(root, SIZE, array("I", tokens), tags)
        match = self.index.match(chain, (len(chain.tokens) - 1 if limit is None else limit) if reads else 0)
        report = self.history.admit(str(self.count), chain, match, len(chain.tokens), reads=reads)
        self.count += 1
        full = len(chain.tokens) // SIZE if published is None else published
        self.pool.share(match.blocks[0])
        blocks = match.blocks[0] + self.pool.take(full - len(match.blocks[0]))
        for block, key in zip(blocks, chain.keys(full), strict=True):
            self.pool.publish(block, key)
        self.pool.release(blocks)
        return report


PROMPT = list(range(10, 30))  # 5 blocks


def changed(at: int) -> list[int]:
    return [*PROMPT[:at], 999, *PROMPT[at + 1 :]]


def test_nothing_is_said_of_a_prompt_that_is_all_there():
    cache = Cache()
    cache.admit(PROMPT)
    assert cache.admit([*PROMPT, 5]) is None
    assert cache.admit([1, 2, 3]) is None  # no full block


def test_the_first_prompt_is_new():
    report = Cache().admit(PROMPT)
    assert (report.why, report.num_reused, report.num_blocks, report.block, report.position) == (Miss.NEW, 0, 5, 0, 0)
    assert report.nearest == "" and report.differs_at is None


@pytest.mark.parametrize("at", [1, 3, 4, 9, 15, 19])
def test_the_first_token_that_differs_is_named(at):
    cache = Cache()
    cache.admit(PROMPT)
    report = cache.admit(changed(at) + [1])
    block = at // SIZE
    assert (report.why, report.nearest, report.differs_at) == (Miss.TOKENS, "0", at)
    assert (report.num_reused, report.block, report.position) == (block, block, block * SIZE)


def test_the_nearest_of_several_siblings_counts():
    cache = Cache()
    for prompt in (changed(9), changed(11), changed(8)):
        cache.admit(prompt)
    report = cache.admit(PROMPT)
    assert (report.block, report.nearest, report.differs_at) == (2, "1", 11)


def test_prompts_without_a_common_token_are_no_relatives():
    cache = Cache()
    cache.admit([500, *PROMPT[1:]])
    assert cache.admit(PROMPT).why is Miss.NEW


def test_a_prompt_that_ends_sooner_has_no_block_to_differ_from():
    cache = Cache()
    cache.admit(PROMPT[:10])  # two blocks and two tokens
    report = cache.admit(PROMPT)
    assert (report.why, report.block) == (Miss.NEW, 2)


def test_another_salt_is_named_and_not_shown():
    cache = Cache()
    cache.admit(PROMPT, [("salt", "one")])
    cache.admit([*PROMPT[:4], *[7] * 16])
    report = cache.admit(PROMPT, [("salt", "two"), ("adapter", "x")])
    assert (report.why, report.nearest, report.detail, report.block) == (Miss.EXTRAS, "1", "adapter, salt", 0)
    report = cache.admit(PROMPT, [("salt", "three")])
    assert (report.why, report.nearest, report.detail) == (Miss.EXTRAS, "2", "adapter, salt")
    assert "three" not in repr(report) and "two" not in repr(report)


def test_salts_matter_only_where_the_whole_beginning_is_the_same():
    cache = Cache()
    cache.admit(PROMPT)
    cache.admit([*PROMPT[:3], 77, *PROMPT[4:]], [("salt", "x")])
    assert cache.admit([*PROMPT[:8], 1, 1, 1, 1], [("salt", "x")]).why is Miss.EXTRAS  # the first block is PROMPT's
    assert cache.admit([*PROMPT[:3], 77, 1, *PROMPT[5:]], [("salt", "x")]).why is Miss.TOKENS  # the second is not


def test_another_namespace():
    cache = Cache()
    cache.admit(PROMPT, root=OTHER_ROOT)
    assert cache.admit(PROMPT).why is Miss.NAMESPACE


def test_evicted_blocks_say_when():
    cache = Cache(num_blocks=5)
    cache.admit(PROMPT)
    cache.now = 103.0
    cache.admit([1] * 8)  # takes the last two blocks of five
    cache.now = 110.0
    report = cache.admit(PROMPT)
    assert (report.why, report.detail, report.seconds) == (Miss.DROPPED, "evicted", 7.0)
    assert (report.num_reused, report.block, report.position) == (3, 3, 12)


@pytest.mark.parametrize(
    ("drop", "how"), [(lambda pool: pool.reset(), "reset"), (lambda pool: pool.forget([1, 2]), "distrusted")]
)
def test_blocks_that_were_dropped_on_purpose(drop, how):
    cache = Cache()
    cache.admit(PROMPT)
    drop(cache.pool)
    report = cache.admit(PROMPT)
    assert (report.why, report.detail) == (Miss.DROPPED, how)


def test_what_is_not_computed_yet_is_pending():
    cache = Cache()
    cache.admit(PROMPT, published=2)
    report = cache.admit(PROMPT)
    assert (report.why, report.block, report.nearest) == (Miss.PENDING, 2, "0")


def test_what_was_generated_and_not_indexed_is_pending():
    cache = Cache()
    cache.admit(PROMPT[:12])
    cache.history._prompts[0][1].tokens.extend(PROMPT[12:])  # it generates the rest, of which no key is made
    cache.admit(PROMPT[:16])
    report = cache.admit([*PROMPT, 1])
    assert (report.why, report.block, report.nearest) == (Miss.PENDING, 4, "0")
    cache = Cache()
    cache.admit([*PROMPT[:4], 1])
    cache.history._prompts[0][1].tokens.extend([1, 1, 1])
    assert cache.admit(PROMPT).differs_at == 4


def test_the_last_token_is_always_computed():
    cache = Cache()
    cache.admit(PROMPT)
    report = cache.admit(PROMPT)
    assert (report.why, report.num_reused, report.block) == (Miss.LIMIT, 4, 4)
    assert cache.admit(PROMPT, limit=0).why is Miss.LIMIT


def test_a_request_or_an_engine_that_reuses_nothing():
    cache = Cache()
    cache.admit(PROMPT)
    assert cache.admit(PROMPT, reads=False).why is Miss.OFF
    off = Cache(enabled=False)
    off.admit(PROMPT)
    assert off.admit(PROMPT).why is Miss.OFF
    assert not off.pool.on_drop and not off.history._prompts


def test_what_is_remembered_has_a_bound(monkeypatch):
    monkeypatch.setattr(miss_reasons, "PROMPTS", 3)
    monkeypatch.setattr(miss_reasons, "TOKENS", 30)
    monkeypatch.setattr(miss_reasons, "DROPPED", 4)
    cache = Cache(num_blocks=40)
    for i in range(5):
        cache.admit([i] * 8)
    assert [name for name, *_ in cache.history._prompts] == ["2", "3", "4"]
    cache.admit([9] * 28)
    assert [name for name, *_ in cache.history._prompts] == ["5"]
    cache.admit([8] * 100)  # one is always remembered
    assert [name for name, *_ in cache.history._prompts] == ["6"]
    assert cache.history._held == 100 and cache.history._first == {8: 1}
    cache.pool.reset()
    assert len(cache.history._dropped) == 4


def test_equal_tokens_after_another_beginning_are_no_relatives():
    cache = Cache()
    cache.admit(PROMPT[:4])
    cache.admit([1, 2, 3, 4, *PROMPT[4:]])
    assert cache.admit(PROMPT).why is Miss.NEW


def test_the_newest_drops_are_remembered(monkeypatch):
    monkeypatch.setattr(miss_reasons, "DROPPED", 2)
    cache = Cache()
    for prompt in (PROMPT[:5], [1] * 5, PROMPT[:5], [2] * 5):  # the first is dropped again
        cache.admit(prompt)
        cache.pool.reset()
    assert cache.admit(PROMPT[:5]).why is Miss.DROPPED
    assert cache.admit([1] * 5).why is Miss.PENDING


def test_a_tenant_hears_nothing_of_another_ones_prompts():
    cache, (one, two) = Cache(), [(("tenant", name),) for name in "ab"]
    cache.admit(PROMPT, one)
    for tags in (two, ()):
        report = cache.admit(PROMPT, tags)
        assert (report.why, report.nearest, report.detail, report.num_reused) == (Miss.NEW, "", "", 0)
    report = cache.admit(PROMPT, (*one, ("salt", "x")))
    assert (report.why, report.nearest, report.detail) == (Miss.EXTRAS, "0", "salt")


def test_a_prefix_without_a_state_there_says_so_and_what_became_of_the_last_one():
    """Blocks of 4 of 5 blocks are cached, and the state at none of them; then one is, at 2 blocks, and is evicted."""
    states = StateCheckpoints(1, SIZE, SIZE)
    cache = Cache(states=states)
    cache.admit(PROMPT)
    found = cache.admit(PROMPT)
    assert (found.why, found.position, found.num_cached, found.detail, found.seconds) == (
        Miss.STATE,
        0,
        16,
        "none",
        None,
    )
    chain = KeyChain(ROOT, SIZE, array("I", PROMPT), ())
    copies = states.of_prompt(0, 0, chain, 0, 8, 9)
    found = cache.admit(PROMPT)
    assert (found.why, found.position, found.detail, found.seconds) == (Miss.STATE, 0, "pending", None)
    states.came(copies)
    found = cache.admit(PROMPT)
    assert (found.why, found.position, found.num_reused, found.num_cached) == (Miss.STATE, 8, 2, 16)
    other = KeyChain(ROOT, SIZE, array("I", [7] * 9), ())
    states.came(states.of_prompt(0, 0, other, 0, 8, 9))  # the only checkpoint is taken again
    cache.now += 3
    found = cache.admit(PROMPT)
    assert (found.why, found.position, found.detail, found.seconds) == (Miss.STATE, 0, "evicted", 3.0)
