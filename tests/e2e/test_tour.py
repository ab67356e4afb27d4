"""`quire tour`: each stop is passed by a live request, and the command shows it."""

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire import LLM
from quire.entry.cli.main import main
from quire.tour import render
from quire.tour.guide import Visit, made_visit, write_page
from quire.tour.live import Live
from quire.tour.pages import StopPage
from quire.tour.texts import LANGUAGES, read_tour

from ..support.documented import quire_commands
from ..support.full import only_full


def visits(llm: LLM, name: str) -> Iterator[tuple[Visit, list[StopPage]]]:
    """Yield the pages of a tour in every language, from one request of an engine."""
    stops = import_module(f"quire.tour.{name}")
    live = Live(llm, stops.STOPS)
    live.run(stops.PROMPT, 2)
    for language in LANGUAGES:
        visit = made_visit(live, name, language, stops.facts(live))
        yield visit, list(visit.pages())


def shown(page: StopPage) -> dict[str, str]:
    return dict(page.values)


class Tags(HTMLParser):
    """Counts elements; those that are open at the end are an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen, self.open = list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_tour_of_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = import_module("quire.tour.token").OPTIONS
    with LLM(**options) as llm:
        (english, pages), (other, chinese) = visits(llm, "token")
        ids = llm.get_tokenizer().encode("The json module")
        file = tmp_path / "tour.html"
        write_page(file, english, pages)
        write_page(tmp_path / "zh.html", other, chinese)
    assert [page.number for page in pages] == list(range(1, 13)) and len(chinese) == 12
    assert [page.values for page in chinese] == [page.values for page in pages]
    stops = import_module("quire.tour.token").STOPS
    assert all(len(page.code.marked) == len(stop.marks) for page, stop in zip(pages, stops, strict=True))
    assert all(page.values and "{" not in page.idea for page in pages + chinese)
    assert "{" not in english.text.about and [page.reference for page in pages].count(True) == 2
    assert shown(pages[0])["token ids"] == str(ids) and shown(pages[3])["positions"] == "[0, 1, 2]"
    drawn = shown(pages[10])["token"].partition(" = ")[2]
    assert drawn in pages[10].idea and shown(pages[9])["best five"].startswith(drawn)
    assert shown(pages[11])["steps of this request"] == "step 0: prefill, 3 tokens; step 1: decode, 1 token"
    assert pages[7].code.name == "paged_attention" and pages[5].code.name == "DecoderBlock.forward"
    tags = Tags(text := file.read_text()).seen
    assert "`" not in re.sub("<pre>.*?</pre>", "", text, flags=re.S) and "quire-tiny: " in text
    assert tags.count("section") == 12 and tags.count("svg") == 3 and "script" not in tags
    text = (tmp_path / "zh.html").read_text()
    assert '<html lang="zh-CN">' in text and "<h3>代码：" in text and "</code>，<code>" in text
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(render, "sys", SimpleNamespace(stdout=terminal, stdin=terminal))
    answers = iter(["", "b", "", "q"])
    monkeypatch.setattr("builtins.input", lambda asked: next(answers))
    render.show(english.text, pages, "en")
    out = capsys.readouterr().out
    assert out.count("\n2/12  ") == 2 and "3/12" not in out and next(answers, None) is None


def test_the_tour_of_experts_on_a_model_that_is_made_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep = ["--keep", str(tmp_path / "small")]
    assert main(["tour", "moe", "--json", "--lang", "zh", "--set", "num_experts_per_tok=3", *keep]) == 0
    pages = json.loads(capsys.readouterr().out)
    assert not any(page["reference"] for page in pages if page["ran"].startswith("latent.ref."))
    values: list[dict[str, str]] = [dict(page["values"]) for page in pages]
    assert values[2]["way"] == "naive" and values[5]["chosen"].count("expert") == 3
    last = pages[7]["code"]
    assert [last["lines"][place - 1].strip() for place in last["marked"][:1]] == ["with fork.beside:"]
    assert pages[6]["code"]["name"] == "run_adapted" and pages[0]["command"].endswith(" --lang zh")
    assert len(pages) == 8 and not any("{" in page["idea"] for page in pages)
    assert values[7]["weights"].startswith("73,728 of 196,608 ")
    assert main(["tour", "--set", "hidden_size=2"]) == 3 and main(["tour", "moe", "--set", "no=2"]) == 3
    assert "leave them out" in (said := capsys.readouterr().err) and "--set no does not exist" in said
    assert (tmp_path / "small" / "model.safetensors").is_file() and main(["tour", "moe", *keep]) == 3
    assert main(["tour", "moe", "--set", "num_experts_per_tok=9"]) == 3
    assert main(["tour", "--prompt", ""]) == 3 and main(["tour", "--stop", "13"]) == 3
    said = capsys.readouterr().err
    assert "--prompt is an empty text" in said and "--stop 13 does not exist: give 1 to 12." in said
    assert "small exists: give the name" in said and "--set makes a model that does not exist: num_experts" in said


@only_full
def test_commands_of_all_stops_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    package = Path(import_module("quire").__file__ or "").parent
    for name in ("token", "moe", "ranks"):
        for stop in read_tour(name).stops:
            (words,) = quire_commands(stop.command.replace("{package}", str(package)))
            assert main(words) == 0, stop.command
