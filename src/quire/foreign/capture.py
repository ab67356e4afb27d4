"""A run of the base model of transformers on a few tokens: what its layers are given, and how they call attention."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quire.foreign.leaves import operations
from quire.foreign.skeleton import NAME, Skeleton, refused

TOKENS = 5
OWN_MASK = "its attention has a mask of its own"
SILENT = frozenset(  # arguments of attention that change nothing without a cache, or that the mask tells
    "scaling sliding_window softcap s_aux dropout is_causal position_ids use_cache output_attentions cache layer_idx "
    "past_key_values output_router_logits num_items_in_batch".split()
)


@dataclass
class ModuleAttention:
    """A call of attention by a layer. window: as of `GroupedArgs`. refused: the reason why ours cannot answer it."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    refused: str = ""


@dataclass
class LayerArguments:
    """Arguments of a layer beside the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Calls:
    """Calls of attention, and the masks that transformers made for them.

    marks   id of a mask -> its window, as of `GroupedArgs`, or the reason why no kernel has it
    kept    the masks, whose ids must last
    """

    found: list[ModuleAttention] = field(default_factory=list)
    marks: dict[int, int | None | str] = field(default_factory=dict)
    kept: list[Tensor] = field(default_factory=list)


class Stubs:
    """Functions in place of the layers of a model, while its base model runs.

    as_tuple   True: layers return a tuple
    inputs     arguments of each layer
    seen       hidden states of each layer
    """

    def __init__(self, skeleton: Skeleton, *, as_tuple: bool) -> None:
        self.skeleton, self.as_tuple = skeleton, as_tuple
        self.inputs: list[LayerArguments] = []
        self.seen: list[Tensor] = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the functions in place of the layers."""
        for layer in self.skeleton.layers:
            layer.forward = self._forward  # type: ignore[method-assign]
        try:
            yield
        finally:
            for layer in self.skeleton.layers:
                del layer.forward

    def _forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.inputs.append(LayerArguments(args, kwargs))
        self.seen.append(hidden)
        return (hidden,) if self.as_tuple else hidden


def outer_params(skeleton: Skeleton) -> dict[str, nn.Parameter]:
    """Return the parameters of the base model outside its layers and its token embedding, by their names in it."""
    embed = skeleton.base.get_input_embeddings().weight
    inside = {id(param) for param in skeleton.layers.parameters()} | {id(embed)}
    return {name: param for name, param in skeleton.base.named_parameters() if id(param) not in inside}


def run_base(
    skeleton: Skeleton, stubs: Stubs, params: dict[str, Tensor], embedded: Tensor, positions: Tensor
) -> Tensor:
    """LayerRun the base model on embedded tokens [1, T, width] at positions [1, T]. Return its result [1, T, hidden].

    params   values of `outer_params`
    """
    weight, own = skeleton.base.get_input_embeddings().weight, torch.nn.functional.embedding

    def looked_up(ids: Tensor, table: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = embedded if table is weight else own(ids, table, *args, **kwargs)
        return found

    ids = torch.zeros(positions.shape, dtype=torch.int64, device=positions.device)
    given = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    torch.nn.functional.embedding = looked_up
    try:
        with stubs.in_place():
            out = torch.func.functional_call(skeleton.base, params, kwargs=given)
    finally:
        torch.nn.functional.embedding = own
    result: Tensor = out.last_hidden_state if hasattr(out, "last_hidden_state") else out[0]
    return result


def captured(raw: dict[str, Any], skeleton: Skeleton, calls: Calls) -> Stubs:
    """LayerRun the base model with functions in place of its layers. Raises `UnsupportedModel` with what was found.

    calls   gets the masks that the model makes
    """
    width = skeleton.base.get_input_embeddings().embedding_dim
    embedded, positions = torch.randn(1, TOKENS, width), torch.arange(TOKENS)[None]
    params = {name: torch.randn(param.shape) for name, param in outer_params(skeleton).items()}
    errors = list[str]()
    for as_tuple in (False, True):
        stubs = Stubs(skeleton, as_tuple=as_tuple)
        try:
            with torch.no_grad(), answered(calls, marking=True):
                run_base(skeleton, stubs, params, embedded, positions)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}".splitlines()[0][:200])
            continue
        if stubs.seen and stubs.seen[0].dim() == 3 and all(one.shape == stubs.seen[0].shape for one in stubs.seen):
            _check(raw, skeleton, stubs)
            return stubs
    raise refused(raw, f"its code cannot run without its layers ({errors[0] if errors else 'hidden states change'})")


