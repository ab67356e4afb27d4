"""Reader of the mixture of experts (MoE) in config.json: the routing of tokens, and the experts.

The family decides the order of routing operations, because files written by transformers leave out `scoring_func`,
`topk_method` and `moe_layer_freq`. Where these keys are present, they must agree with the family. No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.args.keys import Keys


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Routing of a token: `top_k` experts and their weights, computed in float32.

    logits   = x @ router, plus the router's bias when `logit_bias`
    scores   = softmax or sigmoid of the logits (`scoring`)
    chosen   = scores + correction, when `correction`: it changes the choice of experts, never their weights.
               The logits, when `by_logits`
    groups   : the `top_groups` best of `num_groups` equal groups stay (`group_score`: the group's largest chosen
               score, or the sum of its two largest); experts of other groups get -inf. Skipped with one group.
    ids      = top_k of chosen, best first; of equal scores the expert with the lower number
    weights  = scores[ids]; divided by their sum when `normalize` (plus `normalize_eps`); times `scaling`; times the
               chosen experts' own scales when `expert_scale`
    """

    num_experts: int
    top_k: int
    scoring: str  # softmax | sigmoid
    logit_bias: bool = False
    correction: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "max"  # max | top2
    normalize: bool = False
    normalize_eps: float = 0.0
    scaling: float = 1.0
    expert_scale: bool = False

    @property
    def by_logits(self) -> bool:
        """True: experts are chosen by their logits, since float32 rounds the sigmoid of all logits above 17 to 1."""
        return self.scoring == "sigmoid" and not self.correction and self.num_groups == 1


class MoEArgs(msgspec.Struct, frozen=True, kw_only=True, tag="experts"):
    """Sizes of a mixture of experts.

    expert_size, shared_size   widths of the hidden layer of one expert, and of all shared experts together (0: none)
    shared_gate    the shared experts' output is multiplied by sigmoid(x @ gate) (Qwen2-MoE)
    router_float   True: router logits stay in float32; False: they are rounded to the model's dtype first
    act, biased    activation between an expert's projections (`quire.kernels.activation`); True: both add a bias
    router_eps     epsilon of the router's own norm: it reads h / rms(h) * scale / sqrt(hidden size), where h is the
                   residual stream (Gemma 4); 0: it reads what the experts read
    weigh_inputs   True: the weight of a token's one expert multiplies the input, not the output (Llama 4)
    stored         form in which the checkpoint stores the experts: "each", or a key of `names.STACKED_FORMS` of models/
    """

    routing: Routing
    expert_size: int
    shared_size: int
    shared_gate: bool
    router_float: bool
    act: str = "silu"
    biased: bool = False
    router_eps: float = 0.0
    weigh_inputs: bool = False
    stored: str = "each"


MOST_EXPERTS = 100_000  # in all layers together, four times those of the largest models; a plan of more takes seconds
QWEN_KEYS = frozenset(
    "num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob "
    "decoder_sparse_step mlp_only_layers".split()
)
DEEPSEEK_KEYS = frozenset(
    "n_routed_experts num_local_experts num_experts_per_tok moe_intermediate_size n_shared_experts n_group topk_group "
    "norm_topk_prob routed_scaling_factor first_k_dense_replace moe_layer_freq mlp_layer_types scoring_func "
    "topk_method".split()
)
SCALINGS = {
    "deepseek_v3": 2.5,
    "glm4_moe_lite": 1.8,
    "glm_moe_dsa": 2.5,
    "kimi_linear": 2.446,
}  # routed_scaling_factor; others: 1
FIRST_DENSE = {
    "deepseek_v3": 3,
    "glm4_moe": 1,
    "glm4_moe_lite": 1,
    "glm_moe_dsa": 3,
    "kimi_linear": 1,
}  # first_k_dense_replace; others: 0
# Keys that each kind of experts reads (`Family.experts`); router_*, aux_* and ep_size matter only in training.
KIMI = {  # key of DeepSeek's experts -> that of Kimi-Linear
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "scoring_func": "moe_router_activation_func",
}
MOE_KEYS: Mapping[str, frozenset[str]] = {
    "mixtral": frozenset({"num_local_experts", "num_experts_per_tok"}),
    "qwen2_moe": QWEN_KEYS | {"shared_expert_intermediate_size"},
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe"), QWEN_KEYS | {"shared_expert_intermediate_size"}),
    **dict.fromkeys(("qwen3_moe", "qwen3_vl_moe"), QWEN_KEYS),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"), DEEPSEEK_KEYS),
    "kimi_linear": DEEPSEEK_KEYS.union(KIMI.values(), ("use_grouped_topk",)),
    "llama4": frozenset("num_local_experts num_experts_per_tok interleave_moe_layer_step moe_layers".split()),
    "gpt_oss": frozenset(
        "num_experts num_local_experts num_experts_per_tok experts_per_token swiglu_limit swiglu_alpha".split()
    ),
    "granitemoehybrid": frozenset({"num_local_experts", "num_experts_per_tok"}),
    "nemotron_h": DEEPSEEK_KEYS | {"moe_shared_expert_intermediate_size", "moe_latent_size"},
    "lfm2_moe": frozenset(
        "num_experts num_experts_per_tok moe_intermediate_size num_dense_layers use_expert_bias norm_topk_prob "
        "routed_scaling_factor".split()
    ),
    "gemma4": frozenset("enable_moe_block num_experts top_k_experts moe_intermediate_size".split()),
    "minimax_m2": frozenset(
        "num_experts num_local_experts num_experts_per_tok scoring_func use_routing_bias shared_intermediate_size "
        "use_qk_norm qk_norm_type attn_type_list".split()
    ),
}


