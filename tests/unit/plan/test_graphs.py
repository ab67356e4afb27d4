"""Sizes of the steps that are captured as CUDA graphs, with replicas in lock-step, too."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from quire.args.checkpoint import parse_checkpoint_config
from quire.config.engine import EngineConfig
from quire.contracts.parallel import Parallel
from quire.contracts.speculation import Speculation
from quire.contracts.step import MAX_VERIFY_ROWS
from quire.plan.collectives import exchange_bounds
from quire.plan.graphs import (
    GRAPH_BYTES,
    GraphPlan,
    captured_decodes,
    decode_sizes,
    even_bounds,
    prompt_sizes,
    resolve_graphs,
)
from quire.worker.graphs import Graphs
from quire.worker.recorder import StepShape

from ...support.explained import explained
from ...support.tiny_models import Tiny, tiny_config

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
SIZES = {
    "chosen": (decode_sizes(256), prompt_sizes(1024)),
    "custom": ((100,), ()),
    "odd": ((1, 3, 70), (512,)),
    "near": ((63, 70), (512,)),
}


@pytest.mark.parametrize("budget", [128, 300, 8192])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_step_of_replicas_up_to_the_largest_size_is_captured(sizes: str, budget: int) -> None:
    """Another replica may have as many tokens, or more. No shape is captured that no step has."""
    (decodes, prompts), bounds = SIZES[sizes], exchange_bounds(budget)
    graphs, used = Graphs(decodes, prompts, 256, bounds), set[StepShape]()
    for tokens in range(1, min(budget, max((*decodes, *prompts))) + 1):
        for bound in (bound for bound in bounds if bound >= tokens):
            for decode, largest in ((True, decodes[-1]), (False, max(prompts, default=0))):
                if tokens <= largest:
                    shape = graphs.fit(StepShape(tokens, min(tokens, 256), 0, decode, bound=bound))
                    assert shape.recorded and shape.bound == bound and shape.tokens >= tokens, (tokens, bound, decode)
                    used.add(shape)
    captured = {shape.key for shape in graphs.shapes()}
    assert {shape.key for shape in used} <= captured
    reachable = {(shape.decode, shape.tokens, shape.bound) for shape in used}
    made = {(shape.decode, shape.tokens, shape.bound) for shape in graphs.shapes() if shape.tokens <= budget}
    assert {one for one in made if one[1]} <= reachable


def test_decodes_of_short_contexts_are_captured_once_more() -> None:
    graphs = Graphs((1, 2, 4), (), 4, queries=(1, 3), adapted=True)
    graphs.short = 2, 4096
    shapes = graphs.shapes()
    keys = [shape.key for shape in shapes]
    assert len(set(keys)) == len(keys)
    assert {(shape.seqs, shape.context) for shape in shapes} == {(4, 0), (2, 4096), (2, 0), (1, 4096), (1, 0)}
    assert len([shape for shape in shapes if shape.context]) == 2 * 2 * 2 * 2  # queries, sharing, adapters
    for seqs, query, shared, adapted in product((1, 2, 3), (1, 2), (False, True), (False, True)):
        for context, wanted in ((0, 0), (1, 4096), (4096, 4096), (4097, 0)):
            own = StepShape(
                seqs * query, seqs, seqs * query, True, shared, query=query, adapted=adapted, context=context
            )
            fitted = graphs.fit(own)
            assert fitted.key in keys and fitted.context == (wanted if seqs <= 2 else 0)


@pytest.mark.parametrize("queries", [(1, 4), (1, 2, 8)])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_decode_step_of_replicas_with_drafts_is_captured(sizes: str, queries: tuple[int, ...]) -> None:
    """Its decodes may have fewer drafts than the graph, so its tokens fit a bound that the graph's rows exceed."""
    decodes, bounds = SIZES[sizes][0], exchange_bounds(300)
    graphs, used = Graphs(decodes, (), 256, bounds, queries), set[StepShape]()
    for seqs in range(1, decodes[-1] + 1):
        for query in range(1, queries[-1] + 1):
            padded = min(size for size in decodes if size >= seqs) * min(one for one in queries if one >= query)
            for tokens in {seqs + query - 1, seqs * query}:  # one decode has drafts, or all have
                for bound in (bound for bound in bounds if bound >= tokens):
                    shape = graphs.fit(StepShape(tokens, seqs, tokens, True, bound=bound, query=query))
                    assert shape.recorded == (query == 1 or padded <= MAX_VERIFY_ROWS)
                    if shape.recorded:
                        assert (shape.tokens, shape.rows, shape.bound) == (padded, padded, bound)
                        used |= {shape, replace(shape, shared=True)}
    shapes = [shape for shape in graphs.shapes() if shape.tokens]
    assert used == set(shapes), "no shape is captured that no step has"
    assert len({shape.key for shape in shapes}) == len(shapes)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("queries", [(1,), (1, 2, 8)])