def _check(raw: dict[str, Any], skeleton: Skeleton, stubs: Stubs) -> None:
    if len(stubs.inputs) != len(skeleton.layers):
        raise refused(raw, f"it runs {len(stubs.inputs)} layers of {len(skeleton.layers)}")
    if any(one is not stubs.seen[0] for one in stubs.seen):
        raise refused(raw, "it computes something between its layers")


@contextmanager
def answered(calls: Calls, *, marking: bool = False) -> Iterator[None]:
    """Answer calls of attention by operations, and write them down in `calls`.

    marking   True: a mask becomes a mark, which `calls` explains; False: there are no masks
    """
    from transformers import masking_utils
    from transformers.modeling_utils import AttentionInterface

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **more: Any) -> tuple[Tensor, None]:
        calls.found.append(_call(module, q, mask, more, calls))
        return operations().attend(q, k, v, more.get("s_aux"), len(calls.found) - 1), None

    def product(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> Tensor:
        window = None if attn_mask is None and is_causal else calls.marks.get(id(attn_mask), OWN_MASK)
        call = ModuleAttention(scale=more.get("scale") or q.shape[-1] ** -0.5)
        calls.found.append(_with_window(call, window))
        return operations().attend(q, k, v, None, len(calls.found) - 1).transpose(1, 2)

    def mask(*args: Any, **kwargs: Any) -> Tensor | None:
        if not marking:
            return None
        made = torch.zeros(1)
        calls.kept.append(made)
        calls.marks[id(made)] = mask_window(kwargs["mask_function"], kwargs.get("local_size"))
        return made

    masks, own = masking_utils.AttentionMaskInterface, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    functional, packed = torch.nn.functional.scaled_dot_product_attention, masking_utils.find_packed_sequence_indices
    AttentionInterface.register(NAME, attend)
    for name in (NAME, "sdpa"):
        masks.register(name, mask)
    torch.nn.functional.scaled_dot_product_attention = product
    masking_utils.find_packed_sequence_indices = lambda positions: None  # it reads values of positions
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = functional
        masking_utils.find_packed_sequence_indices = packed
        masks.register("sdpa", own)


def _call(module: Any, q: Tensor, mask: Any, more: dict[str, Any], calls: Calls) -> ModuleAttention:
    """Return a call of attention. For masks of transformers the mask decides on the window, as in the eager model."""
    scale = more.get("scaling")
    scale = scale if scale is not None else getattr(module, "scaling", None) or q.shape[-1] ** -0.5
    call = ModuleAttention(scale=float(scale), soft_cap=more.get("softcap"), sinks=more.get("s_aux") is not None)
    others = [name for name, value in more.items() if name not in SILENT and value is not None and value is not False]
    if others:
        call.refused = f"its attention reads {' and '.join(others)}"
    if getattr(module, "is_causal", True) is False:
        call.refused = "its attention is not causal"
    return _with_window(call, calls.marks.get(id(mask), OWN_MASK if mask is not None else None))


def _with_window(call: ModuleAttention, window: int | None | str) -> ModuleAttention:
    if isinstance(window, str):
        call.refused = window
    else:
        call.window = window
    return call


def mask_window(visible: Callable[[Any, Any, Any, Any], Any], size: int | None) -> int | None | str:
    """Return the window of a mask of transformers, as of `GroupedArgs`, or words for another mask.

    visible   function of batch, head, query and key -> True if the query attends to the key
    size      size of a window or of chunks, if the mask has any
    Windows and chunks are compared with the function at their edges and at random places.
    """
    made = torch.Generator().manual_seed(0)
    q = torch.randint(0, 4 * (size or 50), (4000,), generator=made)
    k = (q[:, None] - torch.tensor([0, 1, -1, (size or 9) - 1, size or 9, (size or 9) + 1])).flatten()
    far = 2 ** torch.arange(8, 24)  # a window that is not told
    q = torch.cat((q, q.repeat_interleave(6), far, far))
    k = torch.cat((torch.randint(0, 4 * (size or 50), (4000,), generator=made), k, far // 2, 0 * far)).clamp(min=0)
    zero = torch.zeros_like(q)
    try:
        truth = torch.as_tensor(visible(zero, zero, q, k)).expand(q.shape)
    except Exception:
        return OWN_MASK
    for window in (None, size, -size) if size else (None,):
        ours = k <= q
        if window is not None:
            ours &= k > q - window if window > 0 else k >= q // -window * -window
        if torch.equal(truth, ours):
            return window
    return OWN_MASK
