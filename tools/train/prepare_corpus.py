"""Build the training corpus: Python documentation, standard library, question-answer pairs.

Usage::

    python prepare_corpus.py --docs /usr/share/doc/python3.11/html --out data --eval-out eval.json

``--docs`` is the HTML tree of the Python documentation (Debian: package python3-doc),
``--stdlib`` the standard library's folder (default: that of this interpreter).

Written to ``--out``: ``tokenizer/`` (Hugging Face files), ``docs.bin``, ``code.bin``,
``val.bin`` (uint16 token streams), ``qa.json`` (questions and answers about the
documentation) and ``fillers.json`` (short sentences used between recall notes).
Whole pages are held out: they feed ``val.bin`` and the evaluation file only.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sysconfig
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from lxml import html
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from chatml import CHAT_TEMPLATE, SPECIAL_TOKENS, render, tools_system
from synth import TOOLS, Synth

VOCAB_SIZE = 8192
# Pages that no training file sees.
HELD_OUT_PAGES = {
    "library/sched", "library/shelve", "library/calendar", "library/quopri", "library/fractions",
    "library/tomllib", "library/selectors", "library/graphlib", "library/binascii", "library/zipapp",
    "howto/sorting", "howto/ipaddress", "tutorial/stdlib2", "faq/library", "c-api/iter", "c-api/slice",
    "reference/toplevel_components", "extending/windows", "using/editors", "whatsnew/2.1",
}  # fmt: skip
SKIPPED_CODE_PARTS = {"test", "tests", "site-packages", "idlelib", "lib2to3", "pydoc_data", "turtledemo", "__pycache__"}
SPLIT_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass
class Entry:
    """A documented object: its name, signature, description and an example if there is one."""

    name: str
    signature: str
    page: str
    module: str
    paragraphs: list[str]
    example: str | None = None


@dataclass
class Page:
    """A page as text, with the data of question-answer pairs."""

    key: str
    title: str
    text: str
    entries: list[Entry] = field(default_factory=list)
    sections: list[tuple[str, str]] = field(default_factory=list)


# -- HTML to text ---------------------------------------------------------------------


def squeeze(text: str) -> str:
    text = text.replace("\u00b6", "").replace("\u00a0", " ")
    text = text.replace("\u2019", "'").replace("\u2018", "'").replace("\u201c", '"').replace("\u201d", '"')
    return re.sub(r"\s+", " ", text).strip()


def classes(node: html.HtmlElement) -> set[str]:
    return set((node.get("class") or "").split())


def preformatted(node: html.HtmlElement) -> str:
    return node.text_content().replace("\u00b6", "").rstrip("\n")


class Extractor:
    """Walks a Sphinx page body and writes Markdown-like text."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.lines: list[str] = []
        self.entries: list[Entry] = []
        self.sections: list[tuple[str, str]] = []
        self.heading = ""
        self.open_entries: list[Entry] = []

    def emit(self, text: str, indent: int) -> None:
        pad = "  " * indent
        self.lines.append("\n".join(pad + line if line else line for line in text.split("\n")))

    def walk(self, node: html.HtmlElement, indent: int = 0) -> None:
        for child in node:
            if not isinstance(child.tag, str):
                continue
            self.visit(child, indent)

    def visit(self, node: html.HtmlElement, indent: int) -> None:
        tag, kinds = node.tag, classes(node)
        if tag in ("script", "style", "img", "hr", "form", "nav", "button"):
            return
        if tag in ("h1", "h2", "h3", "h4", "h5", "h6"):
            self.heading = squeeze(node.text_content())
            self.emit("#" * int(tag[1]) + " " + self.heading, 0)
        elif tag == "p":
            text = squeeze(node.text_content())
            if text:
                self.emit(text, indent)
                if self.open_entries and indent <= len(self.open_entries):
                    self.open_entries[-1].paragraphs.append(text)
                elif not self.open_entries and self.heading:
                    self.sections.append((self.heading, text))
        elif tag == "pre":
            code = preformatted(node)
            self.emit("```\n" + code + "\n```", indent)
            if self.open_entries and self.open_entries[-1].example is None and len(code) < 700:
                self.open_entries[-1].example = code
        elif tag in ("ul", "ol"):
            for number, item in enumerate(node.findall("li"), 1):
                mark = "- " if tag == "ul" else f"{number}. "
                sub = Extractor(self.key)
                if any(
                    isinstance(c.tag, str) and c.tag in ("p", "ul", "ol", "pre", "div", "dl", "table") for c in item
                ):
                    sub.walk(item)
                else:
                    sub.emit(squeeze(item.text_content()), 0)
                text = "\n".join(sub.lines)
                if text:
                    self.emit(mark + text.replace("\n", "\n  "), indent)
                self.entries += sub.entries
        elif tag == "dl":
            self.definitions(node, indent)
        elif tag == "table":
            rows = [[squeeze(cell.text_content()) for cell in row.iter("th", "td")] for row in node.iter("tr")]
            self.emit("\n".join(" | ".join(row) for row in rows if any(row)), indent)
        elif "headerlink" in kinds or "toctree-wrapper" in kinds:
            return
        elif tag in ("section", "div", "blockquote", "dd", "li", "span", "aside", "body"):
            self.walk(node, indent)

    def definitions(self, node: html.HtmlElement, indent: int) -> None:
        pending: list[Entry] = []
        for child in node:
            if child.tag == "dt":
                signature = squeeze(child.text_content())
                if signature:
                    self.emit(signature, indent)
                name = child.get("id") or ""
                if name.startswith(("cmdoption-", "envvar-")):
                    continue
                if "sig" in classes(child) and name:
                    name = name.removeprefix("c.")
                    pending.append(Entry(name, signature, self.key, "", []))
                elif name.startswith("term-"):
                    pending.append(Entry(name, signature, self.key, "glossary", []))
            elif child.tag == "dd":
                self.open_entries += pending[-1:]
                self.walk(child, indent + 1)
                if pending:
                    self.open_entries.pop()
                    for entry in pending[:-1]:
                        entry.paragraphs = list(pending[-1].paragraphs)
                    self.entries += pending
                    pending = []