def has_experts(keys: Keys, kind: str) -> bool:
    """Return False for a model without experts of a family that has models with and without. kind: as in `read_moe`."""
    if kind == "nemotron_h":
        return "moe" in keys.names("layer_types")
    return kind != "granitemoehybrid" or bool(keys.count("num_local_experts", 8))


def read_moe(keys: Keys, kind: str, num_layers: int) -> tuple[MoEArgs, frozenset[int]]:
    """Return the experts that config.json describes, and the numbers of the layers that have them.

    kind   see `Family.experts`
    Raises ModelError or UnsupportedModel.
    """
    read_family = {
        "mixtral": _read_mixtral,
        "qwen2_moe": _read_qwen,
        "qwen3_moe": _read_qwen,
        "qwen3_next": _read_qwen,
        "qwen3_5_moe": _read_qwen,
        "qwen3_vl_moe": _read_qwen,
        "gpt_oss": _read_gpt_oss,
        "llama4": _read_llama4,
        "minimax_m2": _read_minimax,
        "gemma4": _read_gemma4,
        "lfm2_moe": _read_lfm2,
        "granitemoehybrid": _read_granite,
        "nemotron_h": _read_nemotron,
        "kimi_linear": _read_kimi,
    }
    moe, layers = read_family.get(kind, _read_deepseek)(keys, kind, num_layers)
    every = len(layers) * moe.routing.num_experts
    if every > MOST_EXPERTS:
        raise keys.wrong(
            f"num_hidden_layers={num_layers}, {len(layers)} of them with {moe.routing.num_experts} experts each: "
            f"{every} experts in all, more than {MOST_EXPERTS}: correct the file."
        )
    return moe, layers


def _read_mixtral(keys: Keys, kind: str, num_layers: int) -> tuple[MoEArgs, frozenset[int]]:
    routing = _routing(keys, "num_local_experts", scoring="softmax", normalize=True)
    size = keys.size("intermediate_size")
    moe = MoEArgs(routing=routing, expert_size=size, shared_size=0, shared_gate=False, router_float=False)
    return moe, frozenset(range(num_layers))


def _read_qwen(keys: Keys, kind: str, num_layers: int) -> tuple[MoEArgs, frozenset[int]]:
    every = keys.size("decoder_sparse_step", 1)
    dense = (
        keys.checked(
            "mlp_only_layers",
            lambda value: value is None or (isinstance(value, list) and all(type(layer) is int for layer in value)),
            "a list of layers",
        )
        or ()
    )
    experts = "num_local_experts" if "num_local_experts" in keys and "num_experts" not in keys else "num_experts"
    shared, stored = kind in ("qwen2_moe", "qwen3_next", "qwen3_5_moe"), "each"
    if not keys.object("quantization_config"):  # quantized files store each expert by itself
        stored = {"qwen3_vl_moe": "columns", "qwen3_5_moe": "rows"}.get(kind, "each")
    normalized = kind in ("qwen3_vl_moe", "qwen3_next", "qwen3_5_moe")
    moe = MoEArgs(
        routing=_routing(keys, experts, scoring="softmax", normalize=keys.flag("norm_topk_prob", normalized)),
        expert_size=keys.size("moe_intermediate_size"),
        shared_size=keys.size("shared_expert_intermediate_size") if shared else 0,
        shared_gate=shared,
        router_float=False,
        stored=stored,  # unless the names of stored tensors tell otherwise
    )
    return moe, frozenset(i for i in range(num_layers) if (i + 1) % every == 0 and i not in dense)


