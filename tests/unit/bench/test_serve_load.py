"""Prompts and arrivals of a load: the same for the same seed, and of the sizes asked for."""

import json
import math
import statistics
from pathlib import Path

import pytest

from quire.bench.serve_load import HIGH_ID, LOW_ID, Ask, RandomLoad, arrivals, read_load
from quire.contracts.errors import ConfigError


def test_random_prompts_have_the_length_and_repeat_with_the_seed() -> None:
    load = RandomLoad(input_len=20, output_len=5)
    asks = load.draw(4, 1)
    assert [len(ask.prompt) for ask in asks] == [20] * 4 and {ask.max_tokens for ask in asks} == {5}
    assert all(LOW_ID <= token < HIGH_ID for ask in asks for token in ask.prompt if isinstance(token, int))
    assert asks == load.draw(4, 1) != load.draw(4, 2)
    assert len({str(ask.prompt) for ask in asks}) == 4


def test_lengths_spread_over_the_range() -> None:
    asks = RandomLoad(input_len=100, output_len=50, input_ratio=0.5, output_ratio=0.2).draw(300, 0)
    lengths, outputs = [len(ask.prompt) for ask in asks], [ask.max_tokens for ask in asks]
    assert 50 <= min(lengths) < 60 and 140 < max(lengths) <= 150
    assert min(outputs) == 40 and max(outputs) == 60


def test_the_prefix_is_shared_and_comes_on_top() -> None:
    asks = RandomLoad(input_len=10, prefix_len=30).draw(3, 0)
    assert all(len(ask.prompt) == 40 for ask in asks)
    assert len({str(ask.prompt[:30]) for ask in asks}) == 1 and len({str(ask.prompt[30:]) for ask in asks}) == 3


def test_chat_gets_words() -> None:
    (ask,) = RandomLoad(input_len=10, prefix_len=2, as_text=True).draw(1, 0)
    assert isinstance(ask.prompt, str) and len(ask.prompt.split()) == 12


def test_a_file_is_read_and_repeated(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    rows = [{"prompt": "one"}, {"prompt": [5, 6], "max_tokens": 3}, {"prompt": "two", "output_tokens": 4}]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    asks = read_load(path, 9, 4, chat=False)
    assert asks == [
        Ask(prompt="one", max_tokens=9),
        Ask(prompt=[5, 6], max_tokens=3),
        Ask(prompt="two", max_tokens=4),
        Ask(prompt="one", max_tokens=9),
    ]


def test_a_file_of_conversations(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    messages = [{"role": "user", "content": "hello"}]
    path.write_text(json.dumps({"messages": messages}))
    assert read_load(path, 9, 1, chat=True) == [Ask(prompt=messages, max_tokens=9)]


@pytest.mark.parametrize("line", ["{", "[]", '{"text": "x"}', '{"prompt": "x", "max_tokens": "many"}', '"x"'])
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "load.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(ConfigError, match=r"load\.jsonl:2"):
        read_load(path, 9, 2, chat=False)


def test_an_empty_or_missing_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for name in ("empty", "missing"):
        with pytest.raises(ConfigError, match=name):
            read_load(tmp_path / name, 9, 1, chat=False)


def test_token_ids_are_no_chat(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    path.write_text('{"prompt": [1, 2]}')
    with pytest.raises(ConfigError, match="--backend openai"):
        read_load(path, 9, 1, chat=True)


def test_arrivals_follow_the_rate() -> None:
    assert list(arrivals(3, math.inf, 1.0, 0)) == [0.0, 0.0, 0.0]
    times = arrivals(4000, 20.0, 1.0, 3)
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert times[0] == 0 and times == arrivals(4000, 20.0, 1.0, 3)
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.1)
    assert statistics.pstdev(gaps) == pytest.approx(1 / 20, rel=0.1)  # exponential: as wide as its mean
    even = arrivals(4000, 20.0, 100.0, 3)
    assert statistics.pstdev(b - a for a, b in zip(even, even[1:], strict=False)) < 0.01
