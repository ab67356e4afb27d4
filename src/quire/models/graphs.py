"""Sizes of the steps that are captured as CUDA graphs, chosen by config and model without measurements."""

import msgspec

from quire.config.checkpoint import ModelArgs
from quire.config.engine import EngineConfig
from quire.contracts.speculation import Speculation
from quire.models.layout import parameters_per_token

LAUNCH_SECONDS = 0.025  # of the host, to launch the kernels of a step one by one
GRAPH_BYTES = 24 << 20  # set aside for the graphs of one size: six of them took 9 to 14 MiB (H200, docs/log.md)
FLOPS = 600e12  # of a GPU, in a large product
MOST_DRAFTS = 2  # numbers of drafts that are captured; others are padded to the next
LATENT_TOKENS = 1024  # at most, of a captured step: its prompts are absorbed, which costs more the longer they are


class GraphPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the steps for which CUDA graphs are captured, ascending.

    sequences   numbers of sequences of decode steps
    tokens      numbers of tokens of steps with prompts
    drafts      numbers of drafts of each sequence in decode steps, beside none
    """

    sequences: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes that are set aside for the graphs."""
        return (len(self.sequences) * (1 + len(self.drafts)) + len(self.tokens)) * GRAPH_BYTES


def resolve_graphs(config: EngineConfig, args: ModelArgs, speculation: Speculation | None = None) -> GraphPlan:
    """Choose the sizes of the steps that are captured as CUDA graphs; none with `enforce_eager`."""
    if config.device.enforce_eager:
        return GraphPlan()
    lengths = speculation.lengths if speculation else ()
    drafts = lengths if len(lengths) <= MOST_DRAFTS else (lengths[0], lengths[-1])
    return GraphPlan(sequences=_decode_sizes(config), tokens=_prompt_sizes(config, args), drafts=drafts)


def _decode_sizes(config: EngineConfig) -> tuple[int, ...]:
    device, most = config.device, config.scheduler.sequences()
    most = min(most, device.max_cudagraph_capture_size or most)
    return tuple(sorted({size for size in device.cudagraph_capture_sizes if size <= most})) or decode_sizes(most)


def _prompt_sizes(config: EngineConfig, args: ModelArgs) -> tuple[int, ...]:
    """Numbers of tokens that a GPU computes faster than the host launches their kernels."""
    if config.device.cudagraph_capture_sizes:
        return ()
    most = int(LAUNCH_SECONDS * FLOPS / (2 * parameters_per_token(args)))
    if args.latent is not None:
        most = min(most, LATENT_TOKENS)
    return prompt_sizes(min(most, config.device.max_cudagraph_capture_size or most, config.scheduler.token_budget()))


def decode_sizes(most: int) -> tuple[int, ...]:
    """Return the numbers of sequences, at most `most`, for which decode steps are captured.

    Small sizes lie close together: 40 sizes up to 1,024 sequences.
    """
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(320, 1025, 64), *range(1280, 4097, 256)]
    return (*(size for size in sizes if size < most), *((most,) if most else ()))


def prompt_sizes(most: int) -> tuple[int, ...]:
    """Return the numbers of tokens, at most `most`, for which steps with prompts are captured.

    A step is padded to the next size; 64 tokens of padding take 1.6 ms with 8e9 parameters.
    """
    return tuple(size for size in (*range(256, 1024, 64), *range(1024, 2049, 256), *range(3072, 16385, 1024))
                 if size <= most)  # fmt: skip
