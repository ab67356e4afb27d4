"""Costs of attention to chosen tokens: break-even lengths against sums over all rows, and the lines of explain."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.args.checkpoint import read_checkpoint_config
from quire.args.latent import LatentArgs
from quire.entry.cli.main import main
from quire.reports.chosen import decode_break_even, prompt_break_even


def operations(latent: LatentArgs, tokens: int, heads: int, share: float) -> tuple[float, float]:
    """Operations of the attention of a prompt, row by row: expanded, and with selection."""
    index = latent.index
    assert index is not None
    expanded = chosen = 0.0
    for row in range(1, tokens + 1):
        expanded += row * 2 * heads * (latent.nope_dim + latent.rope_dim + latent.v_dim)
        chosen += row * 2 * index.num_heads * index.head_dim * share
        chosen += min(row, index.top_k) * 2 * heads * (2 * latent.kv_rank + latent.rope_dim)
    return expanded, chosen


@pytest.mark.parametrize(("model", "share", "tp"), [("DeepSeek-V3.2", 1.0, 1), ("GLM-5", 1.0, 2), ("GLM-5", 0.25, 8)])
def test_break_even_of_prompts(shared: Path, model: str, share: float, tp: int) -> None:
    latent = read_checkpoint_config(shared / "hf" / model).layers[0].mixer
    assert isinstance(latent, LatentArgs) and latent.index is not None
    found = prompt_break_even(latent, latent.index, tp, share)
    assert found is not None
    for tokens, pays in ((found - 30, False), (found + 30, True)):
        expanded, chosen = operations(latent, tokens, latent.num_heads // tp, share)
        assert (chosen < expanded) == pays


def test_a_rank_with_few_heads_computes_more_for_the_indexer(shared: Path) -> None:
    latent = read_checkpoint_config(shared / "hf" / "DeepSeek-V3.2").layers[0].mixer
    assert isinstance(latent, LatentArgs) and latent.index is not None
    assert prompt_break_even(latent, latent.index, 8, 1.0) is None


def test_break_even_of_decodes() -> None:
    found = decode_break_even(2048, 1152, 256)
    assert found is not None
    assert found * 256 + 2048 * 1152 < found * 1152
    assert (found - 1) * 256 + 2048 * 1152 >= (found - 1) * 1152
    assert decode_break_even(2048, 100, 100) is None


DRAFTS = {"method": "mtp", "num_speculative_tokens": 3}
SHARED = (
    "later passes attend to the 2,048 tokens that the first pass of a step has chosen (IndexShare): they score none"
)


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (
            [],
            [
                "sparse latent attention: 3 layers choose 2,048 tokens by an indexer of 32 heads of 128; 2 others",
                "1,152 B of the latent, 256 B of the indexer's key",
                "a decode at 131,072 tokens reads, over all layers: 720.0 MiB to all tokens, 107.2 MiB to chosen ones",
                "decodes (bytes, absorbed) above 2,364 tokens of context; in prompts",
                "layers 3-4: sparse latent attention with a shared indexer, experts",
                "layers 0-2: sparse latent attention with an indexer of its own, feed-forward",
            ],
        ),
        (["--speculative-config", json.dumps(DRAFTS)], [SHARED]),
        (["--max-model-len", "2048"], ["dense in this engine: no context exceeds 2,048 tokens"]),
    ],
)
def test_explain_tells_who_chooses_and_what_it_costs(
    shared: Path, tmp_path: Path, options: list[str], lines: list[str], capsys: pytest.CaptureFixture[Any]
) -> None:
    raw = json.loads((shared / "hf" / "GLM-5.2-FP8" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 5}))
    assert main(["explain", str(tmp_path), "--device", "h200", *options]) == 0
    text = " ".join(capsys.readouterr().out.replace("\u2502", " ").split())
    for line in lines:
        assert line in text
    assert (SHARED in text) == (SHARED in lines)
