"""Ask the bundled model three questions and stream the answers: the smallest useful program on `LLM`."""

import time

from quire import LLM, OutputKind, SamplingParams

NOTES = """\
Tomas lives in Mumbai.
The code of Tomas is 6423.
The code of Lakral is 5411.
Lakral likes tea.
Lakral lives in Prague."""

FACTS = SamplingParams(temperature=0.0, max_tokens=96, output_kind=OutputKind.DELTA)
PROSE = FACTS.clone(temperature=0.4, top_p=0.9, frequency_penalty=0.3, seed=1)
QUESTIONS = [
    ("recall from notes", f"{NOTES}\n\nWhat is the code of Tomas?", FACTS),
    ("JSON from notes", f'{NOTES}\n\nReturn a JSON object with the keys "name", "code", "city" for Lakral.', FACTS),
    ("a Python module", "What is the json module for?", PROSE),
]


def main() -> None:
    """Print each question, its answer as it comes, and the speed."""
    started = time.perf_counter()
    with LLM() as llm:  # no model named: the one inside the package
        print(f"ready in {time.perf_counter() - started:.1f} s")
        for title, question, params in QUESTIONS:
            print(f"\n--- {title}\n{question}\n>>> ", end="", flush=True)
            num_tokens, first, last = 0, 0.0, 0.0
            asked = time.perf_counter()
            for piece in llm.stream_chat([{"role": "user", "content": question}], params):
                last = time.perf_counter()
                first = first or last
                num_tokens += len(piece.outputs[0].token_ids)
                print(piece.outputs[0].text, end="", flush=True)
            speed = num_tokens / (last - asked)
            print(f"\n    {num_tokens} tokens, {speed:.0f} tokens/s, first after {1000 * (first - asked):.0f} ms")


if __name__ == "__main__":
    main()