def test_replicas_run_decodes_of_one_size(queries: tuple[int, ...], joint: bool) -> None:
    """Each replays the graph of the size that the fullest one needs, one without tokens that of its bound."""
    sizes = SIZES["odd"][0]
    bounds, drafts = even_bounds(sizes, queries), tuple(query - 1 for query in queries[1:])
    graphs, used = Graphs(sizes, (), 256, bounds, queries, joint=joint, even=True), set[StepShape]()
    for most in product(range(1, sizes[-1] + 1), range(1, queries[-1] + 1)):
        size, query = (next(one for one in of if one >= need) for of, need in zip((sizes, queries), most, strict=True))
        captured = query == 1 or size * query <= MAX_VERIFY_ROWS
        bound = size * query if captured else 0
        for seqs in {1, most[0]}:
            own = StepShape(seqs, seqs, seqs, True, bound=bound, most=most if captured else (0, 0), query=1)
            shape = graphs.fit(own)
            assert shape.recorded == captured and (shape.tokens == shape.rows == bound or not captured)
            if captured:
                used |= {replace(shape, shared=shared, most=(0, 0)) for shared in (False, True)}
        idle = graphs.fit(StepShape(0, 0, 0, True, bound=bound, query=query if joint else 1, most=most))
        assert idle.recorded == captured
        if captured:
            used.add(replace(idle, most=(0, 0)))
    assert used == set(graphs.shapes()), "no shape is captured that no step has"
    assert not graphs.fit(StepShape(2, 2, 2, True, bound=0)).recorded, "a replica has a prompt"
    plan = GraphPlan(sequences=sizes, drafts=drafts, bounds=bounds, joins=len(queries) if joint else 1, even=True)
    count = len({(shape.tokens, shape.bound, shape.query) for shape in used})
    assert plan.num_bytes == count * GRAPH_BYTES


def test_graphs_of_every_bound_and_number_of_drafts_are_set_aside() -> None:
    for sizes in SIZES.values():
        for bounds, drafts, joint in product(((), exchange_bounds(8192)), ((), (3,), (1, 7)), (False, True)):
            shapes = Graphs(*sizes, 256, bounds, (1, *(1 + k for k in drafts)), joint=joint).shapes()
            count = len({(shape.decode, shape.tokens, shape.bound, shape.query) for shape in shapes})
            joins = 1 + len(drafts) if joint else 1
            plan = GraphPlan(sequences=sizes[0], tokens=sizes[1], bounds=bounds, drafts=drafts, joins=joins)
            assert plan.num_bytes == count * GRAPH_BYTES


def test_plans_have_bounds_where_graphs_hold_the_exchange(shared: Path) -> None:
    def graphs(parallel: Parallel, **options: object) -> GraphPlan:
        config = EngineConfig.from_flat(
            model=str(shared / "hf" / "DeepSeek-V2-Lite"), max_num_batched_tokens=300, max_num_seqs=128, **options
        )
        return explained(config, parallel, "h200").plan.graphs

    spread = Parallel(dp=2, experts=True)
    assert graphs(spread, cudagraph_capture_sizes=(100,)) == GraphPlan(sequences=(100,), bounds=(64, 256, 300))
    assert graphs(spread, enforce_eager=True) == GraphPlan()
    drafting = graphs(spread, cudagraph_capture_sizes=(100,), speculative_config=NGRAM)
    assert drafting == GraphPlan(sequences=(100,), drafts=(3,), bounds=(64, 256, 300 + 3 * 128)), "drafts travel, too"
    draft = {"method": "draft_model", "model": str(shared / "hf" / "DeepSeek-V2-Lite"), "num_speculative_tokens": 3}
    layered = graphs(spread, speculative_config=draft)
    assert layered.joins == 2, "others have drafts, or none"
    for parallel in (Parallel(dp=2), Parallel(tp=2, experts=True)):
        assert not graphs(parallel).bounds and not graphs(parallel).even
    wide = graphs(Parallel(dp=16, experts=True), cudagraph_capture_sizes=(2, 100), speculative_config=NGRAM)
    assert wide == GraphPlan(sequences=(2, 100), drafts=(3,), bounds=(2, 8, 100, 400), even=True)


@pytest.mark.parametrize("k", [1, 2, 4, 5, 8])
def test_every_decode_with_drafts_that_fit_is_captured(k: int) -> None:
    """A number of requests is padded to a size whose rows fit, too."""
    args = parse_checkpoint_config(tiny_config(Tiny(family="qwen3")))
    plan = resolve_graphs(EngineConfig.from_flat(max_num_seqs=1024), args, Speculation(method="ngram", num_drafts=k))
    most = MAX_VERIFY_ROWS // (1 + k)
    captured = [size for size, query in captured_decodes(plan.sequences, (1, 1 + k)) if query > 1]
    assert max(captured) == most
