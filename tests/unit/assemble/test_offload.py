"""Host memory for KV blocks: what does not fit is refused by the option that asked for it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from quire.assemble import offload
from quire.config.checkpoint import parse_checkpoint_config
from quire.config.resolve import GIB
from quire.contracts.errors import ConfigError
from quire.models.plan import resolve_sizing

from ...support.filled_models import planned
from ...support.tiny_models import Tiny, tiny_config

ARGS = parse_checkpoint_config(tiny_config(Tiny(family="qwen3")))


def test_more_than_a_cpu_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_offload_gb=3: each rank needs 3.0 GiB of host memory, and 2.0 GiB are"):
        resolve_sizing(planned(ARGS, kv_offload_gb=3.0), 2 * GIB)


def test_the_ranks_of_a_host_need_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them alone would find enough, until the others take theirs."""
    monkeypatch.setattr(offload, "read_cpu_facts", lambda: SimpleNamespace(free_memory=GIB))
    size = resolve_sizing(planned(ARGS), GIB)
    size = replace(size, host_blocks=3 * GIB // 5 // size.geometry.page_bytes)
    offload.check_host_memory([size])
    with pytest.raises(ConfigError, match="the ranks of this host need 1.2 GiB of host memory, and 1.0 GiB are free"):
        offload.check_host_memory([size, size])


def test_blocks_of_synthetic_acceptance_are_found_by_no_other_engine() -> None:
    """They hold the keys and values of drafts that were wrong."""
    ngrams = {"method": "ngram", "num_speculative_tokens": 2}
    false = ngrams | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}
    plain, drafting, synthetic = (offload.root_key(planned(ARGS, speculative_config=given))
                                  for given in (None, ngrams, false))  # fmt: skip
    assert plain == drafting != synthetic


def test_files_are_of_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new version may round otherwise, and could not tell the numbers of an old one from its own."""
    plan = planned(ARGS, load_format="dummy")
    same = [offload._namespace(plan, times=times) for times in (True, True, False)]
    monkeypatch.setattr(offload, "__version__", "another")
    assert same[0] == same[1] != offload._namespace(plan, times=True)
    assert same[2] != offload._namespace(plan, times=False)


@pytest.mark.parametrize(("faults", "words"), [
    ("read=ok/short", "no place for read=ok/short: read and write need kv_offload_dir"),
    ("page=killed", "no place for page=killed: .* faults of connections need kv_share"),
    ("tell=lost", "tell=lost is unknown: give a place and its faults, .*'tell': 'ok slow frozen killed"),
    ("nowhere=slow", "nowhere=slow is unknown"), ("tell", "tell= is unknown")])
def test_faults_that_cannot_be_planted_are_refused(faults: str, words: str) -> None:
    assert offload._faults(planned(ARGS)) is None
    share = {"kv_share": ":5700"} if "unknown" in words else {}
    with pytest.raises(ConfigError, match=words):
        offload._faults(planned(ARGS, kv_offload_gb=1.0, kv_faults=(faults,), **share))
