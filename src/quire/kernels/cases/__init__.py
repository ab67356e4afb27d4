"""Cases in which kernels are measured: an operation with the shapes of a model, beside a library's version.

`operations.py`, `latent.py`, `quantized.py` and `recurrent.py` have the cases of each operation. `timing.py` takes the
times.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.args.checkpoint import ModelArgs
from quire.args.layers import DenseArgs, GroupedArgs
from quire.contracts.errors import ConfigError
from quire.kernels.attention import KVView
from quire.kernels.select import Kernels

ROWS = (1, 64, 256, 8192)
FEW_ROWS, LOGIT_ROWS = 64, 512  # most rows of the cases of fused layer kernels, and of logits
# (sequences, new tokens of each, context of each with them)
STEPS = ((1, 1, 768), (64, 1, 768), (256, 1, 512), (16, 1, 16384), (1, 4096, 4096), (4, 2048, 2048), (1, 2048, 32768))
RECURRENT = (*((seqs, 1) for seqs in (1, 8, 32, 64, 128, 256)), (1, 2048), (1, 8192), (1, 32768), (4, 2048))
SHARED = ((64, 4288, 4096), (256, 4288, 4096))  # (sequences, context of each, its shared prefix)
LATENT = tuple((seqs, context) for context in (4096, 32768, 131072) for seqs in (1, 16, 64))  # (sequences, context)
EPS = 1e-6  # of norms
Result = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Pair:
    """Quire's operation `run` and a library's operation, on the same inputs. Both return the results to compare.

    baseline   the library's operation, which is timed; None: no library has this operation
    expected   reference whose result is compared with that of `run`; it is not timed. None: `baseline` is compared
    """

    run: Callable[[], Result]
    baseline: Callable[[], Result] | None
    expected: Callable[[], Result] | None = None


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """An operation at one shape.

    shape, baseline    names of the shape and of the library's operation, for display
    num_bytes, flops   bytes moved and operations done by one call
    make               `make(n)` returns n pairs, each with its own inputs
    """

    shape: str
    num_bytes: int
    flops: int = 0
    baseline: str = ""
    make: Callable[[int], list[Pair]]


@dataclass(frozen=True, kw_only=True)
class KernelSetup:
    """A model's arguments with device, dtype and the kernels chosen for it, and the shapes to measure.

    rows     numbers of rows (tokens)
    steps    (sequences, new tokens of each, context of each including the new tokens)
    shared   (sequences, context of each, its shared prefix), in tokens
    recurrent   (sequences, new tokens of each)
    latent   (sequences, context of each), of decodes
    """

    args: ModelArgs
    device: torch.device
    dtype: torch.dtype
    kernels: Kernels
    block_size: int
    rows: tuple[int, ...] = ROWS
    steps: tuple[tuple[int, int, int], ...] = STEPS
    shared: tuple[tuple[int, int, int], ...] = SHARED
    recurrent: tuple[tuple[int, int], ...] = RECURRENT
    latent: tuple[tuple[int, int], ...] = LATENT

    @property
    def item(self) -> int:
        """Bytes of an element of `dtype`."""
        return self.dtype.itemsize

    @property
    def attention(self) -> GroupedArgs:
        """The model's first grouped-query attention, whose shapes are measured. Raises ConfigError without one."""
        found = next((one for one in self.args.mixers if isinstance(one, GroupedArgs)), None)
        if found is None:
            raise ConfigError(
                "this model has no grouped-query attention: leave out the operations heads, attention and shared."
            )
        return found

    @property
    def inner(self) -> int:
        """Numbers inside the model's first dense MLP; of a model without one, inside a token's experts."""
        parts = [one.feed_forward for one in self.args.layers]
        dense = next((one.width for one in parts if isinstance(one, DenseArgs)), 0)
        moe = self.args.moe
        return dense or (moe.routing.top_k * moe.expert_size if moe else 0)

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of a layer's projections and of the head, by name; "qkv" may make queries and latents."""
        hidden, inner, mixer = self.args.hidden_size, self.inner, self.args.attending[0]
        q = mixer.num_heads * mixer.head_dim
        if isinstance(mixer, GroupedArgs):
            own = {"qkv": (q + 2 * mixer.num_kv_heads * mixer.head_dim, hidden), "o": (hidden, q)}
        else:
            own = {
                "qkv": ((mixer.q_rank or q) + mixer.kv_rank + mixer.rope_dim, hidden),
                "o": (hidden, mixer.num_heads * mixer.v_dim),
            }
        return own | {
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
            "head": (self.args.vocab_size, hidden),
        }

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return normal random numbers times `scale`, of `dtype` on `device`. Zeros would run faster than real data."""
        return torch.randn(shape, dtype=torch.float32, device=self.device).mul_(scale).to(self.dtype)

    def arena(self, num_layers: int, num_blocks: int) -> list[KVView]:
        """Return the KV caches of `num_layers` layers in one allocation, as in a model, filled with random values."""
        raise NotImplementedError


def made(pair: Callable[..., Pair], *given: object) -> Callable[[int], list[Pair]]:
    """Return a function that makes a number of pairs, each by `pair(*given)`. See `KernelCase.make`."""
    return lambda count: [pair(*given) for _ in range(count)]
