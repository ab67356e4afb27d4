"""The examples run as they are."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.args.checkpoint import parse_checkpoint_config
from quire.plan.layout import layout

from ..support.documented import blocks
from ..support.named_code import NAMED, missing

ROOT = Path(__file__).parents[2]
# Of DeepSeek-V2-Lite: what is reduced, what stays as it is, and what no reader of ours knows.
LITE = {
    "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
    "num_hidden_layers": 27, "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_attention_heads": 16,
    "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2,
    "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "max_position_embeddings": 163840, "torch_dtype": "bfloat16", "seq_aux": True,
    "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip


def deepseek(*arguments: Any) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, ROOT / "examples" / "deepseek_cpu.py", *arguments]
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables)


def test_deepseek_on_a_cpu() -> None:
    run = deepseek()
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0] == "logits: [2, 128, 102400], of the last position [2, 102400]"
    apart = float(lines[1].split("differ by ")[1].split()[0])
    assert 0 < apart < 1e-4
    assert any("into routed experts" in line and line.endswith("[256, 256]") for line in lines)
    assert "weights sum to 2.500" in run.stdout


def test_names_beside_those_of_the_published_code() -> None:
    """The parameters of a layer with experts are all in the table, under names that they have."""
    example = runpy.run_path(str(ROOT / "examples" / "deepseek_cpu.py"))
    table = example["__doc__"].partition("for layer 1:\n")[2]
    own = {param.name for param in layout(parse_checkpoint_config(example["CONFIG"]))}
    named = set(re.findall(r"(?<=[ ,])(?:layers\.1\.[\w.]+|(?:embed|norm|head)\.weight)", table))
    assert named == {name for name in own if not name.startswith(("layers.0.", "layers.2."))}
    assert len(NAMED.findall(table)) == 4 and missing(table) == []


def test_deepseek_of_a_folder_is_reduced(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LITE))
    run = deepseek(tmp_path)
    assert run.returncode == 0, run.stderr
    said, shapes = run.stdout.splitlines()[:2]
    assert "hidden_size 2048 -> 256" in said and "num_hidden_layers 27 -> 3" in said and "vocab_size" not in said
    assert shapes == "logits: [2, 128, 102400], of the last position [2, 102400]"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "qwen3"}, "give a folder with the config.json of a DeepSeek-V2 or V3"),
        (None, "does not exist"),
        (LITE | {"first_k_dense_replace": 27, "num_hidden_layers": 1}, "nothing to follow"),
        (LITE | {"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_deepseek_refuses_a_folder_in_one_line(config: Any, said: str, tmp_path: Path) -> None:
    """It exits with a line, which Python prints with exit code 1."""
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    example = runpy.run_path(str(ROOT / "examples" / "deepseek_cpu.py"))
    with pytest.raises(SystemExit) as ended:
        example["main"](str(tmp_path))
    assert said in str(ended.value.code) and "\n" not in str(ended.value.code)


def test_the_code_of_offline_use_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "offline.md").read_text()
    code = [block.text for block in blocks(page) if block.language == "python"]
    for text in code:
        exec(compile(text, "docs/offline.md", "exec"), {"__name__": "__main__"})
    assert len(code) == 3 and re.search("{'city': '(Oslo|Rome)'}", capsys.readouterr().out)
