"""Records of the table of what works with what: its inputs, its features and conditions, its rows."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.args.checkpoint import ModelArgs
from quire.config.connectors import node_options, tier_options
from quire.config.engine import CacheConfig, EngineConfig
from quire.contracts.parallel import ALONE, Parallel
from quire.contracts.speculation import Speculation
from quire.kernels.experts_plan import MoEPlan

REFUSED = "refused"  # the options contradict each other, or the model
MISSING = "missing"  # would make sense, and is not implemented yet
IDLE = "no effect"  # an option changes nothing: a note says so
ENGINE, REQUEST, VERIFY, STEPS = "engine", "request", "verify", "verify steps"  # scopes; the last: step by step


class AskedFields(NamedTuple):
    """Fields of a request that rows of scope "request" read.

    chunks   name of the field that names chunks, such as kv_chunks; "": none does
    text     the prompt is a text
    stream   the answer is streamed
    embeds   the prompt is given as embeddings
    repetition   the request has a repetition penalty
    """

    chunks: str = ""
    text: bool = False
    transfer: bool = False
    prompt_logprobs: bool = False
    truncated: bool = False
    stream: bool = False
    embeds: bool = False
    repetition: bool = False


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Inputs of a plan on which rows depend. A row about a fact that is not known yet does not apply.

    args      arguments of the model; None: not known yet
    parallel  sizes of parallelism
    device    "cpu", "cuda" or "mock"
    moe       phase -> plan of the experts, or the reason why there is none; {}: not known yet
    draft     arguments of the draft model or EAGLE head; None: there is none, or not known yet
    request   fields of a request, for rows of scope "request"
    platform  `sys.platform`
    """

    config: EngineConfig = EngineConfig()
    args: ModelArgs | None = None
    parallel: Parallel = ALONE
    device: str = "cpu"
    speculation: Speculation | None = None
    moe: Mapping[str, MoEPlan | str] = field(default_factory=dict)
    draft: ModelArgs | None = None
    request: AskedFields = AskedFields()
    platform: str = sys.platform

    @property
    def model(self) -> ModelArgs:
        """The arguments of the model, for a row that needs them."""
        assert self.args is not None
        return self.args

    @property
    def num_experts(self) -> int:
        """Number of experts of a layer; 0: the model has none, or is not known yet."""
        return self.args.moe.routing.num_experts if self.args is not None and self.args.moe else 0

    @property
    def length(self) -> int:
        """Longest sequence of the engine, in tokens."""
        return self.config.model.max_model_len or self.model.max_position_embeddings

    @property
    def method(self) -> str:
        """Method of speculative decoding; "": there is none."""
        return self.speculation.method if self.speculation else ""

    @property
    def tiers(self) -> CacheConfig:
        """The options of KV tiers, with those that one of vLLM's connectors stands for."""
        return tier_options(self.config.cache)[0]

    @property
    def role(self) -> str:
        """Role among prefill and decode nodes, such as kv_producer; "": none."""
        asked = node_options(self.config.cache)
        return str(asked.get("kv_role")) if asked else ""


@dataclass(frozen=True)
class Feature:
    """A feature of an engine or of a request, or a condition.

    when    predicate of the inputs
    words   name in sentences; may hold names of FACTS in braces
    flag    option as users type it; "": a condition, which no option stands for
    """

    when: Callable[[Inputs], bool]
    words: str
    flag: str = ""


@dataclass(frozen=True)
class Row:
    """The outcome where two features meet, or a feature and a condition. Texts may hold names of FACTS in braces.

    status   REFUSED, MISSING or IDLE
    reason   REFUSED, IDLE: the sentence without its remedy, from the option on; MISSING: the clause behind "because"
    remedy   change that helps; "": the reason says it
    what     MISSING: the thing that is not implemented; "": "FEATURE with OTHER"
    """

    feature: str
    other: str
    status: str
    reason: str
    remedy: str = ""
    what: str = ""
    scope: str = ENGINE
