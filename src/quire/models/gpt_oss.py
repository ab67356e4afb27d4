"""gpt-oss (OpenAI): sinks in attention, biases everywhere, experts in one tensor per layer.

Gate and up of an expert alternate. Unquantized checkpoints store the matrices as [inputs, outputs], MXFP4 ones as
[outputs, inputs]; both have the same names, and the quantized ones "_blocks" and "_scales" behind them.
"""

from quire.models import names
from quire.models.names import NameMap

_STORED = "model.layers.{i}.mlp.experts."
_FORMS = ("paired columns", "paired blocks")

NAME_MAP: NameMap = (
    *names.EMBEDDING_AND_HEAD,
    *names.BLOCK_NORMS,
    *names.ATTENTION,
    *names.QKV_BIAS,
    *names.OUTPUT_BIAS,
    ("model.layers.{i}.self_attn.sinks", "layers.{i}.attention.sinks.weight", ""),
    ("model.layers.{i}.mlp.router.weight", "layers.{i}.mlp.router.weight", ""),
    ("model.layers.{i}.mlp.router.bias", "layers.{i}.mlp.router.bias", ""),
    *((f"{_STORED}gate_up_proj", "layers.{i}.mlp.experts.gate_up", form) for form in _FORMS),
    *((f"{_STORED}gate_up_proj_bias", "layers.{i}.mlp.experts.gate_up_bias", form) for form in _FORMS),
    *((f"{_STORED}down_proj", "layers.{i}.mlp.experts.down", form) for form in _FORMS),
    *((f"{_STORED}down_proj_bias", "layers.{i}.mlp.experts.down_bias", form) for form in _FORMS),
)
