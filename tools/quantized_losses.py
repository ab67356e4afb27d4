"""Loss and recall of the tiny models in every scheme of `quire quantize`, beside the plain model, on this CPU.

    PYTHONPATH=src python tools/quantized_losses.py MODEL... --eval eval.json [--group-size 32]

Loss on the held-out text in windows of 1024, recall of the 200 items in chat form: as the models' cards were measured,
by Quire in float32. Prints rows of Markdown.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.assemble.quantize_checkpoint import Recipe, quantize_checkpoint
from quire.quantization.written_schemes import SCHEMES, has_groups

WINDOW, LENGTH = 1024, 24  # tokens
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "use_tqdm_on_load": False,
    "kv_cache_memory_bytes": 300 << 20,
    "max_num_seqs": 32,
}


def loss(llm: LLM, text: str) -> float:
    """Mean negative log-likelihood of a token, in windows."""
    ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
    windows = [ids[at : at + WINDOW + 1] for at in range(0, len(ids) - 1, WINDOW)]
    outputs = llm.generate(windows, SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)
    scored = [
        row[token].logprob
        for out in outputs
        for token, row in zip(out.prompt_token_ids, out.prompt_logprobs or (), strict=True)
        if row is not None
    ]
    return -sum(scored) / len(scored)


def num_right(llm: LLM, items: list[dict[str, Any]]) -> int:
    """Number of questions about the notes that are answered exactly."""
    prompts = [
        "<|im_start|>user\n" + "\n".join(item["notes"]) + f"\n\n{item['question']}<|im_end|>\n<|im_start|>assistant\n"
        for item in items
    ]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=LENGTH), use_tqdm=False)
    return sum(
        output.outputs[0].text.strip() in (item["answer_sentence"], item["answer"], item["answer"] + ".")
        for item, output in zip(items, outputs, strict=True)
    )


def main() -> None:
    """Print a row for the plain model and for each scheme."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--eval", type=Path, required=True)
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    args = parser.parse_args()
    evaluation = json.loads(args.eval.read_text())
    print("| model | scheme | bytes | largest error of a matrix | loss | more | recall |")
    print("|---|---|---|---|---|---|---|")
    for model in args.models:
        plain = 0.0
        for scheme in ("", *args.schemes):
            with tempfile.TemporaryDirectory() as temporary:
                folder, told = model, "| "
                if scheme:
                    folder = Path(temporary) / "quantized"
                    group = args.group_size if has_groups(scheme) else 0
                    made = quantize_checkpoint(model, folder, Recipe(scheme=scheme, group_size=group))
                    told = f"{made.bytes_after / made.bytes_before:.2f} | {made.error:.1%} "
                with LLM(str(folder), **OPTIONS) as llm:
                    found, right = loss(llm, evaluation["perplexity_text"]), num_right(llm, evaluation["recall"])
            plain = plain or found
            print(
                f"| {model.name} | {scheme or 'plain'} | {told}| {found:.4f} | {found / plain - 1:+.2%} | {right} of "
                f"{len(evaluation['recall'])} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
