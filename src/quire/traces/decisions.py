"""Decisions behind the stops of a trace: the value, the reason, and the function that decided.

They are read off the plan of the engine that runs (`/debug/plan`) and off the text side of its model.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from quire.config.engine import EngineConfig, SchedulerConfig
from quire.kernels.select import select
from quire.observe.calls import PACKAGE, Span, place_of
from quire.plan.cache_dtype import choose_cache
from quire.plan.dtype import resolve_dtype
from quire.plan.memory import resolve_memory
from quire.text.chat import ChatTemplate
from quire.text.defaults import load_generation_defaults
from quire.text.load import TextSide
from quire.text.output_styles import choose_styles
from quire.text.tokenizer import Tokenizer

Decisions = Mapping[re.Pattern[str], str]  # of the names of stops -> words


def decisions_of(
    plan: Mapping[str, Any], config: EngineConfig | None = None, text: TextSide | None = None
) -> Decisions:
    """Return the decisions of an engine.

    plan     the engine's plan as JSON, read: what `/debug/plan` answers; {} without a model
    config   None: of another process; nothing is told of it
    text     text side of the model in the process that tokenizes
    """
    told = [*_of_plan(plan)] if plan else []
    told += [*_of_config(plan, config)] if config is not None else []
    told += [*_of_text(config, text)] if config is not None and text is not None else []
    return {re.compile(f"({names})$"): words for names, words in told}


def with_decisions(span: Span, decisions: Decisions) -> Span:
    """Return the tree of a call with the decision of each stop. A decision is told once, at the first of its stops."""
    left = dict(decisions)

    def told(one: Span) -> Span:
        found = [names for names in left if names.match(one.name)]
        words = "; ".join(left.pop(names) for names in found)
        return replace(one, decided=words, inside=[told(inner) for inner in one.inside])

    return told(span)


def _of_text(config: EngineConfig, text: TextSide) -> Iterator[tuple[str, str]]:
    source = "--chat-template" if config.model.chat_template else f"the files of {text.tokenizer_folder.name}"
    yield r"ChatTemplate\.render_here", f"the template of {source}, {place_of(ChatTemplate.load)}"
    yield r"Tokenizer\.encode", f"tokenizer.json of {text.tokenizer_folder.name}, {place_of(Tokenizer.load)}"
    asked = f"--generation-config {config.model.generation_config}"
    yield r"sampling\.sampling_params", f"defaults by {asked}, {place_of(load_generation_defaults)}"
    yield r"tools\.plan_parser", f"{text.styles.why}, {place_of(choose_styles)}"


def _of_config(plan: Mapping[str, Any], config: EngineConfig) -> Iterator[tuple[str, str]]:
    requests = plan["memory"]["sequences"] if plan else config.scheduler.sequences()
    most = f"at most {config.scheduler.token_budget():,} tokens and {requests:,} requests per step"
    yield r"Scheduler\.plan", f"{most}, {place_of(SchedulerConfig.token_budget)}"


def _of_plan(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    memory, model = plan["memory"], plan["model"]
    blocks = f"{memory['num_blocks']:,} blocks of {memory['block_size']} tokens"
    yield r"KVAllocator\.\w+", f"{blocks}, {place_of(resolve_memory)}"
    yield r"layers\.\d+", f"{model['dtype']} ({model['dtype_reason']}), {place_of(resolve_dtype)}"
    yield r"layers\.\d+\.attention", f"KV cache {_cache(memory)} ({memory['cache_reason']}), {place_of(choose_cache)}"
    for kernel in plan["kernels"]:
        modules = "|".join(_modules(kernel["op"], kernel["name"]))
        names = rf"{kernel['op']}\.(?:{modules})\.(?!gather)\w+"  # rows of the embedding need no product
        others = "".join(f"; not {name}: {why}" for name, why in kernel["rejected"])
        yield names, f"{kernel['op']}: {kernel['name']} ({kernel['reason']}{others}), {place_of(select)}"
    phases = {key: one for key, one in (plan["moe"] or {}).items() if isinstance(one, Mapping) and one.get("experts")}
    for chosen in {one["experts"]: one for one in reversed(phases.values())}.values():
        own = [phase for phase, one in phases.items() if one["experts"] == chosen["experts"]]
        pairs = [(pair, why) for *pair, why in chosen["candidates"] if why]
        others = "".join(f"; not {pair[0]} with {pair[1] or 'any kernel'}: {why}" for pair, why in pairs)
        words = f"experts in {' and '.join(own)}: dispatcher {chosen['dispatcher']}, kernel {chosen['experts']}"
        yield (
            rf"experts\.(?:{'|'.join(_modules('experts', chosen['experts']))})\.\w+",
            f"{words} ({chosen['decided']}{others})",
        )


def _modules(operation: str, name: str) -> list[str]:
    """Return the modules with the functions of a kernel: its own, and those that it takes functions from.

    Read off the sources, since this process may have no PyTorch.
    """
    found = [name]
    for one in found:  # the list grows
        file = PACKAGE / "kernels" / operation / f"{one}.py"
        if file.exists():
            taken = re.findall(rf"^from quire\.kernels\.{operation}\.(\w+) import", file.read_text(), re.MULTILINE)
            found += [more for more in dict.fromkeys(taken) if more not in found]
    return found


def _cache(memory: Mapping[str, Any]) -> str:
    return " and ".join(dict.fromkeys(str(dtype) for *_, dtype in memory["components"]))
