"""The pages of what works together, docs/meetings.md and the matrix in the READMEs, from the table; no torch.

PYTHONPATH=src python tools/meetings_page.py       writes them
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.args.checkpoint import ModelArgs, parse_checkpoint_config
from quire.config.engine import EngineConfig
from quire.plan.meeting_rows.features import FEATURES
from quire.plan.meeting_rows.records import ENGINE, IDLE, MISSING, REFUSED, REQUEST, STEPS, VERIFY, Inputs, Row
from quire.plan.meeting_rows.rows import ROWS
from quire.plan.meetings import inputs_of, rows_of

ROOT = Path(__file__).parents[1]
ZH = {  # features whose Chinese name is another
    "hosts": "多台主机", "n-grams": "n-gram", "draft model": "草稿模型", "prompt embeddings": "prompt embedding",
    "host memory": "KV 放在主机内存", "disk": "KV 放在磁盘", "sharing": "KV 共享", "peers": "对等引擎的 KV",
    "adapters": "适配器", "batch invariance": "batch 不变性", "weights in host memory": "权重放在主机内存",
    "KV events": "KV 事件",
}  # fmt: skip
READMES: dict[str, dict[str, str]] = {"README.md": {}, "README.zh-CN.md": ZH}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip
MODEL: dict[str, Any] = {
    **SMALL, "model_type": "glm4_moe", "num_hidden_layers": 6, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5,
}  # fmt: skip
DRAFT = SMALL | {"model_type": "qwen3", "num_hidden_layers": 2}
HEAD = SMALL | {"model_type": "llama", "num_hidden_layers": 1, "draft_vocab_size": 96}
HEAD["architectures"] = ["LlamaForCausalLMEagle3"]
# Feature -> options that turn it on for MODEL. Those up to "KV events" are rows and columns of the matrix.
EXAMPLES: dict[str, dict[str, Any]] = {
    "-tp": {"tensor_parallel_size": 2},
    "-pp": {"pipeline_parallel_size": 2},
    "-dp": {"data_parallel_size": 2},
    "-ep": {"enable_expert_parallel": True, "tensor_parallel_size": 2},
    "EPLB": {"enable_eplb": True, "enable_expert_parallel": True, "tensor_parallel_size": 2},
    "hosts": {"nnodes": 2, "pipeline_parallel_size": 2},
    "Ray": {"distributed_executor_backend": "ray", "pipeline_parallel_size": 2},
    "n-grams": {"speculative_config": NGRAM},
    "MTP": {"speculative_config": NGRAM | {"method": "mtp"}},
    "draft model": {"speculative_config": NGRAM | {"method": "draft_model", "model": "DRAFT"}},
    "EAGLE": {"speculative_config": NGRAM | {"method": "eagle3", "model": "HEAD"}},
    "CacheBlend": {"enable_cache_blend": True},
    "prompt embeddings": {"enable_prompt_embeds": True},
    "host memory": {"kv_offload_gb": 1.0},
    "disk": {"kv_offload_gb": 1.0, "kv_offload_dir": "kv"},
    "sharing": {"kv_offload_gb": 1.0, "kv_share": ":5700"},
    "peers": {"kv_offload_gb": 1.0, "kv_peers": ("a:1",)},
    "adapters": {"enable_lora": True},
    "batch invariance": {"batch_invariant": True},
    "weights in host memory": {"cpu_offload_gb": 4.0},
    "KV events": {"kv_events_config": {"enable_kv_cache_events": True}},
    "no prefix cache": {"enable_prefix_caching": False},
    "round robin": {
        "expert_placement_strategy": "round_robin", "enable_expert_parallel": True, "tensor_parallel_size": 2
    },
    "routing": {"routing": "uniform", "load_format": "dummy"},
    "sleep": {"enable_sleep_mode": True},
    "new weights": {"weight_transfer_config": {"backend": "files"}},
    "restarts": {"restart": 3},
    "collective checks": {"check_collectives": True, "enforce_eager": True, "tensor_parallel_size": 2},
}  # fmt: skip
LAST = "KV events"
MARKS = {"": "+", MISSING: "o", REFUSED: "x"}
BEGIN, END = "<!-- matrix of tools/meetings_page.py -->\n", "<!-- end of the matrix -->\n"


def arguments(options: dict[str, Any]) -> tuple[ModelArgs, ModelArgs | None]:
    """Return the arguments of MODEL with the layers that draft, and those of the draft model or EAGLE head."""
    from quire.plan.drafts import with_draft_layers

    given = options.get("speculative_config") or {}
    drafter = {"DRAFT": (DRAFT, ""), "HEAD": (HEAD, "eagle3")}.get(str(given.get("model")))
    args = with_draft_layers(parse_checkpoint_config(MODEL), given)
    return args, None if drafter is None else parse_checkpoint_config(drafter[0], head=drafter[1])


def together(names: Sequence[str]) -> dict[str, Any] | None:
    """Return the options that turn these features on; None for features that are values of the same option."""
    options: dict[str, Any] = {}
    for name in names:
        for key, value in EXAMPLES[name].items():
            if options.setdefault(key, value) != value:
                return None
    return options


def example(options: dict[str, Any], device: str = "cuda") -> Inputs:
    """Return the inputs of MODEL with these options."""
    args, draft = arguments(options)
    return inputs_of(EngineConfig.from_flat(**options), args, device, draft=draft)


def mark(one: str, other: str) -> str:
    """Return the cell of two features: "+" works, "o" not implemented yet, "x" refused, "" never together."""
    options = together((one, other))
    if options is None:
        return ""
    found = {row.status for row in rows_of(example(options))}
    return MARKS[REFUSED if REFUSED in found else MISSING if MISSING in found else ""]


def matrix(words: Mapping[str, str]) -> str:
    """Return the table of pairs as Markdown: below the diagonal. words: names of features in another language"""
    names = list(EXAMPLES)[: list(EXAMPLES).index(LAST) + 1]
    lines = ["| | " + " | ".join(f"{number}" for number in range(1, len(names))) + " |"]
    lines.append("|---" * len(names) + "|")
    for number, name in enumerate(names):
        cells = [mark(other, name) for other in names[:number]] + [""] * (len(names) - 1 - number)
        flag = FEATURES[name].flag
        label = name if flag.startswith(name) else f"{words.get(name, name)} `{flag}`"
        lines.append(f"| {number + 1} {label} | {' | '.join(cells[: len(names) - 1])} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return docs/meetings.md."""
    return "\n".join(_page()) + "\n"


