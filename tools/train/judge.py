"""Evaluation of a model in training: held-out loss, recall, samples, MTP agreement."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from modeling import Dense, Moe
from synth import Synth

PROSE = ("The module provides", "To create a new", "Return the", "Changed in version 3.8:", "# Introduction\n\n")
CODE = ("import os\n\ndef ", "class Node:\n", "def main():\n", "    def __init__(self, ", "try:\n    import ")


def chat_prompt(user: str) -> str:
    return f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


def recall_prompt(item: dict[str, Any], style: str) -> str:
    """``chat``: notes and question in one user turn; ``plain``: question and answer lines."""
    notes = "\n".join(item["notes"])
    if style == "chat":
        return chat_prompt(f"{notes}\n\n{item['question']}")
    return f"{notes}\n\nQuestion: {item['question']}\nAnswer:"


def is_right(item: dict[str, Any], style: str, text: str) -> bool:
    """Exact answers: the whole sentence (or the value) in chat, the value's line in plain text."""
    if style == "chat":
        return text.split("<|im_end|>")[0].strip() in (item["answer_sentence"], item["answer"], item["answer"] + ".")
    return text.split("\n")[0].strip() == item["answer"]


class Judge:
    def __init__(self, model: Dense | Moe, data: Path, evaluation: dict[str, Any], device: str) -> None:
        self.model, self.device, self.evaluation = model, device, evaluation
        self.tokenizer = Tokenizer.from_file(str(data / "tokenizer" / "tokenizer.json"))
        self.val = np.fromfile(data / "val.bin", dtype=np.uint16).astype(np.int64)
        self.fillers: list[str] = json.loads((data / "fillers.json").read_text())
        self.stops = {self.tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")}

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    @torch.no_grad()
    def generate(self, prompts: list[str], count: int) -> list[str]:
        """Greedy continuations (no cache: the whole batch is run again for every token)."""
        rows = [self.encode(p) for p in prompts]
        starts = [len(r) for r in rows]
        width = max(starts) + count
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
        ids = ids.to(self.device)
        at = torch.tensor(starts, device=self.device)
        every = torch.arange(len(rows), device=self.device)
        finished = torch.zeros(len(rows), dtype=torch.bool, device=self.device)
        stops = torch.tensor(sorted(self.stops), device=self.device)
        head = self.model.head_weight()
        for _ in range(count):
            x, _ = self.model.hidden(ids[:, : int(at.max())])
            logits = torch.nn.functional.linear(x[every, at - 1], head.to(x.dtype))
            token = logits.argmax(-1)
            ids[every, at] = token
            finished |= torch.isin(token, stops)
            at += 1
            if bool(finished.all()):
                break
        return [
            self.tokenizer.decode(ids[i, s : int(at[i])].tolist(), skip_special_tokens=False)
            for i, s in enumerate(starts)
        ]

    @torch.no_grad()
    def val_loss(self, length: int = 1024) -> float:
        """Mean loss per token over the whole held-out stream, in windows of ``length``."""
        total, count = 0.0, 0
        for at in range(0, len(self.val) - 1, length):
            piece = torch.from_numpy(self.val[at : at + length + 1]).to(self.device)[None]
            if piece.shape[1] < 2:
                continue
            logits = self.model.logits(piece[:, :-1])
            total += float(torch.nn.functional.cross_entropy(logits[0], piece[0, 1:], reduction="sum"))
            count += piece.shape[1] - 1
        return total / count

    def recall(self, items: list[dict[str, Any]], style: str) -> float:
        right = 0
        for at in range(0, len(items), 50):
            batch = items[at : at + 50]
            texts = self.generate([recall_prompt(i, style) for i in batch], 24)
            right += sum(is_right(i, style, t) for i, t in zip(batch, texts, strict=True))
        return right / len(items)

    def short(self) -> dict[str, float]:
        self.model.eval()
        maker = Synth(5, self.fillers, reserved=True)
        items = [maker.eval_item(12) for _ in range(50)]
        out = {
            "val_loss": self.val_loss(),
            "recall12_chat": self.recall(items, "chat"),
            "recall12_plain": self.recall(items, "plain"),
        }
        self.model.train()
        return {k: round(v, 4) for k, v in out.items()}

    @torch.no_grad()
    def mtp_agreement(self, texts: list[str]) -> float:
        """Share of positions where the prediction layer's token is the main model's next choice."""
        assert isinstance(self.model, Moe)
        same = count = 0
        for text in texts:
            ids = torch.tensor([self.encode(text)[:1024]], device=self.device)
            if ids.numel() < 4:
                continue
            x, _ = self.model.hidden(ids)
            y, _ = self.model.mtp_hidden(x[:, :-1], ids[:, 1:])
            head = self.model.head_weight()
            main = torch.nn.functional.linear(x, head.to(x.dtype)).argmax(-1)[:, 1:]
            ahead = torch.nn.functional.linear(y, head.to(x.dtype)).argmax(-1)
            same += int((main == ahead).sum())
            count += main.numel()
        return same / count

    @torch.no_grad()
    def loads(self) -> list[Tensor]:
        piece = torch.from_numpy(self.val[:8192]).to(self.device).view(8, 1024)
        _, loads = self.model.hidden(piece)
        return [x.float().cpu() for x in loads if x.numel()]

    def full(self, items: int) -> dict[str, Any]:
        self.model.eval()
        out: dict[str, Any] = {"val_loss": self.val_loss()}
        text = self.encode(self.evaluation["perplexity_text"])
        keep, self.val = self.val, np.array(text, dtype=np.int64)
        out["perplexity_text_loss"] = self.val_loss()
        self.val = keep
        out["perplexity_text_ppl"] = math.exp(out["perplexity_text_loss"])
        maker = Synth(99, self.fillers, reserved=True)
        for style in ("chat", "plain"):
            for count in (4, 12, 24, 40):
                fixed = [i for i in self.evaluation["recall"] if i["n_notes"] == count]
                out[f"recall_{style}_{count}"] = self.recall([maker.eval_item(count) for _ in range(items)], style)
                out[f"recall_{style}_{count}_evaljson"] = self.recall(fixed, style)
        small = Synth(123, self.fillers, reserved=True)
        asks = [
            t for t, _ in (seg for _ in range(12) for seg in small.json_fill()) if t.startswith("<|im_start|>user")
        ][:5]
        prompts = {
            "prose": list(PROSE),
            "code": list(CODE),
            "chat": [chat_prompt(m) for m in self.evaluation["chat"][:5]],
            "recall": [recall_prompt(i, "chat") for i in self.evaluation["recall"][-5:]],
            "json": [a + "<|im_start|>assistant\n" for a in asks],
        }
        out["samples"] = {}
        made: list[str] = []
        for kind, texts in prompts.items():
            ends = self.generate(texts, 90)
            whole = []
            for prompt, end in zip(texts, ends, strict=True):
                for stop in ("<|im_end|>", "<|endoftext|>"):
                    end = end.split(stop)[0]
                whole.append(f"{prompt if len(prompt) < 400 else '...' + prompt[-200:]} >>> {end}")
                made.append(prompt + end)
            out["samples"][kind] = whole
        if isinstance(self.model, Moe):
            out["mtp_agreement_heldout"] = self.mtp_agreement(
                [self.evaluation["perplexity_text"][i * 2000 : i * 2000 + 2000] for i in range(10)]
            )
            out["mtp_agreement_generated"] = self.mtp_agreement(made)
        self.model.train()
        return out
