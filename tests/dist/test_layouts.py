"""Engines of four and eight processes answer as one rank does, also where heads, ids and experts do not divide evenly.

In float32 tokens are identical and log-probabilities near; every exchange is compared over the ranks.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from quire import LLM, RequestOutput
from quire.contracts.errors import ConfigError

from ..support.full import full_rows, only_full
from ..support.many_ranks import LARGER, Left
from ..support.tiny_models import Tiny, hf_config
from .test_answers import CHECKED, ask, compare, requests
from .test_balancing import balanced, balancer_of

SPARSE = Tiny(family="qwen3_moe", changes=(("num_experts", 6),))  # for 4 ranks: 2, 2, 1 and 1 experts
MODELS = {
    "kv heads on every rank": Tiny(heads=(8, 1)), "kv heads on two ranks": Tiny(heads=(8, 4)),
    "a vocabulary of 101": Tiny(heads=(8, 2), changes=(("vocab_size", 101),)), "6 experts": SPARSE,
    "8 experts": Tiny(family="glm4_moe", heads=(8, 2)),
    "13 experts": Tiny(family="qwen3_moe", heads=(8, 2), changes=(("num_experts", 13),)),
    "latents": Tiny(family="deepseek_v3", heads=(8, 8)),
}  # fmt: skip
MORE = [
    ("tp4", "a vocabulary of 101"), ("tp4", "latents"), ("tp4-ep", "6 experts"), ("dp4", "kv heads on two ranks"),
    ("dp4-ep", "latents"), ("dp2-pp2-ep", "13 experts"), ("tp8", "kv heads on every rank"),
    ("tp8", "kv heads on two ranks"), ("tp8", "a vocabulary of 101"), ("tp8", "latents"), ("tp8", "8 experts"),
    ("tp8-ep", "13 experts"), ("dp8", "kv heads on every rank"), ("dp8-ep", "8 experts"), ("dp8-ep", "13 experts"),
    ("dp8-ep", "latents"), ("dp4-tp2-ep", "latents"), ("dp4-tp2-ep", "13 experts"),
    ("tp4-pp2", "kv heads on every rank"), ("tp4-pp2", "latents"),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "model"), [("dp4-ep", "6 experts"), *full_rows(MORE)])
def test_answers_of_one_rank(
    sizes: str,
    model: str,
    folder_of: Callable[[Tiny], Path],
    engine: Callable[..., LLM],
    truth: Callable[..., list[RequestOutput]],
) -> None:
    """The prompts come twice, the second time with cached prefixes."""
    folder = folder_of(MODELS[model])
    ranks = engine(folder, **CHECKED, **LARGER[sizes], async_depth=2, max_num_batched_tokens=48)
    for _ in range(2):
        compare(ask(ranks, requests(8)), truth(requests(8), folder))


@only_full
@pytest.mark.parametrize(("sizes", "model"), [("dp4-ep", "latents"), ("dp8-ep", "13 experts"), ("tp4-ep", "6 experts")])
def test_experts_move_between_many_ranks(
    sizes: str,
    model: str,
    folder_of: Callable[[Tiny], Path],
    engine: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire.engine.balancer.LEAST_GAIN", -1.0)
    folder = folder_of(MODELS[model])
    expected, options = ask(engine(folder), requests(24)), balanced(folder, ranks_of(sizes))
    ranks = engine(folder, **LARGER[sizes], **options, async_depth=2)
    for _ in range(30):
        compare(ask(ranks, requests(24)), expected)
        if balancer_of(ranks)._total:
            break
    assert balancer_of(ranks)._total, "not every layer was switched to another map"


def ranks_of(sizes: str) -> int:
    """The number of ranks that divide the experts."""
    return LARGER[sizes].get("data_parallel_size", 1) * LARGER[sizes].get("tensor_parallel_size", 1)


@pytest.mark.parametrize(
    ("sizes", "model", "words"),
    [
        ("tp4", Tiny(heads=(6, 2)), "-tp 4: 6 attention heads cannot be divided by 4: use -tp 1, 2 or 6"),
        ("tp4", Tiny(heads=(12, 6)), "-tp 4: 6 KV heads can be neither divided nor copied evenly among 4 ranks"),
        ("dp8-ep", SPARSE, "6 experts are fewer than the 8 ranks"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_in_one_line(
    sizes: str, model: Tiny, words: str, left: Left, tmp_path: Path, engine: Callable[..., LLM]
) -> None:
    """Before a rank is started."""
    hf_config(model).save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        engine(tmp_path, load_format="dummy", **LARGER[sizes])
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not left.ranks()
