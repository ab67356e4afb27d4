"""Texts of the tours: Markdown files beside this one, `<tour>.md` and `<tour>.zh.md`.

A file has a title, an introduction, and a section for each stop: a heading, the idea, a command, what it shows, and a
line "vLLM: ...". `{name}` stands for a value of the live trace. `values.<language>.txt` has names of values.
"""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from quire.contracts.text_table import read_rows

LANGUAGES = ("en", "zh")
# colon, aside: signs behind a word, and around a remark
WORDS = {
    "en": {
        "colon": ": ",
        "aside": " ({})",
        "code": "code",
        "reference": "code (the reference: the kernel that ran computes the same)",
        "ran": "ran",
        "start": "the code above ran when the engine was made, and this call works with its result",
        "inside": "the code above makes this call",
        "around": "this call runs the code above",
        "values": "values",
        "usual": "before the change",
        "try": "change this and see",
        "see": "what to see",
        "vllm": "in vLLM",
        "more": "... {count} more lines",
        "next": "Enter: next stop, b: back, q: leave",
    },
    "zh": {
        "colon": "：",
        "aside": "（{}）",
        "code": "代码",
        "reference": "代码（参考实现：实际运行的 kernel 计算结果相同）",
        "ran": "执行",
        "start": "上面的代码在引擎创建时运行，这次调用使用它的结果",
        "inside": "由上面的代码发起这次调用",
        "around": "这次调用会运行上面的代码",
        "values": "数值",
        "usual": "改动之前",
        "try": "改一改，看结果",
        "see": "看什么",
        "vllm": "vLLM 中的名称",
        "more": "... 还有 {count} 行",
        "next": "Enter：下一站，b：上一站，q：退出",
    },
}


class StopText(NamedTuple):
    """The texts of a stop. see: what its command shows"""

    title: str
    idea: str
    command: str
    see: str
    vllm: str


class Tour(NamedTuple):
    """The texts of a tour. flag: behind each command that shows a tour, so that it stays in this language"""

    title: str
    about: str
    stops: tuple[StopText, ...]
    flag: str = ""


def language_of(locale: str) -> str:
    """Return the language of a locale such as zh_CN.UTF-8, or English if there are no texts in it."""
    return next((one for one in LANGUAGES if locale.startswith(one)), LANGUAGES[0])


def read_tour(name: str, language: str = "en") -> Tour:
    """Read the texts of a tour in a language of LANGUAGES."""
    ending = "" if language == "en" else f".{language}"
    tour = parse_tour((Path(__file__).parent / f"{name}{ending}.md").read_text(encoding="utf-8"))
    return tour._replace(flag=f" --lang {language}" * bool(ending))


def told(words: str, language: str) -> str:
    """Return the name of a value, or a value, in a language. Without a row in the table it stays as it is."""
    if (whole := _fitting(words, language)) is not None:
        return whole
    return ", ".join(_fitting(part, language) or part for part in words.split(", "))


def _fitting(words: str, language: str) -> str | None:
    for pattern, other in _named(language):
        if found := pattern.fullmatch(words):
            return other.format(*found.groups())
    return None


@cache
def _named(language: str) -> tuple[tuple[re.Pattern[str], str], ...]:
    file = Path(__file__).parent / f"values.{language}.txt"
    return tuple(_row(*row) for row in read_rows(file)) if file.exists() else ()


def _row(english: str, other: str) -> tuple[re.Pattern[str], str]:
    pattern = re.escape(english).replace(r"\{n\}", r"([\d.,]*\d)").replace(r"\{\}", "(.+)").replace(r"\ ", " +")
    return re.compile(pattern), other.replace("{n}", "{}")


def parse_tour(text: str) -> Tour:
    """Return the texts of a tour. Raises ValueError for a section of another form."""
    first, *sections = text.split("\n## ")
    title, about = _paragraphs(first.removeprefix("# "))
    return Tour(title, about, tuple(StopText(*_stop(section)) for section in sections))


def _stop(section: str) -> list[str]:
    title, idea, command, see, vllm = _paragraphs(section)
    if not command.startswith("$ ") or not vllm.startswith("vLLM: "):
        raise ValueError(f"{title}: a stop has an idea, a command, what it shows, and a line 'vLLM: ...'")
    return [title, idea, command.removeprefix("$ "), see, vllm.removeprefix("vLLM: ")]


def _paragraphs(text: str) -> list[str]:
    """Return paragraphs, each in one line. A block of code is its text."""
    blocks = (block.splitlines() for block in text.strip().split("\n\n"))
    return [" ".join(line.strip() for line in block if not line.startswith("```")) for block in blocks]