def _read_gpt_oss(keys: Keys, kind: str, num_layers: int) -> tuple[MoEArgs, frozenset[int]]:
    """Softmax over the chosen logits is softmax over all, renormalized."""
    spelled = {"experts_per_token": "num_experts_per_tok", "num_experts": "num_local_experts"}
    for own, known in spelled.items():
        if keys.get(own) is not None and keys.get(known, keys[own]) != keys[own]:
            raise keys.wrong(f"{own}={keys[own]!r} contradicts {known}={keys[known]!r}: correct the file.")
    keys = Keys({**{known: keys[own] for own, known in spelled.items() if own in keys}, **keys}, keys.source)
    for key, value in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if keys.positive(key, value) != value:
            raise keys.unsupported(f"{key}={keys[key]!r} is not implemented (only {value}): use another model.")
    quantized = (keys.object("quantization_config") or {}).get("quant_method") == "mxfp4"
    moe = MoEArgs(
        routing=_routing(keys, "num_local_experts", scoring="softmax", normalize=True, logit_bias=True),
        expert_size=keys.size("intermediate_size"),
        shared_size=0,
        shared_gate=False,
        router_float=False,
        act="swiglu_oai",
        biased=True,
        stored="paired blocks" if quantized else "paired columns",  # unless the names of stored tensors tell otherwise
    )
    return moe, frozenset(range(num_layers))


def _read_llama4(keys: Keys, kind: str, num_layers: int) -> tuple[MoEArgs, frozenset[int]]:
    """The shared expert is as wide as the others. Experts stand in each `interleave_moe_layer_step`-th layer."""
    keys = Keys({"num_local_experts": 16, "num_experts_per_tok": 1, **keys}, keys.source)
    _agrees(keys, "num_experts_per_tok", (1,))
    width, every = keys.size("intermediate_size"), keys.size("interleave_moe_layer_step", 1)
    named = keys.checked(
        "moe_layers",
        lambda value: value is None or (isinstance(value, list) and all(type(layer) is int for layer in value)),
        "a list of layers, or null",
    )
    layers = range(every - 1, num_layers, every) if named is None else {i for i in named if 0 <= i < num_layers}
    moe = MoEArgs(
        routing=_routing(keys, "num_local_experts", scoring="sigmoid"),
        expert_size=width,
        shared_size=width,
        shared_gate=False,
        router_float=False,
        weigh_inputs=True,
        # Unless the names of stored tensors tell otherwise; quantized files store each expert by itself.
        stored="each" if keys.object("quantization_config") else "columns",
    )
    return moe, frozenset(layers)


def _read_gemma4(keys: Keys, kind: str, num_layers: int) -> tuple[MoEArgs, frozenset[int]]:
    spelled = Keys({**keys, "num_experts_per_tok": keys.size("top_k_experts")}, keys.source)
    moe = MoEArgs(
        routing=_routing(spelled, "num_experts", scoring="softmax", normalize=True, expert_scale=True),
        expert_size=keys.size("moe_intermediate_size"),
        shared_size=0,
        shared_gate=False,
        router_float=False,
        router_eps=keys.positive("rms_norm_eps", 1e-6),
        stored="each" if keys.get("quantization_config") else "rows",
    )
    return moe, frozenset(range(num_layers))


