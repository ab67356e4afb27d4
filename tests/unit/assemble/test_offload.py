"""Host memory for KV blocks: what does not fit is refused by the option that asked for it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec import structs

from quire.args.checkpoint import ModelArgs, parse_checkpoint_config
from quire.assemble import offload
from quire.contracts.errors import ConfigError
from quire.contracts.parallel import Parallel
from quire.plan.drafts import joined
from quire.plan.engine import Drafting, EnginePlan
from quire.plan.kv_geometry import layer_groups
from quire.plan.memory import GIB
from quire.plan.sizing import resolve_sizing

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
    plain, drafting, synthetic = (
        offload.root_key(planned(ARGS, speculative_config=given)) for given in (None, ngrams, false)
    )
    assert plain == drafting != synthetic


HEADS = {size: parse_checkpoint_config(tiny_config(Tiny(family="qwen3", heads=(8, size)))) for size in (2, 4, 8)}


def drafting(tp: int, draft: ModelArgs = HEADS[4], **options: Any) -> list[EnginePlan]:
    """Plans of all ranks of an engine whose model has 2 KV heads, and whose head has others."""
    ranks = []
    for number in range(tp):
        both = (planned(args, parallel=Parallel(tp=tp), number=number, **options) for args in (HEADS[2], draft))
        own, other = both
        ranks.append(
            msgspec.structs.replace(own, drafting=Drafting(model=other), geometry=joined(own.geometry, other.geometry))
        )
    return ranks


def test_keys_of_blocks_with_a_head_are_alike_for_all_numbers_of_ranks() -> None:
    keys = {offload.root_key(plan) for tp in (1, 2, 4) for plan in drafting(tp)}
    assert len(keys) == 1
    assert keys.isdisjoint(offload.root_key(plan) for tp in (1, 2) for plan in drafting(tp, HEADS[8]))


def test_files_of_ranks_with_other_heads_of_the_draft_have_other_names() -> None:
    """Four ranks, by twos with the same head of the model, and each with a head of its own of the EAGLE head."""
    plans = drafting(4)
    names = offload._names(plans[0])
    assert len(set(names)) == 4 and names == offload._names(plans[3])
    assert names[1] == "layers0-3.heads0-1.drafts.layers0-3.heads1-2"
    assert len(set(offload._names(planned(HEADS[2], parallel=Parallel(tp=4))))) == 2


def test_heads_are_those_of_the_group() -> None:
    """Four ranks: layers with 4 KV heads have one on each; two ranks share each head of layers with 2."""
    whole = HEADS[4].layers[0]
    half = structs.replace(whole, mixer=structs.replace(whole.mixer, num_kv_heads=2))
    mixed = replace(HEADS[4], layers=(whole, half, *[whole, half][: HEADS[4].num_layers - 2]))
    for number, plan in enumerate(drafting(4, HEADS[4])):
        assert offload._first_heads(plan) == (number // 2,)
        assert tuple(offload._first_draft_heads(plan)) == (number,)
        own = planned(mixed, parallel=Parallel(tp=4), number=number)
        firsts = [number if layers[0] % 2 == 0 else number // 2 for layers in layer_groups(mixed)]
        assert offload._first_heads(own) == tuple(firsts) and tuple(offload._first_draft_heads(own)) == (0,) * len(
            firsts
        )
        assert {part.num_heads for group in own.geometry.groups for part in group.components} == {1}