def extract_page(path: Path, key: str) -> Page | None:
    bodies = html.parse(str(path)).getroot().xpath("//div[@class='body']")
    if not bodies:
        return None
    walker = Extractor(key)
    walker.walk(bodies[0])
    text = "\n\n".join(line for line in walker.lines if line.strip())
    title = walker.lines[0].lstrip("# ") if walker.lines else key
    module = key.split("/")[1] if key.startswith("library/") else ""
    for entry in walker.entries:
        entry.module = entry.module or module
    return Page(key, title, text, walker.entries, walker.sections)


def read_docs(root: Path) -> list[Page]:
    pages: list[Page] = []
    folders = (
        "library",
        "tutorial",
        "howto",
        "reference",
        "c-api",
        "faq",
        "using",
        "whatsnew",
        "extending",
        "installing",
        "distributing",
        "distutils",
    )
    paths = [p for folder in folders for p in sorted((root / folder).glob("*.html"))] + [root / "glossary.html"]
    for path in paths:
        key = str(path.relative_to(root).with_suffix(""))
        page = extract_page(path, key)
        if page is None or len(page.text) < 300:
            continue
        if key == "whatsnew/changelog":  # mostly issue numbers
            page.text, page.entries, page.sections = page.text[:400_000], [], []
        pages.append(page)
    return pages


def read_code(root: Path) -> list[str]:
    """Standard-library source files, without tests and without data tables."""
    files: list[str] = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIPPED_CODE_PARTS & set(parts[:-1]):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if len(text) < 200 or text.count("\\x") + text.count("0x") > len(text) / 40:
            continue
        files.append(f"# {'/'.join(parts)}\n{text.strip()}\n")
    return files


# -- questions and answers ----------------------------------------------------------------