def _read_nemotron(keys: Keys, kind: str, num_layers: int) -> tuple[MoEArgs, frozenset[int]]:
    """Experts without gates, routed as DeepSeek-V3's. The shared one has a width of its own."""
    if keys.get("moe_latent_size") is not None:
        raise keys.unsupported(f"moe_latent_size={keys['moe_latent_size']} is not implemented: use a model without.")
    if keys.flag("mlp_bias"):
        raise keys.unsupported("mlp_bias=true beside experts is not implemented: use a model without.")
    _agrees(keys, "n_shared_experts", (1,))
    routing = _routing(
        keys,
        "n_routed_experts",
        scoring="sigmoid",
        normalize=keys.flag("norm_topk_prob", True),
        normalize_eps=1e-20,
        correction=True,
        group_score="top2",
        num_groups=keys.size("n_group", 1),
        top_groups=keys.size("topk_group", 1),
        scaling=keys.positive("routed_scaling_factor", 1.0),
    )
    moe = MoEArgs(
        routing=routing,
        expert_size=keys.size("moe_intermediate_size", 7688),
        shared_size=keys.size("moe_shared_expert_intermediate_size", 7688),
        shared_gate=False,
        router_float=True,
        act="relu2",
    )
    return moe, frozenset(i for i, word in enumerate(keys.names("layer_types")) if word == "moe")


def _read_granite(keys: Keys, kind: str, num_layers: int) -> tuple[MoEArgs, frozenset[int]]:
    """Softmax over the chosen logits is softmax over all, renormalized. No experts: the shared MLP stands alone."""
    moe = MoEArgs(
        routing=_routing(keys, "num_local_experts", scoring="softmax", normalize=True),
        expert_size=keys.size("intermediate_size"),
        shared_size=keys.size("shared_intermediate_size"),
        shared_gate=False,
        router_float=False,
        stored="rows",
    )
    return moe, frozenset(range(num_layers))


def _read_lfm2(keys: Keys, kind: str, num_layers: int) -> tuple[MoEArgs, frozenset[int]]:
    """The first num_dense_layers have a gated MLP, of the width intermediate_size."""
    routing = _routing(
        keys,
        "num_experts",
        scoring="sigmoid",
        correction=keys.flag("use_expert_bias", True),
        normalize=keys.flag("norm_topk_prob", True),
        normalize_eps=1e-6,
        scaling=keys.positive("routed_scaling_factor", 1.0),
    )
    width, dense = keys.size("moe_intermediate_size"), keys.count("num_dense_layers", 2, most=num_layers) or 0
    moe = MoEArgs(routing=routing, expert_size=width, shared_size=0, shared_gate=False, router_float=False)
    return moe, frozenset(range(dense, num_layers))


def _read_minimax(keys: Keys, kind: str, num_layers: int) -> tuple[MoEArgs, frozenset[int]]:
    """Keys that published files share with MiniMax-01 must have the values of M2."""
    for key, value in (("use_routing_bias", True), ("use_qk_norm", True), ("shared_intermediate_size", 0)):
        _agrees(keys, key, (value,))
    _agrees(keys, "qk_norm_type", ("per_layer",))
    keys.checked(
        "attn_type_list",
        lambda value: value is None or (isinstance(value, list) and all(one == 1 for one in value)),
        "a list of ones, for full attention in every layer",
    )
    scoring = _agrees(keys, "scoring_func", ("sigmoid",))
    moe = MoEArgs(
        routing=_routing(keys, "num_local_experts", scoring=scoring, normalize=True, correction=True),
        expert_size=keys.size("intermediate_size"),
        shared_size=0,
        shared_gate=False,
        router_float=False,
    )
    return moe, frozenset(range(num_layers))


def _read_deepseek(keys: Keys, kind: str, num_layers: int) -> tuple[MoEArgs, frozenset[int]]:
    old = kind == "deepseek_v2"
    methods = ("greedy", "group_limited_greedy") if old else ("noaux_tc",)
    method = _agrees(keys, "topk_method", methods)
    scoring = _agrees(keys, "scoring_func", ("softmax",) if old else ("sigmoid",))
    normalize = keys.flag("norm_topk_prob", not old)
    if old and normalize:
        raise keys.unsupported(
            "norm_topk_prob=true in a deepseek_v2 model is not implemented: published "
            "implementations disagree on what it means. Use another model."
        )
    groups = method != "greedy"
    num_groups = _groups(keys, "n_group", 8 if kind == "deepseek_v3" else 1)
    top_groups = _groups(keys, "topk_group", 4 if kind == "deepseek_v3" else 1)
    routing = _routing(
        keys,
        "n_routed_experts",
        scoring=scoring,
        normalize=normalize,
        normalize_eps=0.0 if old else 1e-20,
        correction=not old,
        group_score="max" if old else "top2",
        num_groups=num_groups if groups else 1,
        top_groups=top_groups if groups else 1,
        scaling=keys.positive("routed_scaling_factor", SCALINGS.get(kind, 1.0)),
    )
    width, shared = keys.size("moe_intermediate_size"), keys.count("n_shared_experts", 2 if old else 1)
    moe = MoEArgs(
        routing=routing,
        expert_size=width,
        shared_size=width * (shared or 0),
        shared_gate=False,
        router_float=True,
    )
    return moe, _sparse_layers(keys, kind, num_layers)


