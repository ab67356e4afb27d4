"""Training rows: windows of the documentation and packed documents from worker processes.

A row is ``length + 2`` token ids (inputs, next tokens and, for multi-token prediction,
the tokens after those).  Bit 15 of an id marks a token that is not learned.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import queue
import random
from pathlib import Path
from typing import Any

import numpy as np

NOT_LEARNED = 0x8000
ID_MASK = 0x1FFF
# Shares of the characters within packed rows (names and digits take more tokens, so recall
# and misc get somewhat more of the tokens and chat less).
PACKED_SHARES = {"chat": 0.38, "recall": 0.32, "misc": 0.30}


class DocumentMaker:
    """Draws documents of the three packed families in the wanted proportions."""

    def __init__(self, data: Path, seed: int, length: int) -> None:
        from tokenizers import Tokenizer

        from chatml import SPECIAL_TOKENS
        from synth import Synth

        self.tokenizer = Tokenizer.from_file(str(data / "tokenizer" / "tokenizer.json"))
        self.synth = Synth(seed, json.loads((data / "fillers.json").read_text()))
        self.rng = random.Random(seed + 1)
        self.length = length
        questions: list[dict[str, str]] = json.loads((data / "qa.json").read_text())
        topics: dict[str, list[dict[str, str]]] = {}
        for question in questions:
            topics.setdefault(question["topic"], []).append(question)
        self.questions, self.topics = questions, topics
        self.end: int = SPECIAL_TOKENS.index("<|endoftext|>")
        self.pad: int = SPECIAL_TOKENS.index("<|pad|>")
        self.counts = dict.fromkeys(PACKED_SHARES, 1.0)
        self.waiting: list[np.ndarray] = []  # made, not yet packed

    def chat(self) -> list[tuple[str, bool]]:
        """A chat of one to four questions about a topic, half of the time with passages to read."""
        from chatml import render
        from synth import SYSTEMS

        rng = self.rng
        first = rng.choice(self.questions)
        same = self.topics[first["topic"]]
        picked = [first] + [rng.choice(same) for _ in range(rng.choice((0, 0, 1, 2, 3)))]
        turns: list[tuple[str, str]] = []
        if rng.random() < 0.2:
            turns.append(("system", rng.choice(SYSTEMS)))
        ask = first["ask"]
        if rng.random() < 0.45:
            passages = {q["context"] for q in picked}
            passages |= {
                rng.choice(same if rng.random() < 0.5 else self.questions)["context"] for _ in range(rng.randint(0, 4))
            }
            body = list(passages)
            rng.shuffle(body)
            if rng.random() < 0.3:
                body = [f"Document {i + 1}:\n{text}" for i, text in enumerate(body)]
            ask = "\n\n".join(body) + "\n\n" + ask
        for index, question in enumerate(picked):
            turns.append(("user", question["ask"] if index else ask))
            turns.append(("assistant", question["answer"]))
        return render(turns)

    def documents(self, count: int) -> list[np.ndarray]:
        """``count`` tokenized documents, each ended by ``<|endoftext|>``."""
        texts: list[str] = []
        plan: list[tuple[str, list[bool]]] = []
        total = sum(self.counts.values())
        for _ in range(count):
            family = max(PACKED_SHARES, key=lambda f: PACKED_SHARES[f] * total - self.counts[f])
            room = int(self.length * self.rng.choice((0.25, 0.5, 0.7, 0.95)))
            if family == "chat":
                segments = self.chat()
            elif family == "recall":
                segments = self.synth.recall(room)
            else:
                segments = self.synth.misc(room)
            texts += [text for text, _ in segments]
            plan.append((family, [learn for _, learn in segments]))
            self.counts[family] += sum(len(text) for text, _ in segments) / 3.3
            total = sum(self.counts.values())
        encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        out: list[np.ndarray] = []
        at = 0
        for _, learned in plan:
            ids: list[int] = []
            for learn in learned:
                piece = encodings[at].ids
                at += 1
                ids += piece if learn else [i | NOT_LEARNED for i in piece]
            ids.append(self.end)
            out.append(np.array(ids, dtype=np.uint16))
        return out

    def rows(self, count: int) -> np.ndarray:
        """``count`` packed rows; no document is cut at its start, so notes precede their questions."""
        width = self.length + 2
        out = np.full((count, width), self.pad | NOT_LEARNED, dtype=np.uint16)
        waiting = self.waiting
        for row in out:
            at = 0
            while at < width - 24:
                if len(waiting) < 48:
                    waiting += self.documents(48)
                free = width - at
                choice = 0 if at == 0 else next((i for i, d in enumerate(waiting) if len(d) <= free), -1)
                if choice < 0:
                    break
                document = waiting.pop(choice)[:free]
                row[at : at + len(document)] = document
                at += len(document)
        return out


def _work(data: Path, seed: int, length: int, out: Any) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per worker
    maker = DocumentMaker(data, seed, length)
    count = max(4, 65_536 // length)
    while True:
        out.put(maker.rows(count))


class RowStream:
    """Packed rows of one length from worker processes."""

    def __init__(self, data: Path, length: int, workers: int, seed: int) -> None:
        context = mp.get_context("spawn")
        self.queue: Any = context.Queue(maxsize=256)
        self.processes = [
            context.Process(target=_work, args=(data, seed + 1000 * i, length, self.queue), daemon=True)
            for i in range(workers)
        ]
        for process in self.processes:
            process.start()
        self.rows = np.zeros((0, length + 2), dtype=np.uint16)
        self.reused = 0
        self._rng = np.random.default_rng(seed)
        self._kept: list[np.ndarray] = []

    def take(self, count: int) -> np.ndarray:
        """The next ``count`` rows; when the workers lag, earlier rows are shown again."""
        while len(self.rows) < count:
            try:
                chunk = self.queue.get(timeout=0.05 if self._kept else 180)
                self._kept.append(chunk)
                self._kept = self._kept[-200:]
            except queue.Empty:
                chunk = self._kept[int(self._rng.integers(len(self._kept)))]
                self.reused += len(chunk)
            self.rows = np.concatenate([self.rows, chunk])
        out, self.rows = self.rows[:count], self.rows[count:]
        return out

    def close(self) -> None:
        for process in self.processes:
            process.terminate()


class Windows:
    """Random windows of a token stream."""

    def __init__(self, path: Path, seed: int) -> None:
        self.tokens = np.fromfile(path, dtype=np.uint16)
        self.rng = np.random.default_rng(seed)

    def take(self, count: int, length: int) -> np.ndarray:
        starts = self.rng.integers(0, len(self.tokens) - length - 2, size=count)
        return self.tokens[starts[:, None] + np.arange(length + 2)[None, :]]
