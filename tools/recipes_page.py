"""The page of recipes, docs/recipes.md: what each bundled configuration needs, by the plans of `quire explain`.

    PYTHONPATH=src python tools/recipes_page.py      writes it

Needs neither weights nor a GPU. A plan does not depend on this machine: its GPU is described, and its memory is known.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quire.config.engine import EngineConfig
from quire.config.flags import server_config, settings_of
from quire.contracts.errors import QuireError
from quire.entry.cli.main import build_parser
from quire.explain.describe import plan_engine

ROOT = Path(__file__).resolve().parents[1]
PAGE, MODELS = ROOT / "docs" / "recipes.md", ROOT / "src" / "quire" / "bench" / "models"
GIB, KIB = 1 << 30, 1 << 10
DEVICES = ("h200", "h100")
HEAD = """\
# Recipes

Made by `PYTHONPATH=src python tools/recipes_page.py` from the plans of `quire explain`, for configurations that are in
the package (`src/quire/bench/models`). Do not edit. A line to start each model, and what it takes.

- **Weights**: of one GPU, in GiB.
- **KV cache**: of one token, in KiB; of all layers that keep every token, on one GPU.
- **Tokens**: of context that fit beside the weights, of all requests together, in thousands, 16,777 at most; `-` where
  the model does not fit with these flags. Weights, activations, CUDA graphs and cache take 92% of the memory
  (`--gpu-memory-utilization`).
- **Longest**: the context for which the model was made, in thousands. One request of this length takes so many tokens.

`quire explain` with the words behind `quire serve`, and `--device h200`, prints the whole plan. With a name of the hub
it downloads files of the model. Without a network name the folder of its configuration:
`quire explain src/quire/bench/models/llama-3.1-8b --device h200` in a clone. Where Quire is installed,
`python -c "import quire.bench; print(*quire.bench.__path__)"` prints the folder in which `models` is. Which released
weights were run by this project, [performance.md](performance.md) says.

| model | GPUs | weights | KV cache | tokens on H200 (141 GB) | on 80 GB (H100, A100) | longest |
|---|---|---|---|---|---|---|
"""
COMMANDS = "\n## Commands\n\n```console\n{}\n```\n"
NOTES = """
- A GPU with less memory: `--max-model-len 16k` bounds a request, `--kv-cache-dtype fp8` halves the cache, `-q fp8` the
  weights of an unquantized model; `-tp 2` divides both by two GPUs. `quire explain` tells what becomes of it.
- Prompts that many requests share, or that come back: [kv.md](kv.md). Fewer milliseconds per token:
  [speculation.md](speculation.md). Many GPUs: [many.md](many.md).
"""


class Recipe(NamedTuple):
    """A model of the page.

    folder   its configuration in the package
    name     its name on the hub
    flags    words behind the name in its command
    made     scheme of `quire quantize` that makes this checkpoint of the model `name`; "": it is published
    """

    folder: str
    name: str
    flags: str = ""
    made: str = ""


RECIPES = (
    Recipe("qwen3-0.6b", "Qwen/Qwen3-0.6B"),
    Recipe("qwen3-8b", "Qwen/Qwen3-8B"),
    Recipe("qwen3-8b-fp8", "Qwen/Qwen3-8B-FP8"),
    Recipe("qwen3-8b-fp8-dynamic", "Qwen/Qwen3-8B", made="fp8-channel"),
    Recipe("qwen3-8b-awq", "Qwen/Qwen3-8B-AWQ"),
    Recipe("qwen3-8b-w8a8-int8", "Qwen/Qwen3-8B", made="w8a8-int8"),
    Recipe("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"),
    Recipe("qwen3-30b-a3b-fp8", "Qwen/Qwen3-30B-A3B-FP8"),
    Recipe("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", "-tp 8"),
    Recipe("qwen3.5-0.8b", "Qwen/Qwen3.5-0.8B"),
    Recipe("qwen3.5-9b", "Qwen/Qwen3.5-9B"),
    Recipe("qwen3.5-35b-a3b", "Qwen/Qwen3.5-35B-A3B"),
    Recipe("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct"),
    Recipe("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct", "-tp 4"),
    Recipe("mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3"),
    Recipe("mixtral-8x7b", "mistralai/Mixtral-8x7B-Instruct-v0.1", "-tp 2"),
    Recipe("gemma-3-1b", "google/gemma-3-1b-it"),
    Recipe("gemma-3-12b", "google/gemma-3-12b-it"),
    Recipe("gpt-oss-20b", "openai/gpt-oss-20b"),
    Recipe("gpt-oss-120b", "openai/gpt-oss-120b"),
    Recipe("deepseek-v2-lite", "deepseek-ai/DeepSeek-V2-Lite-Chat"),
    Recipe("deepseek-v3", "deepseek-ai/DeepSeek-V3-0324", "-tp 8"),
    Recipe("deepseek-v3.2", "deepseek-ai/DeepSeek-V3.2", "-tp 8"),
    Recipe("glm-4.5-air", "zai-org/GLM-4.5-Air", "-tp 4"),
    Recipe("glm-5", "zai-org/GLM-5-FP8", "-tp 8"),
)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(RECIPES))


def page(recipes: Sequence[Recipe]) -> str:
    """Return the page."""
    commands = "\n".join(command(one) for one in recipes)
    return HEAD + "".join(f"{row(one)}\n" for one in recipes) + COMMANDS.format(commands) + NOTES


def command(recipe: Recipe) -> str:
    """Return the line that starts a model."""
    if recipe.made:
        folder = f"{recipe.name.rpartition('/')[2].lower()}-{recipe.made}"
        return f"$ quire quantize {recipe.name} -o {folder} --scheme {recipe.made} && quire serve {folder}"
    return f"$ quire serve {recipe.name} {recipe.flags}".rstrip()


def row(recipe: Recipe) -> str:
    """Return the line of a model in the table."""
    words = shlex.split(f"serve {MODELS / recipe.folder} {recipe.flags}")
    config = server_config(settings_of(build_parser().parse_args(words), server=True)).engine
    plans = [memory_of(config, device) for device in DEVICES]
    first = plans[0]
    assert first is not None, f"{recipe.folder} does not fit: give it more GPUs"
    tokens = (f"{plan['num_tokens'] / 1000:,.0f}" if plan else "-" for plan in plans)
    made = f", by `quire quantize --scheme {recipe.made}`" if recipe.made else ""
    cells = (
        f"[{recipe.name}](https://huggingface.co/{recipe.name}){made}",
        f"{first['ranks']}",
        f"{first['weights'] / GIB:.2f}",
        f"{first['kv_bytes_per_token'] / KIB:.1f}",
        *tokens,
        f"{first['max_model_len'] / 1000:,.0f}",
    )
    return f"| {' | '.join(cells)} |"


def memory_of(config: EngineConfig, device: str) -> dict[str, Any] | None:
    """Return the memory of a GPU by the plan of an engine, and the number of GPUs (`ranks`); None: it does not fit."""
    try:
        plan = plan_engine(config, device).describe()
    except QuireError:
        return None
    if plan["load_error"] or "num_tokens" not in plan["memory"]:
        return None
    memory: dict[str, Any] = plan["memory"]
    return memory | {"ranks": len(plan["ranks"]) or 1}


if __name__ == "__main__":
    main()
