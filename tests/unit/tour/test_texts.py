"""Texts of the tours: each stop has its parts, its command exists, and both languages have the same."""

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quire.entry.cli.main import main
from quire.entry.cli.tour import NAMES
from quire.observe.calls import PACKAGE
from quire.tour import moe
from quire.tour.live import SeenCall, TourStop
from quire.tour.pages import Code, StopPage, code_at, code_of
from quire.tour.ran_lines import RanLines
from quire.tour.render import fold, page_lines
from quire.tour.texts import WORDS, language_of, parse_tour, read_tour, told

from ...support.documented import parser, quire_commands, refusal

STOPS = {"token": 12, "moe": 8, "ranks": 8}


@pytest.mark.parametrize("name", NAMES)
def test_each_stop_has_its_idea_in_about_five_sentences_and_a_command_that_exists(name: str) -> None:
    tour = read_tour(name)
    assert len(tour.stops) == STOPS[name] == len(import_module(f"quire.tour.{name}").STOPS)
    for stop in tour.stops:
        assert 4 <= len(re.findall(r"[.:](?= [A-Z]|$)", stop.idea)) <= 8, stop.title
        (words,) = quire_commands(stop.command.replace("{package}", str(PACKAGE)))
        assert not refusal(words), stop.command
        assert all(Path(word).is_dir() for word in words if word.startswith("/")), stop.command
        at = parser().parse_args(words)
        assert words[0] != "tour" or at.stop <= STOPS[at.name], stop.command


@pytest.mark.parametrize("name", NAMES)
def test_what_a_plan_is_said_to_show_is_in_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for stop in read_tour(name).stops:
        (words,) = quire_commands(stop.command.replace("{package}", str(PACKAGE)))
        named = [span for span in re.findall("`([^`]*)`", stop.see) if not span.startswith("-")]
        if words[0] == "explain" and named:
            assert main(words) == 0
            out = capsys.readouterr().out
            assert all(span in out for span in named), stop.command


def test_a_stop_without_its_parts_is_told() -> None:
    with pytest.raises(ValueError, match="B: a stop has an idea, a command"):
        parse_tour("# A\n\nIntro.\n\n## B\n\nIdea.\n\nNo command.\n\nSee.\n\nvLLM: `x`\n")


def test_a_formula_that_is_gone_is_told() -> None:
    every = [stop for name in NAMES for stop in import_module(f"quire.tour.{name}").STOPS if stop.formula]
    assert len(every) >= 8 and all(code_of(stop, "").marked for stop in every)
    with pytest.raises(LookupError, match=r"prepare shows no line with 'gone\('"):
        code_of(every[0]._replace(marks=("gone(",)), "")
    with pytest.raises(LookupError, match="has 'rms_norm' on 2 lines: give more of one"):
        code_of(every[0]._replace(marks=("rms_norm",)), "")
    with pytest.raises(AttributeError, match="gone"):
        code_of(every[0]._replace(formula="quire.kernels.heads.ref:gone"), "")
    with pytest.raises(LookupError, match="no function begins at"):
        code_at(PACKAGE / "kernels" / "heads" / "ref.py", 1)


def test_the_source_is_shown_without_its_docstring() -> None:
    lines = (PACKAGE / "layers" / "decoder.py").read_text().splitlines()
    at = next(i for i, line in enumerate(lines, 1) if "def forward(self, hidden: Tensor, turns" in line)
    code = code_at(PACKAGE / "layers" / "decoder.py", at)
    assert code.name == "DecoderBlock.forward" and code.where == f"layers/decoder.py:{at}" and not code.more
    assert code.lines[0] == lines[at - 1].strip() and not any('"""' in line for line in code.lines)
    assert code.lines[-1].strip() == "return hidden if self.own_input is None else self.own_input(hidden, ctx)"


def test_no_line_is_marked_that_did_not_run() -> None:
    with RanLines([fold.__code__]) as ran:
        fold("", 8)
    stop = TourStop("", 0, ("lines.append(", "lines, line ="), formula="quire.tour.render:fold")
    code = code_of(stop, "", ran.seen)
    assert [code.lines[place].strip() for place in code.marked] == ['lines, line = list[str](), ""']
    assert len(code_of(stop, "").marked) == 2