def _read_kimi(keys: Keys, kind: str, num_layers: int) -> tuple[MoEArgs, frozenset[int]]:
    """Experts of DeepSeek-V3 under other keys."""
    if (scoring := keys.get("moe_router_activation_func")) not in (None, "sigmoid"):
        raise keys.unsupported(f"moe_router_activation_func={scoring!r} is not implemented: use a model with sigmoid.")
    own = {known: keys[theirs] for known, theirs in KIMI.items() if theirs in keys}
    if "num_local_experts" in keys:
        own.setdefault("n_routed_experts", keys["num_local_experts"])
    return _read_deepseek(Keys({**keys, **own}, keys.source), kind, num_layers)


def _groups(keys: Keys, key: str, default: int) -> int:
    """Return a number of groups. DeepSeek-V2 writes null when there are no groups; null gives 1."""
    return 1 if keys.get(key, default) is None else keys.size(key, default)


def _sparse_layers(keys: Keys, kind: str, num_layers: int) -> frozenset[int]:
    kinds = keys.names("mlp_layer_types")
    named = frozenset(i for i, kind in enumerate(kinds[:num_layers]) if kind == "sparse")
    if kinds and (len(kinds) < num_layers or set(kinds) - {"dense", "sparse"}):
        raise keys.wrong(f"mlp_layer_types must name {num_layers} layers, each dense or sparse.")
    if kinds and keys.get("first_k_dense_replace") is None:
        return named
    dense = keys.count("first_k_dense_replace", FIRST_DENSE.get(kind, 0)) or 0
    every = keys.size("moe_layer_freq", 1)
    counted = frozenset(i for i in range(dense, num_layers) if i % every == 0)
    if kinds and counted != named:
        i = min(counted ^ named)
        raise keys.wrong(
            f"mlp_layer_types[{i}]={kinds[i]!r} contradicts first_k_dense_replace={dense} and "
            f"moe_layer_freq={every}: remove the one that is wrong."
        )
    return counted


def _agrees(keys: Keys, key: str, known: tuple[Any, ...]) -> str:
    value = known[0] if keys.get(key) is None else keys[key]
    if value not in known:
        raise keys.unsupported(
            f"{key}={value!r} is not implemented for {keys.get('model_type')} "
            f"(only {', '.join(map(str, known))}): use another model."
        )
    return str(value)


def _routing(keys: Keys, experts_key: str, **rest: Any) -> Routing:
    """Return the routing of a config.json after checking its counts against each other."""
    experts = keys.size(experts_key, most=MOST_EXPERTS)
    top_k = keys.size("num_experts_per_tok")
    routing = Routing(num_experts=experts, top_k=top_k, **rest)
    groups, kept = routing.num_groups, routing.top_groups
    for other in {"num_experts", "num_local_experts", "n_routed_experts"} & keys.keys():
        if keys[other] not in (None, experts):
            raise keys.wrong(f"{other}={keys[other]!r} contradicts {experts_key}={experts}: correct the file.")
    if experts % groups:
        raise keys.wrong(f"{experts_key}={experts} is not a multiple of n_group={groups}: correct the file.")
    if routing.group_score == "top2" and groups > 1 and experts // groups < 2:
        raise keys.wrong(
            f"n_group={groups} of {experts_key}={experts} leaves one expert to a group, and "
            "groups are compared by their best two: correct the file."
        )
    if kept > groups:
        raise keys.wrong(f"topk_group={kept} must be between 1 and n_group={groups}.")
    if top_k > kept * (experts // groups):
        raise keys.wrong(
            f"num_experts_per_tok={top_k} exceeds the {kept * (experts // groups)} experts that "
            "the chosen groups have: correct the file."
        )
    return routing
