"""CacheBlend on the bundled model: eight texts, each cached alone, reused in any order; recall and time by ratio.
Then a chat with marked content parts, as a client of the server would send it.

Two cases. "whole": every text has whole notes, which the model understands one by one. "cut": a border between two
texts goes through the note that the question is about, so neither text has the answer alone. There reuse without
computing anything again (ratio 0) fails, and computing a few tokens again is enough.
"""

import argparse
import random
import time

from quire import LLM, SamplingParams

NAMES = """Tomas Lakral Nils Bob Henrik Gustav Marta Ines Olga Pavel Rosa Sven Tilda Urs Vera Wim Yara Zoe Anton Berta
Clara David Elias Frida Georg Hanna Ivan Jonas Karin Lukas Mira Nadia Oskar Petra Quentin Rita Simon Tereza Ulla
Viktor""".split()
TEXTS, NOTES = 8, 40
RATIOS = (None, 0.0, 0.15, 0.3, 1.0)  # None: every token is computed


def make_case(llm: LLM, cut: bool, seed: int) -> tuple[list[list[int]], list[int], str]:
    """Return eight texts and a question as token ids, and the answer."""
    rng = random.Random(seed)
    notes = [(name, rng.randrange(1000, 10000)) for name in rng.sample(NAMES, NOTES)]
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    lines = [tokenizer.encode(f"The code of {name} is {code}.\n") for name, code in notes]
    asked = rng.randrange(2, NOTES - 2)
    borders = [NOTES * i // TEXTS for i in range(1, TEXTS)]
    ends = [sum(map(len, lines[:border])) for border in borders]
    if cut:
        near = min(range(TEXTS - 1), key=lambda i: abs(borders[i] - asked))
        ends[near] = sum(map(len, lines[:asked])) + len(lines[asked]) // 2
    tokens = [token for line in lines for token in line]
    texts = [tokens[first:last] for first, last in zip([0, *ends], [*ends, len(tokens)], strict=True)]
    name, code = notes[asked]
    question = f"\nWhat is the code of {name}?<|im_end|>\n<|im_start|>assistant\n"
    return texts, tokenizer.encode(question), str(code)


def ask(llm: LLM, texts: list[list[int]], question: list[int], ratio: float | None) -> tuple[str, float, int]:
    """Return the answer, the seconds to its first token, and the tokens of the prompt that were reused."""
    assert llm.engine.tokenizer is not None
    llm.reset_prefix_cache()
    if ratio is not None:
        llm.generate([{"prompt_token_ids": text} for text in texts], SamplingParams(max_tokens=1), use_tqdm=False)
    prompt, chunks = llm.engine.tokenizer.encode("<|im_start|>user\n"), []
    for text in texts:
        chunks.append([len(prompt), len(prompt) + len(text)])
        prompt = prompt + text
    params = SamplingParams(temperature=0.0, max_tokens=24)
    if ratio is not None:
        params = params.clone(kv_chunks=chunks, blend_ratio=ratio)
    asked = time.monotonic()
    (output,) = llm.generate([{"prompt_token_ids": prompt + question}], params, use_tqdm=False)
    assert output.metrics is not None and output.metrics.first_token_time is not None
    return output.outputs[0].text, output.metrics.first_token_time - asked, output.num_cached_tokens or 0


def chat(llm: LLM, order: list[int]) -> tuple[str, int]:
    """Return the answer to a chat over texts in this order, and the tokens of its prompt that were reused."""
    texts = [
        f"The code of {name} is {code}. {name} likes tea and lives in Mumbai."
        for name, code in (("Tomas", 6423), ("Lakral", 5411), ("Nils", 9034))
    ]
    llm.reset_prefix_cache()
    llm.generate(texts, SamplingParams(max_tokens=1), use_tqdm=False)
    parts = [{"type": "text", "text": texts[number], "kv_chunk": True} for number in order]
    question = {"type": "text", "text": "What is the code of Lakral?"}
    messages = [{"role": "user", "content": [*parts, question]}]
    (output,) = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)
    return output.outputs[0].text, output.num_cached_tokens or 0


def main() -> None:
    """Print recall and mean time to the first token, by case and ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=20, help="questions for each case")
    args = parser.parse_args()
    with LLM(enable_cache_blend=True, block_size=8, max_model_len=1024, use_tqdm_on_load=False) as llm:
        for cut in (False, True):
            print("notes cut by a border" if cut else "whole notes")
            cases = [make_case(llm, cut, seed) for seed in range(args.questions)]
            for ratio in RATIOS:
                found = [ask(llm, texts, question, ratio) for texts, question, _ in cases]
                right = sum(code in text for (text, _, _), (_, _, code) in zip(found, cases, strict=True))
                seconds = sum(second for _, second, _ in found) / len(found)
                reused = sum(count for _, _, count in found) // len(found)
                name = "all computed" if ratio is None else f"ratio {ratio:g}"
                print(
                    f"  {name:12}  {right:3} of {len(cases)} right, first token after {1000 * seconds:.0f} ms, "
                    f"{reused} tokens reused"
                )
        print("a chat with marked parts")
        for order in ([0, 1, 2], [2, 1, 0]):
            text, reused = chat(llm, order)
            print(f"  texts in order {order}: {text.strip()!r}, {reused} tokens reused")


if __name__ == "__main__":
    main()
