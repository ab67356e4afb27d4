"""Sizes of the steps that are captured as CUDA graphs, chosen by config and model without measurements."""

from collections.abc import Collection

import msgspec

from quire.args.checkpoint import ModelArgs
from quire.config.engine import EngineConfig
from quire.contracts.speculation import Speculation
from quire.contracts.step import MAX_VERIFY_ROWS
from quire.kernels.experts_plan import DISPATCHERS
from quire.plan.collectives import exchange_bounds
from quire.plan.kinds import mixers
from quire.plan.layout import parameters_per_token

LAUNCH_SECONDS = 0.025  # of the host, to launch the kernels of a step one by one
GRAPH_BYTES = 24 << 20  # set aside for the graphs of one size: six of them took 9 to 14 MiB (H200, docs/log.md)
FLOPS = 600e12  # of a GPU, in a large product
MOST_DRAFTS = 2  # numbers of drafts that are captured; others are padded to the next


class GraphPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the steps for which CUDA graphs are captured, ascending.

    sequences   numbers of sequences of decode steps
    tokens      numbers of tokens of steps with prompts
    drafts      numbers of drafts of each sequence in decode steps, beside none
    bounds      bounds of the exchange between replicas in lock-step, see `captured_bounds`; (): none is captured
    even        True: all replicas run a decode step of the size that the fullest one needs, and exchange as many rows
                as it has. Steps with prompts of any replica are not captured
    joins       kinds of steps without tokens, for each bound: by the drafts of other replicas, if a drafter's layers
                share experts
    """

    sequences: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()
    bounds: tuple[int, ...] = ()
    joins: int = 1
    even: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes that are set aside for the graphs: each size, number of drafts and bound; steps without tokens."""
        queries = 1, *(1 + length for length in self.drafts)
        decodes, joins = captured_decodes(self.sequences, queries), len(self.bounds) * self.joins
        if self.even:
            return (len(decodes) + (len(decodes) if self.joins > 1 else joins)) * GRAPH_BYTES
        shapes = [captured_bounds(self.bounds, self.sequences, size, queries, query) for size, query in decodes]
        shapes += [captured_bounds(self.bounds, self.tokens, size) for size in self.tokens]
        return (sum(map(len, shapes)) + joins) * GRAPH_BYTES


def resolve_graphs(
    config: EngineConfig,
    args: ModelArgs,
    speculation: Speculation | None = None,
    ways: Collection[str] = (),
    tokens: int = 0,
) -> GraphPlan:
    """Choose the sizes of the steps that are captured as CUDA graphs; none with `enforce_eager`.

    ways     dispatchers of experts, which decide the rows of their exchanges
    tokens   most tokens of a step of a replica
    """
    if config.device.enforce_eager:
        return GraphPlan()
    lengths = speculation.lengths if speculation else ()
    drafts = lengths if len(lengths) <= MOST_DRAFTS else (lengths[0], lengths[-1])
    sizes = _decode_sizes(config)
    if not config.device.cudagraph_capture_sizes:  # the most decodes whose drafts fit have a step of their own
        sizes = tuple(sorted({*sizes, *(most for k in drafts if (most := MAX_VERIFY_ROWS // (1 + k)) < sizes[-1])}))
    even = "pull" not in ways and any(DISPATCHERS[way].even for way in ways)
    prompts, bounds = () if even else _prompt_sizes(config, args), exchange_bounds(tokens) if "pull" in ways else ()
    if even:
        bounds = even_bounds(sizes, (1, *(1 + length for length in drafts)))
    shared = speculation is not None and speculation.layered and not speculation.head
    joins = 1 + len(drafts) if bounds and shared else 1
    return GraphPlan(sequences=sizes, tokens=prompts, drafts=drafts, bounds=bounds, joins=joins, even=even)


def captured_decodes(sizes: tuple[int, ...], queries: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (sequences, most tokens of each) of the decode steps that are captured, ascending.

    sizes     numbers of sequences, ascending
    queries   numbers of tokens of a decode, ascending: 1, and 1 + its drafts. All rows fit `MAX_VERIFY_ROWS`
    """
    return [(size, query) for size in sizes for query in queries if query == 1 or size * query <= MAX_VERIFY_ROWS]


def even_bounds(sizes: tuple[int, ...], queries: tuple[int, ...]) -> tuple[int, ...]:
    """Return the rows of each replica in the decode steps that are captured with one size for all, ascending."""
    return tuple(sorted({size * query for size, query in captured_decodes(sizes, queries)}))


def captured_bounds(
    bounds: tuple[int, ...], sizes: tuple[int, ...], size: int, queries: tuple[int, ...] = (1,), query: int = 1
) -> tuple[int, ...]:
    """Return the bounds with which a step of a padded size is captured, largest first; (0,): without replicas.

    bounds    upper bounds of the tokens of each replica in lock-step, ascending
    sizes     the captured sizes, ascending: of tokens, or of sequences that decode; `size` is one of them
    queries   numbers of tokens of a decode, ascending; `query` is one of them
    Such a step has more tokens than the size before (and a decode in it more than the query before), and at most as
    many as its bound; padding may exceed the bound.
    """
    before = sum(
        max((one for one in captured if one < own), default=0) for captured, own in ((sizes, size), (queries, query))
    )
    return tuple(bound for bound in reversed(bounds) if bound > before) if bounds else (0,)


def _decode_sizes(config: EngineConfig) -> tuple[int, ...]:
    device, most = config.device, config.scheduler.sequences()
    most = min(most, device.max_cudagraph_capture_size or most)
    return tuple(sorted({size for size in device.cudagraph_capture_sizes if size <= most})) or decode_sizes(most)


def _prompt_sizes(config: EngineConfig, args: ModelArgs) -> tuple[int, ...]:
    """Numbers of tokens that a GPU computes faster than the host launches their kernels."""
    if config.device.cudagraph_capture_sizes:
        return ()
    most = int(LAUNCH_SECONDS * FLOPS / (2 * parameters_per_token(args)))
    most = min((most, *(kind.prompts for kind in mixers(args) if kind.prompts)))
    return prompt_sizes(min(most, config.device.max_cudagraph_capture_size or most, config.scheduler.token_budget()))


def decode_sizes(most: int) -> tuple[int, ...]:
    """Return the numbers of sequences, at most `most`, for which decode steps are captured.

    Small sizes lie close together: 35 sizes up to 1,024 sequences.
    """
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(320, 1025, 64), *range(1280, 4097, 256)]
    return (*(size for size in sizes if size < most), *((most,) if most else ()))


def prompt_sizes(most: int) -> tuple[int, ...]:
    """Return the numbers of tokens, at most `most`, for which steps with prompts are captured.

    A step is padded to the next size; 64 tokens of padding take 1.6 ms with 8e9 parameters.
    """
    return tuple(
        size for size in (*range(256, 1024, 64), *range(1024, 2049, 256), *range(3072, 16385, 1024)) if size <= most
    )
