"""Tokens with tiers below the device are those without, in float32: warm and cold, on a disk that fails, preempted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.contracts.step import Tier
from quire.engine.replicas import flush
from quire.kernels.page_copies import InlineCopies

from ..support.full import full_rows
from ..support.planted_faults import FAULTS, plant_files

SMALL = {"dtype": "float32", "num_gpu_blocks_override": 14, "max_model_len": 192, "max_num_seqs": 3, "block_size": 16}
TIERS = {"kv_offload_gb": 0.02, "kv_offload_policy": "write_through"}
WORDS = (
    "Tomas drinks tea in the small garden. ",
    "The code of Lakral is 6423, and Mira knows it. ",
    "def add(a, b): return a + b\n",
    "Rain fell on the hills all night long. ",
)
PROMPTS = [word * 6 for word in WORDS]
PARAMS = [SamplingParams(max_tokens=12, temperature=t, seed=7, ignore_eos=True) for t in (0.0, 1.0, 0.0, 0.8)]
Engine = Callable[..., LLM]


def ask(llm: LLM, together: bool = False) -> tuple[list[list[int]], list[int], list[dict[int, Tier]]]:
    """Return the tokens, the number of cached tokens and the fetched blocks of every prompt.

    One prompt comes after the other, so that each evicts blocks of others, unless they come `together`.
    """
    if together:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    else:
        outputs = [llm.generate(*one, use_tqdm=False)[0] for one in zip(PROMPTS, PARAMS, strict=True)]
    llm.engine.core.check()
    found = [{} if one.metrics is None else one.metrics.origins for one in outputs]
    return (
        [one.outputs[0].token_ids for one in outputs],
        [one.num_cached_tokens or 0 for one in outputs],
        [{block: origin.tier for block, origin in blocks.items()} for blocks in found],
    )


def stats(llm: LLM, tier: Tier) -> Any:
    flush(llm.engine.core)
    return llm.engine.core.state().stats.tiers[tier]


@pytest.fixture(scope="module")
def truth() -> list[list[int]]:
    with LLM(**SMALL) as llm:
        return ask(llm)[0]


@pytest.mark.parametrize(
    "options",
    [
        {"async_depth": 2},
        {"kv_offload_policy": "lazy", "max_num_batched_tokens": 16},
        {"kv_cache_dtype": "float32", "enforce_eager": True},
        *full_rows([{}, {"kv_offload_policy": "lazy"}]),
    ],
    ids=str,
)
def test_tokens_are_those_without_tiers(truth: list[list[int]], options: dict[str, Any]) -> None:
    with LLM(**SMALL | TIERS | options) as llm:
        assert ask(llm)[0] == truth
        tokens, cached, _ = ask(llm)
        assert tokens == truth and min(cached) >= 64, cached
        assert stats(llm, Tier.HOST).num_loaded >= 12
        tokens, cached, _ = ask(llm, together=True)  # three at once do not fit: some are preempted
        assert tokens == truth
        assert llm.reset_prefix_cache()
        tokens, cached, _ = ask(llm)
        assert tokens == truth and not any(cached)


def test_blocks_that_prompts_evict_together_were_stored_before() -> None:
    """Conversations that go on together load their blocks at once, and evict those of the others at once."""
    sizes = {"num_gpu_blocks_override": 160, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    talks = [[(37 * number + 11 * at) % 250 for at in range(32)] for number in range(32)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False)
    with LLM(**SMALL | sizes, kv_offload_gb=0.1, skip_tokenizer_init=True) as llm:
        for turn in range(4):
            for first in range(0, 32, 8):
                outputs = llm.generate(talks[first : first + 8], params, use_tqdm=False)
                for number, output in enumerate(outputs, first):
                    assert (output.num_cached_tokens or 0) >= (len(talks[number]) - 32 - 1) // 16 * 16
                    talks[number] += [*output.outputs[0].token_ids, *range(turn, turn + 24)]


def talk(llm: LLM) -> list[tuple[list[int], int, set[int]]]:
    """Return tokens, number of cached tokens and fetched blocks of two turns of every prompt.

    A second turn continues the text of the first one, whose blocks the other prompts have evicted meanwhile.
    """
    params = [SamplingParams(max_tokens=40, temperature=t, seed=7, ignore_eos=True) for t in (0.0, 0.6, 0.0, 0.4)]
    texts: list[Any] = list(PROMPTS)
    found = []
    for _ in range(2):
        for i, (text, asked) in enumerate(zip(texts, params, strict=True)):
            output = llm.generate(text, asked, use_tqdm=False)[0]
            tokens, origins = output.outputs[0].token_ids, output.metrics.origins if output.metrics is not None else {}
            found.append((tokens, output.num_cached_tokens or 0, set(origins)))
            texts[i] = [*(output.prompt_token_ids or []), *tokens, 5]
    llm.engine.core.check()
    return found


@pytest.mark.parametrize("options", [{"async_depth": 2, "kv_offload_policy": "lazy"}, *full_rows([{}])], ids=str)
def test_tokens_with_drafts_and_tiers_are_those_of_plain_decoding(
    truth: list[list[int]], options: dict[str, Any]
) -> None:
    """Blocks that runs of drafts have filled leave the device, come back, and are read by steps with drafts."""
    with LLM(**SMALL) as llm:
        plain = [tokens for tokens, _, _ in talk(llm)]
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
    with LLM(**SMALL | TIERS | options, speculative_config=drafts) as llm:
        found = talk(llm)
        assert [tokens for tokens, _, _ in found] == plain
        for (_, cached, fetched), prompt in zip(found[4:], PROMPTS, strict=True):
            said = len(llm.get_tokenizer().encode(prompt))
            assert cached == (said + 40) // 16 * 16 and fetched and max(fetched) > said // 16, "blocks of the answer"
        runs, made, *accepted = llm.engine.core.scheduler.drafts.totals
        assert runs < made and 0 < accepted[-1] <= accepted[0] < runs, "drafts that are right and wrong"
        assert llm.reset_prefix_cache()
        assert ask(llm, together=True)[0] == truth  # three at once do not fit: some are preempted


def test_loads_of_zeros_are_noticed(truth: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above turns red when copies bring nothing."""
    copy = InlineCopies.copy

    def zeros(self: Any, sources: Any, targets: Any, *, to_host: bool) -> Any:
        ended = copy(self, sources, targets, to_host=to_host)
        if not to_host:
            self._device[torch.as_tensor(targets)] = 0
        return ended

    monkeypatch.setattr(InlineCopies, "copy", zeros)
    with LLM(**SMALL | TIERS) as llm:
        assert ask(llm)[0] == truth and ask(llm)[0] != truth


def test_files_outlive_the_engine(truth: list[list[int]], tmp_path: Path) -> None:
    options = SMALL | TIERS | {"kv_offload_dir": str(tmp_path)}
    with LLM(**options) as llm:
        assert ask(llm)[0] == truth
    with LLM(**options) as llm:
        tokens, cached, fetched = ask(llm)
        assert tokens == truth and min(cached) >= 64, cached
        assert fetched == [dict.fromkeys(range(count // 16), Tier.DISK) for count in cached]
        assert stats(llm, Tier.DISK).num_loaded >= 16 and stats(llm, Tier.DISK).num_failed == 0


def test_a_disk_that_fails_costs_no_token(
    truth: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [one for one in FAULTS["read"].split() if one != "frozen"]
    plant_files(monkeypatch, "read=ok/" + "/".join(faults), "write=" + "ok/slow/" * 30 + "half")
    options = SMALL | TIERS | {"kv_offload_dir": str(tmp_path)}
    for _ in range(3):
        with LLM(**options) as llm:
            assert ask(llm)[0] == truth
            failed = stats(llm, Tier.DISK).num_failed
    assert failed