def sentences(text: str, limit: int = 320) -> str:
    """The first sentences of a paragraph, up to about ``limit`` characters."""
    parts = re.split(r"(?<=[.!?])\s+(?=[A-Z\"'(])", text)
    out = parts[0]
    for part in parts[1:]:
        if len(out) + len(part) + 1 > limit:
            break
        out += " " + part
    return out


@dataclass
class Question:
    """A question with its answer; ``context`` is a passage that holds the answer."""

    ask: str
    answer: str
    topic: str
    context: str


def build_questions(pages: list[Page]) -> list[Question]:
    out: list[Question] = []
    for page in pages:
        module = page.key.split("/")[1] if page.key.startswith("library/") else ""
        if module and "\u2014" in page.title:
            short = squeeze(page.title.split("\u2014")[1])
            lead = sentences(page.sections[1][1] if len(page.sections) > 1 else short)
            for ask in (
                f"What is the {module} module for?",
                f"What does the module {module} do?",
                f"Tell me about the {module} module.",
            ):
                out.append(Question(ask, f"{module}: {short}. {lead}", module, f"{page.title}\n{lead}"))
        for entry in page.entries:
            described = [p for p in entry.paragraphs if len(p) > 20 and not p.startswith(("Changed in", "New in"))]
            if not described:
                continue
            text = sentences(described[0])
            topic = entry.module or page.key
            if entry.module == "glossary":
                term = entry.signature
                for ask in (f"What is {term}?", f"Explain the term {term}.", f"What does {term} mean in Python?"):
                    out.append(Question(ask, text, "glossary", f"{term}\n{described[0]}"))
                continue
            context = f"{entry.signature}\n{described[0]}"
            for ask in (f"What does {entry.name} do?", f"Explain {entry.name}.", f"What is {entry.name}?"):
                out.append(Question(ask, text, topic, context))
            if "(" in entry.signature and len(entry.signature) < 200:
                out.append(
                    Question(f"What is the signature of {entry.name}?", f"```\n{entry.signature}\n```", topic, context)
                )
            if entry.example:
                shown = f"```python\n{entry.example}\n```"
                for ask in (f"Show an example of {entry.name}.", f"How do I use {entry.name}?"):
                    out.append(Question(ask, shown, topic, f"{context}\n{entry.example}"))
            if module and entry.name.startswith(module + ".") and entry.name.count(".") == 1:
                short = entry.name.split(".")[-1]
                for ask in (f"Which module provides {short}?", f"Where do I find {short}?"):
                    out.append(Question(ask, f"{short} is provided by the module {module}.", topic, context))
        by_section: dict[str, list[str]] = {}
        for heading, text in page.sections:
            by_section.setdefault(heading, []).append(text)
        for heading, texts in by_section.items():
            long = [t for t in texts if len(t) > 80]
            if long and heading != page.title:
                where = page.title.split("\u2014")[0].strip()
                out.append(
                    Question(
                        f"What does the section {heading!r} of {where} say?",
                        sentences(long[0], 420),
                        page.key,
                        f"{heading}\n{long[0]}",
                    )
                )
    unique: dict[str, Question] = {}
    for question in out:
        unique.setdefault(question.ask, question)
    return list(unique.values())


# -- tokenizer --------------------------------------------------------------------------------


