"""Reader of the config.json of an EAGLE head: a layer of its own checkpoint, which drafts from a model's hidden states.

Knows the flat form, a Llama's config.json of a layer, and the form of the speculators library. No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.args.keys import Keys
from quire.contracts.params import MOST_READS

UNBOUNDED = 1 << 30  # positions: rotations are computed, so a head drafts behind those it was trained for, too
IDS = "eagle_aux_hidden_state_layer_ids"
LAYER = {"model_type": "llama", "num_hidden_layers": 1, "max_position_embeddings": 2048}  # where the file has none
ONLY = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    **dict.fromkeys(("layernorms", "use_mtp_layernorm", "embed_requires_grad", "parallel_drafting"), False),
}


@dataclass(frozen=True, kw_only=True)
class EagleArgs:
    """Arguments of an EAGLE head beside those of its layer.

    method       "eagle": reads the last hidden states; "eagle3": states between layers
    vocab_size   token ids of the model that it drafts for; `ModelArgs.vocab_size` has those of the head
    context      positions that the head was trained for
    layer_ids    layers of the model whose inputs an EAGLE-3 head reads; (): a low, a middle and a high one. The number
                 of layers stands for the output of the last layer
    norms        norms of the states before the projection: "" none, "joined" one of all together, "each" one of each
    norm_output  True: the next pass reads the head's output after the final norm
    norm_residual  True: the residual of the layer is the states after their norm
    at, fc, bias   names of the layer and of the projection in the checkpoint; True: the projection has a bias
    """

    method: str
    vocab_size: int
    context: int
    layer_ids: tuple[int, ...] = ()
    norms: str = ""
    norm_output: bool = False
    norm_residual: bool = False
    at: str = "layers.0"
    fc: str = "fc"
    bias: bool = False

    def reads(self, layers: int) -> tuple[int, ...]:
        """Return the layers of a model of so many whose inputs the head reads; () for an EAGLE head."""
        return (self.layer_ids or (2, layers // 2, layers - 3)) if self.method == "eagle3" else ()


def read_head(raw: Mapping[str, Any], source: str, method: str) -> tuple[Keys, EagleArgs | None]:
    """Return the keys of a head's layer, and the head's arguments; of a model its own keys and None.

    method   "eagle" or "eagle3": the file must be that of such a head; "": it must be a model's
    """
    keys = Keys(raw, source)
    named, library = "".join(keys.names("architectures")), raw.get("speculators_model_type")
    kind = library or ("eagle3" if "Eagle3" in named else "eagle" if "Eagle" in named else method)
    if kind != method:
        raise keys.unsupported(
            f"this is a head of method {kind}, which drafts for another model: serve that model "
            f'with --speculative-config \'{{"method": "{kind}", "model": ...}}\'.'
        )
    if not method:
        return keys, None
    layer = LAYER | dict((keys.object("transformer_layer_config") or {}) if library else raw)
    every = Keys({**raw, **(keys.object("eagle_config") or {}), **layer}, source)
    for key, value in (ONLY | {"target_hidden_size": layer.get("hidden_size")}).items():
        if every.get(key) not in (None, value):
            raise keys.unsupported(f"{key}={every[key]!r} of an EAGLE head is not implemented: use one with {value!r}.")
    ids = every.get(IDS) or []
    if not isinstance(ids, list) or any(type(one) is not int for one in ids) or len(ids) > MOST_READS:
        raise keys.wrong(f"{IDS}={ids!r} must be a list of at most {MOST_READS} layer numbers.")
    wide = Keys({**raw, **(keys.object("eagle_config") or {})}, source)
    before, each = wide.flag("norm_before_fc"), wide.flag("fc_norm")
    if before and each:
        raise keys.wrong("norm_before_fc and fc_norm exclude each other: one norm of all states, or one of each.")
    if method == "eagle" and (before or each or wide.flag("norm_output")):
        raise keys.unsupported("norm_before_fc, fc_norm and norm_output belong to EAGLE-3, and this is an EAGLE head.")
    return Keys(layer | {"architectures": ["LlamaForCausalLM"]}, source), EagleArgs(
        method=method,
        vocab_size=every.size("vocab_size"),
        context=every.size("max_position_embeddings"),
        layer_ids=tuple(ids),
        norms="joined" if before else "each" if each else "",
        norm_output=wide.flag("norm_output"),
        norm_residual=keys.flag("norm_before_residual", method == "eagle3" and bool(library)),
        at="layers.0" if library or method == "eagle" else "midlayer",
        bias=keys.flag("fusion_bias"),
    )
