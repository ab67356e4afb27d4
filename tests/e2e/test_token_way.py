"""The pages about a request's way show the way that a request takes."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.kernels.native.library import missing
from quire.layers.decoder import DecoderBlock
from token_way import Way, request

ROOT = Path(__file__).resolve().parents[2]
# Files of the table that a streamed chat on a CPU does not call: another route's, a GPU's, and those of the start.
ELSEWHERE = {
    "entry/http/openai/completions.py",
    "worker/graphs.py",
    "layers/moe.py",
    "layers/latent.py",
    "entry/http/app.py",
    "entry/core_process.py",
    "kernels/select.py",
}


@pytest.fixture(scope="module")
def way() -> Way:
    if why := missing():
        pytest.skip(f"no recorded steps: {why}")
    return request()


def rows() -> Iterator[list[str]]:
    """The files of each row of CONTRIBUTING's table."""
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| step | file |")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        folder, files = "", []
        for name in re.findall(r"`([\w/]+\.py)`", line.split("|")[2]):
            folder = name.rpartition("/")[0] or folder
            files.append(name if "/" in name else f"{folder}/{name}")
        yield files


def test_the_drawing_of_the_readme_is_a_request(way: Way) -> None:
    assert f"```\n{way.drawing()}\n```" in (ROOT / "README.md").read_text(), (
        "README.md, A token's way: put what `PYTHONPATH=src python tools/token_way.py` prints there"
    )


def test_the_table_of_contributing_is_a_request(way: Way) -> None:
    listed = [file for files in rows() for file in files]
    assert len(listed) > 30
    wrong = [file for file in listed if (file in way.called) == (file in ELSEWHERE)]
    assert not wrong, f"CONTRIBUTING.md, table of a request's way: a request does not call {wrong}"


def test_every_stop_is_passed(way: Way) -> None:
    from token_way import STOPS

    assert list(way.drawn) and set(way.drawn) == set(STOPS)


@pytest.mark.parametrize("eager", [False, True])
def test_a_debugger_sees_every_layer_of_every_step_with_enforce_eager(
    eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise recorded steps are replayed without Python."""
    calls, forward = list[int](), DecoderBlock.forward

    def counted(self: DecoderBlock, *given: object) -> object:
        calls.append(len(given[0]))  # type: ignore[arg-type]
        return forward(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(DecoderBlock, "forward", counted)
    with LLM(enforce_eager=eager, device="cpu", kv_cache_memory_bytes=1 << 24, use_tqdm_on_load=False) as llm:
        llm.generate([[11, 12, 13]], SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)
        described, layers = llm.engine.worker.describe(), llm.engine.args.num_layers
    if eager:
        assert calls == [3] * layers + [1] * layers * 5
        assert described["not recorded"] == {"every step": "enforce_eager"}
    elif "recordings" in str(described["parts"]):
        assert len(calls) < 6 * layers