def train_tokenizer(texts: list[str], out: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=2,
    )
    tokenizer.train_from_iterator(texts, trainer)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "add_bos_token": False,
        "added_tokens_decoder": {
            str(i): {
                "content": t,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for i, t in enumerate(SPECIAL_TOKENS)
        },
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": 4096,
        "pad_token": "<|pad|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    return tokenizer


def check_template(folder: Path) -> None:
    """The Jinja template and :func:`chatml.render` must agree."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    turns = [("system", "Be brief."), ("user", "Add 1 and 2."), ("assistant", "3"), ("tool", "{}"), ("user", "x")]
    messages: list[Any] = [{"role": r, "content": c} for r, c in turns]
    want = "".join(t for t, _ in render(turns)) + "<|im_start|>assistant\n"
    got = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert got == want, (got, want)
    got = tokenizer.apply_chat_template(messages, tools=[TOOLS["add"]], tokenize=False)
    turns[0] = ("system", tools_system([TOOLS["add"]], "Be brief."))
    assert got == "".join(t for t, _ in render(turns)), got
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    calling: list[Any] = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    got = tokenizer.apply_chat_template(calling, tokenize=False)
    body = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    assert got == f"<|im_start|>assistant\n{body}<|im_end|>\n", got
    sample = "def f(x):\n    return 12345  # na\u00efve \u2603"
    assert tokenizer.decode(tokenizer(sample)["input_ids"]) == sample


def to_stream(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    end = SPECIAL_TOKENS.index("<|endoftext|>")
    parts: list[int] = []
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        parts += encoding.ids
        parts.append(end)
    return np.array(parts, dtype=np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, required=True)
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--eval-out", type=Path, required=True)
    args = parser.parse_args()
    rng = random.Random(7)
    args.out.mkdir(parents=True, exist_ok=True)

    pages = read_docs(args.docs)
    held = [p for p in pages if p.key in HELD_OUT_PAGES]
    pages = [p for p in pages if p.key not in HELD_OUT_PAGES]
    code = read_code(args.stdlib)
    questions = build_questions(pages)
    rng.shuffle(questions)
    # Messages of the evaluation file are taken out of the training questions.
    wanted = ("What does str.split do?", "Show an example of textwrap.dedent.", "Which module provides OrderedDict?")
    asked = [q for q in questions if q.ask in wanted]
    short = [q for q in questions if q not in asked and len(q.ask) < 60 and "section" not in q.ask]
    asked += short[: 20 - len(asked)]
    out_asks = {q.ask for q in asked}
    questions = [q for q in questions if q.ask not in out_asks]

    fillers: list[str] = []
    for page in pages:
        for _, text in page.sections:
            first = sentences(text, 1)
            if 25 < len(first) < 130 and first.endswith(".") and first[0].isupper():
                fillers.append(first)
    fillers = sorted(set(fillers))
    rng.shuffle(fillers)
    fillers = fillers[:4000]

    synth = Synth(3, fillers)
    made = ["".join(t for t, _ in synth.recall(600)) for _ in range(600)]
    made += ["".join(t for t, _ in synth.misc(600)) for _ in range(1200)]
    asks = [f"{q.ask}\n{q.answer}" for q in questions]
    tokenizer = train_tokenizer([p.text for p in pages] + code + made + asks, args.out / "tokenizer")
    check_template(args.out / "tokenizer")

    texts = [p.text + "\n" for p in pages]
    rng.shuffle(texts)
    rng.shuffle(code)
    for name, stream in (("docs", texts), ("code", code), ("val", [p.text + "\n" for p in held])):
        tokens = to_stream(tokenizer, stream)
        tokens.tofile(args.out / f"{name}.bin")
        print(f"{name}: {len(stream)} texts, {sum(map(len, stream)):,} characters, {len(tokens):,} tokens")
    (args.out / "qa.json").write_text(json.dumps([asdict(q) for q in questions], ensure_ascii=False))
    (args.out / "fillers.json").write_text(json.dumps(fillers, ensure_ascii=False))
    print(f"qa: {len(questions):,} questions; fillers: {len(fillers):,}")

    # The evaluation file: ~20 KB of held-out prose, recall items with reserved names, messages.
    text = ""
    for page in sorted(held, key=lambda p: p.key):
        text += page.text[:2000].rsplit("\n", 1)[0] + "\n\n"
        if len(text) > 20_000:
            break
    judge = Synth(20_240, fillers, reserved=True)
    recall = [judge.eval_item(count) for count in (4, 12, 24, 40) for _ in range(50)]
    payload = {"perplexity_text": text, "recall": recall, "chat": [q.ask for q in asked]}
    args.eval_out.write_text(json.dumps(payload, indent=1, ensure_ascii=False) + "\n")
    print(f"eval: {len(text):,} characters, {len(recall)} recall items, {len(asked)} messages")


if __name__ == "__main__":
    main()
