"""Decisions behind the stops of a trace: the value, the reason, and the function that decided.

They are read off the plan of the engine that runs (`/debug/plan`) and off the text side of its model.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from quire.config.engine import EngineConfig, SchedulerConfig
from quire.kernels.select import select
from quire.observe.calls import Span, place_of
from quire.plan.cache_dtype import choose_cache
from quire.plan.dtype import resolve_dtype
from quire.plan.memory import resolve_memory
from quire.text.chat import ChatTemplate
from quire.text.defaults import load_generation_defaults
from quire.text.load import TextSide
from quire.text.output_styles import choose_styles
from quire.text.tokenizer import Tokenizer

Decisions = Mapping[re.Pattern[str], str]  # of the names of stops -> words


def decisions_of(plan: Mapping[str, Any], config: EngineConfig, text: TextSide | None = None) -> Decisions:
    """Return the decisions of an engine.

    plan   the engine's plan as JSON, read: what `/debug/plan` answers; {} without a model
    text   text side of the model in the process that tokenizes
    """
    return {re.compile(f"({names})$"): words for names, words in _told(plan, config, text)}


def with_decisions(span: Span, decisions: Decisions) -> Span:
    """Return the tree of a call with the decision of each stop. A decision is told once, at the first of its stops."""
    left = dict(decisions)

    def told(one: Span) -> Span:
        found = [names for names in left if names.match(one.name)]
        words = "; ".join(left.pop(names) for names in found)
        return replace(one, decided=words, inside=[told(inner) for inner in one.inside])

    return told(span)


def _told(plan: Mapping[str, Any], config: EngineConfig, text: TextSide | None) -> Iterator[tuple[str, str]]:
    if text is not None:
        template = config.model.chat_template
        source = "--chat-template" if template else f"the files of {text.tokenizer_folder.name}"
        yield r"ChatTemplate\.render_here", f"the template of {source}, {place_of(ChatTemplate.load)}"
        yield r"Tokenizer\.encode", f"tokenizer.json of {text.tokenizer_folder.name}, {place_of(Tokenizer.load)}"
        asked = f"--generation-config {config.model.generation_config}"
        yield r"sampling\.sampling_params", f"defaults by {asked}, {place_of(load_generation_defaults)}"
        yield r"tools\.plan_parser", f"{text.styles.why}, {place_of(choose_styles)}"
    if not plan:
        return
    memory, model, budget = plan["memory"], plan["model"], config.scheduler.token_budget()
    requests = memory["sequences"]
    yield (
        r"Scheduler\.plan",
        f"at most {budget:,} tokens and {requests:,} requests per step, {place_of(SchedulerConfig.token_budget)}",
    )
    blocks = f"{memory['num_blocks']:,} blocks of {memory['block_size']} tokens"
    yield r"KVAllocator\.\w+", f"{blocks}, {place_of(resolve_memory)}"
    yield r"DeviceState\.apply", f"{model['dtype']} ({model['dtype_reason']}), {place_of(resolve_dtype)}"
    yield r"layers\.\d+\.attention", f"KV cache {_cache(memory)} ({memory['cache_reason']}), {place_of(choose_cache)}"
    for kernel in plan["kernels"]:
        names = rf"{kernel['op']}\.{kernel['name']}\.\w+"
        others = "".join(f"; not {name}: {why}" for name, why in kernel["rejected"])
        yield names, f"{kernel['op']}: {kernel['name']} ({kernel['reason']}{others}), {place_of(select)}"


def _cache(memory: Mapping[str, Any]) -> str:
    return " and ".join(dict.fromkeys(str(dtype) for *_, dtype in memory["components"]))
