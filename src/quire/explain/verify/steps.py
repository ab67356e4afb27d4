"""Recording of every step of Quire's layers in a running engine, under the names that Hugging Face gives to the steps.

Wraps the modules of an assembled model in float32 on a CPU, where no kernel joins a norm and a projection. Knows how
layers order their rows; knows nothing of the reference. A watched model serves no requests afterwards.
"""

from functools import partial
from typing import Any

from quire.explain.verify.recording import ATTENTION, FEED_FORWARD, Recording, on_result, stage_name
from quire.explain.verify.step_kinds import FEED_FORWARDS, MIXERS
from quire.layers.decoder import Decoder


def watch(model: Decoder, recording: Recording) -> None:
    """Record every operation in the layers of `model` from now on, but not the output of whole layers.

    A `HiddenTap` of the worker gets that output. Afterwards the model must serve no other requests.
    """
    block: Any
    for index, block in enumerate(model.layers):
        stage = stage_name(index, ATTENTION)
        keep: Any = partial(recording.keep, stage)
        on_result(block.attention_norm, keep, "input_layernorm")
        recording.kinds[stage] = MIXERS[type(block.attention)]
        recording.kinds[stage].watch(block.attention, keep)
        on_result(block.attention, keep, "sum")
        stage = stage_name(index, FEED_FORWARD)
        keep = partial(recording.keep, stage)
        on_result(block.mlp_norm, keep, "post_attention_layernorm")
        recording.kinds[stage] = FEED_FORWARDS[type(block.mlp)]
        recording.kinds[stage].watch(block.mlp, keep)
