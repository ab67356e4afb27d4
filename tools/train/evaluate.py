"""Evaluate a saved checkpoint folder with transformers, on the CPU in fp32.

Usage::

    python evaluate.py --model quire-tiny --eval eval.json --out quire-tiny-eval.json

Measures the loss on the held-out text, recall on all items of the evaluation file (chat
and plain form, greedy, exact answers), prints samples, and for the MoE model measures how
often the prediction layer's token is the main model's own next choice.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from judge import CODE, PROSE, is_right, recall_prompt
from synth import Synth


class Evaluator:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def ids(self, text: str) -> Tensor:
        return self.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    def loss(self, text: str, length: int) -> float:
        ids = self.ids(text)
        total, count = 0.0, 0
        for at in range(0, ids.shape[1] - 1, length):
            piece = ids[:, at : at + length + 1]
            if piece.shape[1] > 1:
                logits = self.model(piece[:, :-1]).logits[0]
                total += float(torch.nn.functional.cross_entropy(logits, piece[0, 1:], reduction="sum"))
                count += piece.shape[1] - 1
        return total / count

    @torch.no_grad()
    def generate(self, prompt: str, count: int) -> str:
        ids = self.ids(prompt)
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        return str(self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=False))

    def chat(self, message: str, count: int = 80) -> str:
        prompt = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
        )
        return self.generate(str(prompt), count).split("<|im_end|>")[0]

    def recall(self, items: list[dict[str, Any]]) -> dict[str, float]:
        out: dict[str, float] = {}
        for style in ("chat", "plain"):
            right: dict[int, list[bool]] = {}
            for item in items:
                text = self.generate(recall_prompt(item, style), 24 if style == "chat" else 12)
                right.setdefault(item["n_notes"], []).append(is_right(item, style, text))
            out |= {f"{style}_{count}": sum(r) / len(r) for count, r in right.items()}
        return out


@torch.no_grad()
def mtp_agreement(folder: Path, tokenizer: Any, texts: list[tuple[str, str]]) -> float:
    """Over (prompt, text) pairs: how often the prediction layer agrees within ``text``."""
    from export import load_hf_state
    from modeling import Moe, MoeConfig

    state: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        state |= load_file(str(shard))
    model = Moe(MoeConfig()).eval()
    load_hf_state(model, state)
    same = count = 0
    for prompt, text in texts:
        start = len(tokenizer(prompt, add_special_tokens=False)["input_ids"]) if prompt else 0
        ids = tokenizer(prompt + text, return_tensors="pt", add_special_tokens=False)["input_ids"][:, :1024]
        hidden, _ = model.hidden(ids)
        ahead, _ = model.mtp_hidden(hidden[:, :-1], ids[:, 1:])
        head = model.head_weight()
        # position i of `ahead` has seen token i+1 and stands against the main choice at i+1
        main = (hidden @ head.T).argmax(-1)[:, 1:]
        hits = (main == (ahead @ head.T).argmax(-1))[0, max(0, start - 2) :]
        same += int(hits.sum())
        count += hits.numel()
    return same / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--eval", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    evaluation = json.loads(args.eval.read_text())
    judge = Evaluator(args.model)
    text = evaluation["perplexity_text"]
    report: dict[str, Any] = {"loss_windows_1024": judge.loss(text, 1024), "loss_windows_4096": judge.loss(text, 4096)}
    report["perplexity_windows_1024"] = math.exp(report["loss_windows_1024"])
    samples: dict[str, list[list[str]]] = {"prose": [], "code": [], "chat": [], "recall": [], "json": [], "tools": []}
    for kind, prompts in (("prose", PROSE), ("code", CODE)):
        samples[kind] = [[p, judge.generate(p, 80)] for p in prompts]
    messages = [*evaluation["chat"], "Hello!", "Who are you?", "Count from 3 to 12.", "Write the alphabet."]
    samples["chat"] = [[m, judge.chat(m)] for m in messages]
    for item in evaluation["recall"][::45]:
        ask = "\n".join(item["notes"]) + "\n\n" + item["question"]
        samples["recall"].append([ask[-200:], judge.chat(ask)])
    maker = Synth(123, reserved=True)
    for _ in range(5):
        name = maker.name()
        notes = [maker.note(name, kind) for kind in ("code", "lives", "job")] + maker.notes(4)
        maker.rng.shuffle(notes)
        body = "\n".join(n.text for n in notes)
        ask = f'{body}\n\nReturn a JSON object with the keys "name", "code", "city" for {name}.'
        samples["json"].append([ask, judge.chat(ask)])
    report["samples"] = samples
    if (args.model / "config.json").read_text().find("num_nextn_predict_layers") >= 0:
        held = [("", text[i : i + 2500]) for i in range(0, len(text) - 2500, 2500)]
        report["mtp_agreement_heldout"] = mtp_agreement(args.model, judge.tokenizer, held)
        for kind in ("prose", "code"):
            pairs = [(p, t) for p, t in samples[kind]]
            report[f"mtp_agreement_generated_{kind}"] = mtp_agreement(args.model, judge.tokenizer, pairs)
        for kind in ("chat", "json"):
            pairs = [
                (f"<|im_start|>user\n{a}<|im_end|>\n<|im_start|>assistant\n", b + "<|im_end|>")
                for a, b in samples[kind]
            ]
            report[f"mtp_agreement_generated_{kind}"] = mtp_agreement(args.model, judge.tokenizer, pairs)
    args.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    report["recall"] = judge.recall(evaluation["recall"])
    args.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k != "samples"}, indent=1))


if __name__ == "__main__":
    main()
