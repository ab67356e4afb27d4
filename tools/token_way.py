"""Draw a token's way through the files of Quire, from a trace of the bundled model; README.md shows the drawing.

    PYTHONPATH=src python tools/token_way.py
"""

from quire import LLM
from quire.explain.trace import Span, trace

# What a file does on the way, in a few words; a file without an entry is not drawn.
FILES = {
    "entry/llm.py": "LLM.generate: prompts in, outputs out",
    "entry/front_end.py": "text to token ids, and tokens to text as they come",
    "text/sequence.py": "streamed detokenization, stop strings",
    "engine/core.py": "one step of the engine: plan, run, finish",
    "engine/scheduler.py": "chooses requests and tokens: the StepPlan",
    "kv/allocator.py": "KV blocks, prefix cache",
    "procs/launching.py": "the executor: brings the plan to the model runner",
    "worker/runner.py": "the model runner: runs one StepPlan",
    "worker/device_state.py": "block tables, token history, sampling parameters",
    "worker/programs.py": "launches inputs, layers, head and sampling",
    "kernels/step": "token ids, positions, KV slots",
    "layers/embedding.py": "embedding, LM head",
    "layers/stack.py": "the loop over layers",
    "layers/decoder.py": "one decoder layer",
    "layers/attention.py": "QKV, rotation, KV write, attention, output",
    "layers/linear.py": "matrix products, of the kernel that was chosen",
    "kernels/heads": "head norm, rotation, KV write",
    "kernels/attention": "paged attention",
    "layers/mlp.py": "feed-forward",
    "worker/sampler.py": "penalties, masks, temperature, top-k, top-p",
    "kernels/sampling": "draws the tokens",
    "engine/finish.py": "stop tokens, lengths, finished requests",
}


def drawing(root: Span) -> str:
    """The files of a trace as a tree, in the order of their first calls in a step."""
    lines: list[str] = []
    _draw(root, 0, lines, {})
    return "\n".join(lines)


def _draw(span: Span, depth: int, lines: list[str], drawn: dict[str, int]) -> None:
    """Add the lines of a call and of the calls inside; `drawn` has the depth of each file."""
    if span.name == "EngineCore.add":  # the queue: the steps are the way
        return
    file = _file(span.where)
    if file in FILES:
        if file not in drawn:
            drawn[file] = depth
            lines.append(f"{'  ' * depth + file:<36}{FILES[file]}")
        depth = drawn[file] + 1
    for inner in span.inside:
        _draw(inner, depth, lines, drawn)


def _file(where: str) -> str:
    """The file of a stop; the folder of a kernel, whose files differ by machine."""
    parts = where.partition(":")[0].split("/")
    return "/".join(parts[:2]) if parts[0] == "kernels" else "/".join(parts)


def main() -> None:
    """Print the drawing."""
    with LLM(async_depth=1, num_threads=1, use_tqdm_on_load=False, device="cpu") as llm:
        print(drawing(trace(llm, "The json module", max_tokens=2)))


if __name__ == "__main__":
    main()