def test_a_page_of_another_request_has_the_values_of_both() -> None:
    code = Code("f", "a.py:1", ("def f():",), 0, (1,))
    usual = [("a", "1"), ("b", "2")]
    page = StopPage(
        1, "T", code, False, "f, 1 ms, rank 1", "start", "", [("a", "1"), ("b", "3")], "", "", "S", "v", "", usual
    )
    lines = list(page_lines(page, 8, "en"))
    assert lines.count("    before the change  2") == 1 and not any("before the change  1" in line for line in lines)
    assert "ran  f, 1 ms, rank 1 (the code above ran when" in "".join(lines) and not any("$" in line for line in lines)
    assert "执行  f, 1 ms, rank 1（上面的代码" in "".join(page_lines(page, 8, "zh"))


@pytest.mark.parametrize(
    ("locale", "language"), [("zh_CN.UTF-8", "zh"), ("en_US.UTF-8", "en"), ("de_DE", "en"), ("", "en")]
)
def test_the_language_is_that_of_the_locale(locale: str, language: str) -> None:
    assert language_of(locale) == language


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("one two three", 7, ["one two", "three"]),
        ("键和值在缓存里。", 8, ["键和值在", "缓存里。"]),
        ("键和值。在", 6, ["键和", "值。在"]),
        ("KV 缓存 block", 8, ["KV 缓存", "block"]),
        ("键（和值）在", 5, ["键", "（和", "值）", "在"]),
        ("", 8, []),
    ],
)
def test_lines_break_between_words_and_between_chinese_characters(text: str, width: int, lines: list[str]) -> None:
    assert fold(text, width) == lines


def test_no_line_is_wider_than_the_terminal() -> None:
    for stop in read_tour("token", "zh").stops:
        for width in (40, 80):
            assert all(sum(1 + (ord(sign) > 0x2E80) for sign in line) <= width for line in fold(stop.idea, width))


def test_both_languages_have_the_same_words() -> None:
    assert WORDS["en"].keys() == WORDS["zh"].keys()


SAME = {"ranks", "rank {}", "prompt", "logits", "token", "logit", "qkv"}  # in Chinese texts, too
CODE = {"token_ids", "positions", "kv_slots", "seq_lens", "sample_rows"}


def value_names() -> Iterator[str]:
    """Yield the names of all values that tours show, {} for a part that differs: first elements of pairs."""
    for name in NAMES:
        for node in ast.walk(ast.parse((PACKAGE / "tour" / f"{name}.py").read_text())):
            if isinstance(node, ast.Tuple) and len(node.elts) == 2 and not isinstance(node.elts[1], ast.Constant):
                first = node.elts[0]
                if isinstance(first, ast.JoinedStr):
                    yield "".join(str(one.value) if isinstance(one, ast.Constant) else "{}" for one in first.values)
                elif isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield first.value


def test_every_name_of_a_value_has_a_chinese_one() -> None:
    table = PACKAGE / "tour" / "values.zh.txt"
    section = table.read_text().partition("# names\n")[2].partition("\n# values\n")[0]
    assert {line.partition(" | ")[0] for line in section.splitlines()} == set(value_names()) - SAME - CODE


@pytest.mark.parametrize(
    ("words", "chinese"),
    [
        ("head 3 of the last token reads", "最后一个 token 的头 3 读取"),
        ("[0.034, 0.204, ...]  length 1.79", "[0.034, 0.204, ...] 长度 1.79"),
        ("expert 2 with 1.46, expert 0 with 1.04", "专家 2（1.46）, 专家 0（1.04）"),
        ("62 of 63", "62，共 63"),
        ("' one of two'", "' one of two'"),
        ("token_ids", "token_ids"),
    ],
)
def test_names_and_values_in_chinese(words: str, chinese: str) -> None:
    assert told(words, "zh") == chinese and told(words, "en") == words


def test_the_result_of_prompts_is_shown_and_not_the_memory_before() -> None:
    given = {"kv_up": torch.zeros(8, 32, 64), "q": torch.zeros(3, 8, 24), "out": torch.zeros(3, 8, 16)}
    given["meta"] = SimpleNamespace(seq_lens=torch.tensor([3]))
    assert moe._expanded(SimpleNamespace(), SeenCall(None, given, torch.ones(3, 8, 16)))[-1][1].endswith("length 4.00")
