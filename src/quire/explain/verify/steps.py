"""Recording of every step of Quire's layers in a running engine, under the names that Hugging Face gives to the steps.

Wraps the modules of an assembled model in float32. Under tensor parallelism each step is joined from the parts of the
ranks. Knows how layers order their rows; knows nothing of the reference. A watched model serves no requests afterwards.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from quire.contracts.errors import ConfigError
from quire.contracts.params import Part
from quire.explain.verify.recording import (
    ATTENTION,
    FEED_FORWARD,
    INPUT_PRODUCT,
    INPUT_STEPS,
    INPUT_SUM,
    Recording,
    on_added,
    on_result,
    stage_name,
)
from quire.explain.verify.step_kinds import FEED_FORWARDS, MIXERS
from quire.layers.branch import Branch
from quire.layers.decoder import Decoder
from quire.layers.layer_inputs import OwnInput
from quire.layers.linear import Linear
from quire.layers.moe import Router


def check_layers(model: Decoder) -> None:
    """Raise ConfigError for a model with layers whose steps are not known here."""
    for layer in model.layers:
        halves: Any = (layer.attention, MIXERS), (layer.mlp, FEED_FORWARDS)
        if layer.beside is not None or any(half is not None and type(half) not in known for half, known in halves):
            raise ConfigError(
                f"verify does not know the steps of all layers of a {model.args.model_type} model: compare the tokens "
                "of --dtype float32 with those of transformers."
            )


def watch(model: Decoder, recording: Recording, *, inner: bool = True) -> None:
    """Record every operation in the layers of `model` from now on, but not the output of whole layers.

    A `HiddenTap` of the worker gets that output. Afterwards the model must serve no other requests.

    inner   False: only the sum after attention is recorded
    """
    block: Any
    stored = {param.name: param.parts[0].stored.split(".")[-2] for param in model.layout}  # names of modules
    for index, block in zip(model.numbers, model.layers, strict=True):
        name = f"layers.{index}.{{}}.weight".format
        both = block.attention is not None and block.mlp is not None
        recording.after[index] = stored.get(name("mlp_norm"), "mlp") if both and block.norm is None else ""
        recording.ends[index] = ATTENTION if block.mlp is None else FEED_FORWARD
        if recording.after[index]:
            on_result(block.attention, partial(recording.keep, stage_name(index, ATTENTION)), "sum")
        if inner:
            _watch_layer(model, index, block, recording, stored)


def _watch_layer(model: Decoder, index: int, block: Any, recording: Recording, stored: Mapping[str, str]) -> None:
    """Record the operations in a layer. index: its number in the model; stored: parameter -> name of its module"""
    name = f"layers.{index}.{{}}.weight".format
    parts = _parts_below(model, index)
    for module in block.modules():
        if isinstance(module, Linear):
            module.fuses = lambda norm, rows: False  # type: ignore[method-assign]  # norms are steps of their own
        if isinstance(module, Router):
            module.joins_norm = False
    for half, part, branch, kinds in (
        (ATTENTION, block.attention, block.attention_branch, MIXERS),
        (FEED_FORWARD, block.mlp, block.mlp_branch, FEED_FORWARDS),
    ):
        if part is None:
            continue
        stage = stage_name(index, half)
        keep: Any = partial(recording.keep, stage)
        if block.norm is not None and half == ATTENTION:
            on_result(block.norm, keep, stored[name("norm")])
        _watch_norms(branch, keep, stored, name("mlp_{}" if half == FEED_FORWARD else "attention_{}"))
        recording.kinds[stage] = kinds[type(part)]
        recording.kinds[stage].watch(part, keep, parts)
    if block.own_input is not None:
        _watch_input(block.own_input, keep)


def _parts_below(model: Decoder, layer: int) -> Mapping[str, Sequence[Part]]:
    """Return name of a parameter below its layer -> parts of this rank. "kept": of the layer whose KV it reads."""

    def below(at: str) -> dict[str, Sequence[Part]]:
        return {param.name.removeprefix(at): param.parts for param in model.layout if param.name.startswith(at)}

    kept = below(f"layers.{model.args.kept_by(layer)}.")
    return below(f"layers.{layer}.") | {"kept": kept.get("attention.qkv.weight", ())}


def _watch_input(layer: OwnInput, keep: Any) -> None:
    """Record the steps by which a layer uses its embedding of each token, under the names of Gemma 4."""
    layer.gate.register_forward_hook(lambda module, given, result: keep(INPUT_SUM, given[0]))
    on_result(layer.gate, keep, INPUT_STEPS[0])
    layer.project.register_forward_hook(lambda module, given, result: keep(INPUT_PRODUCT, given[0]))
    on_result(layer.project, keep, INPUT_STEPS[1])
    on_added(layer.after, keep, INPUT_STEPS[2])


def _watch_norms(branch: Branch, keep: Any, stored: Mapping[str, str], name: str) -> None:
    """Record the norms of a half of a layer, under the names of the reference's modules.

    name   of the norms' parameters, with {} for the place
    """
    if branch.before is not None:
        on_result(branch.before, keep, stored[name.format("norm")])
    if branch.after is not None:
        on_added(branch.after, keep, stored[name.format("after")])
