"""Memory while weights are quantized or converted: the packed model, two of the largest units, and the read buffers."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from quire.config.checkpoint import parse_checkpoint_config
from quire.models.layout import layout
from quire.quantization.assign import with_formats
from quire.quantization.formats import raw_tensors
from quire.quantization.read import find_quantization
from quire.weights.load import DTYPES, load_weights
from quire.weights.units import load_units
from tests.filled_models import built
from tests.quantized_checkpoints import FORMS

form, folder = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)
raw = {"model_type": "qwen3", "vocab_size": 512, "hidden_size": 1024, "intermediate_size": 6144,
       "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128,
       "max_position_embeddings": 64, "tie_word_embeddings": False, "dtype": "bfloat16"}
args = parse_checkpoint_config(raw)
known = {} if form == "online" else {"quantization_config": FORMS[form].config}
config = find_quantization(folder, known, "fp8" if form == "online" else None).config
params = with_formats(layout(args), config)
stored = {}
for one in params:
    for tensor in raw_tensors(one):
        for part in tensor.parts:
            dtype = {"": torch.bfloat16, "float32": torch.float16}.get(tensor.dtype) or getattr(torch, tensor.dtype)
            made = torch.full(part.shape, 0x77777777 if dtype == torch.int32 else 1, dtype=dtype)
            stored[part.stored] = made
save_file(stored, folder / "model.safetensors")
size = sum(one.nbytes for one in stored.values())
del stored, made
model = built(args, "bfloat16", quantization=config, forced={"linear": "ref"})

def memory(word):
    line = next(line for line in open("/proc/self/status") if line.startswith(word))
    return int(line.split()[1]) << 10

open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = memory("VmRSS")
load_weights(model, folder)
peak, packed = memory("VmHWM") - before, memory("VmRSS") - before
largest = max(unit.num_bytes(2) for unit in load_units(params))
print(json.dumps([size, peak, packed, largest]))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="there is no /proc here")
@pytest.mark.parametrize("form", ["online", "fp8-block", "awq", "gptq"])
def test_peak(tmp_path: Path, form: str) -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM, form, str(tmp_path)], capture_output=True, text=True,
                         timeout=300, cwd=ROOT)  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    size, peak, packed, largest = eval(run.stdout.splitlines()[-1])
    buffers = 48 << 20  # of two threads, and temporary tensors of a conversion
    assert peak < packed + 2 * largest + buffers, [one >> 20 for one in (size, peak, packed, largest)]
    if form == "online":
        assert peak < 0.75 * size, "a model that fits only in FP8 can be loaded"