def _page() -> Iterator[str]:
    yield "# What works with what\n"
    yield (
        "`PYTHONPATH=src python tools/meetings_page.py` writes this page and the matrix of [README.md](../README.md)\n"
        "from the table of the package, `plan/meetings.py`. A name in braces stands for a value of the engine. `quire\n"
        "explain MODEL` with the flags of `quire serve` lists all rows that apply ([explain.md](explain.md)).\n"
    )
    engine = [row for row in ROWS if row.scope == ENGINE]
    for status, title, words in (
        (MISSING, "Not implemented yet", "These would make sense. `quire explain` plans them, `quire serve` refuses."),
        (REFUSED, "Refused", "These contradict each other, or the model."),
        (IDLE, "Without effect", "A note says so."),
    ):
        yield from _section(title, words, [row for row in engine if row.status == status])
    words = "A request with both is answered with 400."
    yield from _section("Fields of a request", words, [row for row in ROWS if row.scope == REQUEST])
    words = "The command refuses these, and works with all other options of an engine ([verify.md](verify.md))."
    yield from _section("`quire verify`", words, [row for row in ROWS if row.scope in (VERIFY, STEPS)])


def _section(title: str, words: str, rows: Sequence[Row]) -> Iterator[str]:
    yield f"## {title}\n\n{words}\n\n| | with | reason | remedy |\n|---|---|---|---|"
    for row in rows:
        one, other = FEATURES[row.feature], FEATURES[row.other]
        cells = (_name(one.words, one.flag), _name(other.words, other.flag), row.reason, row.remedy)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def _name(words: str, flag: str) -> str:
    return words if not flag or flag in words or words == flag else f"{words} (`{flag}`)"


def readme(text: str, words: Mapping[str, str]) -> str:
    """Return a README with the matrix of today."""
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}{matrix(words)}{END}", text, flags=re.DOTALL)


if __name__ == "__main__":
    (ROOT / "docs" / "meetings.md").write_text(page().rstrip() + "\n")
    for name, words in READMES.items():
        (ROOT / name).write_text(readme((ROOT / name).read_text(), words))
