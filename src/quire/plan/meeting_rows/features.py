"""Named features and conditions of the table of what works with what: predicates of a plan's inputs."""

from collections.abc import Callable, Mapping
from typing import get_args

from quire.args.check_layer import check_layer
from quire.args.checkpoint import ModelArgs
from quire.args.delta import DeltaArgs
from quire.args.latent import LatentArgs
from quire.args.layers import RecurrentArgs
from quire.args.mamba import MambaArgs
from quire.config.connectors import ROLES
from quire.config.engine import EngineConfig, flat_names
from quire.config.events import read_events_config
from quire.config.hosts import counts_replicas
from quire.contracts.parallel import MOST_RANKS
from quire.contracts.speculation import HEADS, METHODS, MODELS, Speculation
from quire.kernels.latent_rows import DS_MLA
from quire.plan.kinds import mixers
from quire.plan.kinds.blocks import operations
from quire.plan.meeting_rows.records import Feature, Inputs

SPEC, FLOAT = "--speculative-config", ("auto", "float32", "float")
RECURRENT: tuple[type[RecurrentArgs], ...] = get_args(RecurrentArgs)
Test = Callable[[Inputs], bool]


def idle_placement(i: Inputs) -> str:
    """Return the reason why --expert-placement-strategy changes nothing; "": it does."""
    if i.args is None or (i.args.moe is not None and i.parallel.expert_ranks > 1):
        return ""
    if i.args.moe is None:
        return "the model has no experts"
    sliced = i.parallel.tp > 1 and not i.parallel.experts
    return "every rank has a slice of each expert" if sliced else "a single rank has all experts"


def mtp_layers(i: Inputs) -> str:
    """Return the reason why the prediction layers of the model cannot draft; "": they can."""
    return "" if i.args is None else i.args.prediction.lack


def _drafts_unchosen(i: Inputs, model: ModelArgs) -> bool:
    """Return True if a layer drafts that has no indexer."""
    own = [one.mixer for one in model.layers[model.num_layers :][: model.draft_layers]]
    return any(not isinstance(one, LatentArgs) or one.index is None for one in own)


def wrong_local(i: Inputs) -> bool:
    """True for a number of replicas of this host that does not fit the number of hosts."""
    local, hosts, dp = i.config.hosts.data_parallel_size_local, i.config.hosts.nnodes, i.parallel.dp
    fits = local is None or counts_replicas(i.config.hosts, dp) or local * hosts == dp or local == 1 > dp // hosts
    return not fits and not _ray(i)


def odd_layers(i: Inputs) -> list[int]:
    """Return the numbers of the layers whose states an EAGLE head reads and the model does not have."""
    reads = i.draft.eagle.reads(i.model.num_layers) if i.draft is not None and i.draft.eagle is not None else ()
    return [one for one in reads if not 0 <= one <= i.model.num_layers]  # the last: behind all layers


def draft_vocabulary(draft: ModelArgs) -> int:
    """Return the number of token ids that a draft model or EAGLE head reads."""
    return draft.eagle.vocab_size if draft.eagle is not None else draft.vocab_size


def uneven_drafter(i: Inputs) -> str:
    """Return the parts of the draft model or EAGLE head that the ranks of a stage cannot share; "": they can."""
    if i.draft is None or i.speculation is None or i.speculation.draft_tensor_parallel_size == 1:
        return ""
    return " and ".join(dict.fromkeys(filter(None, (kind.uneven(i.parallel.tp) for kind in mixers(i.draft)))))


def _other_ranks(i: Inputs, speculation: Speculation) -> bool:
    """Return True if a number of ranks for drafts was asked for that is not the model's, nor 1 for another model."""
    asked = speculation.draft_tensor_parallel_size
    return asked not in (0, i.parallel.tp) and not (asked == 1 and speculation.method in MODELS)


def given(name: str) -> Test:
    """Return the predicate that an option differs from its default."""
    part = flat_names()[name]
    default = vars(getattr(EngineConfig(), part))[name]
    return lambda i: bool(vars(getattr(i.config, part))[name] != default)


def of_model(test: Callable[[Inputs, ModelArgs], bool]) -> Test:
    """Return the predicate that the model is known and passes a test."""
    return lambda i: i.args is not None and test(i, i.args)


def of_draft(test: Callable[[Inputs, ModelArgs], bool]) -> Test:
    """Return the predicate that the draft model or EAGLE head is known and passes a test."""
    return lambda i: i.draft is not None and test(i, i.draft)


def of_drafts(test: Callable[[Inputs, Speculation], bool]) -> Test:
    """Return the predicate that an engine has speculative decoding, which passes a test."""
    return lambda i: i.speculation is not None and test(i, i.speculation)


def _ray(i: Inputs) -> bool:
    return i.config.hosts.distributed_executor_backend == "ray"


def _odd_stages(i: Inputs, model: ModelArgs) -> bool:
    return len(i.parallel.layers) != i.parallel.pp or sum(i.parallel.layers) != model.num_layers


def _uneven_heads(i: Inputs, model: ModelArgs) -> bool:
    return any(kind.num_heads % i.parallel.tp for kind in mixers(model))


def _uneven_kv_heads(i: Inputs, model: ModelArgs) -> bool:
    return not _uneven_heads(i, model) and any(kind.uneven(i.parallel.tp) for kind in mixers(model))


def _attends_otherwise(model: ModelArgs) -> bool:
    """True if layers attend without latents."""
    return any(not isinstance(one, LatentArgs) for one in model.attending)


def _choosing(model: ModelArgs) -> bool:
    """True if layers attend to chosen tokens alone."""
    return any(isinstance(one, LatentArgs) and one.index is not None for one in model.mixers)


def _odd_slots(i: Inputs) -> bool:
    return i.num_experts > 0 and (i.num_experts + (i.parallel.redundant or 0)) % i.parallel.expert_ranks > 0


def _many_slots(i: Inputs) -> bool:
    ranks = i.parallel.expert_ranks
    return i.num_experts > 0 and ranks > 1 and (i.parallel.redundant or 0) > i.num_experts * (ranks - 1)


def _keeping(*kinds: type[RecurrentArgs]) -> Test:
    """Return the predicate that layers of these kinds keep a state of each request, in the model or its draft model."""
    return lambda i: any(isinstance(one, kinds) for args in (i.args, i.draft) if args for one in args.mixers)


def _any_tier(i: Inputs) -> bool:
    cache, share = i.config.cache, i.config.share
    tiers = cache.kv_offload_gb or cache.kv_offload_dir is not None or cache.kv_transfer_config
    return bool(tiers or share.kv_share or share.kv_peers)


RANKS: Mapping[str, Feature] = {
    "-tp": Feature(lambda i: i.parallel.tp > 1, "-tp {tp}", "-tp"),
    "-pp": Feature(lambda i: i.parallel.pp > 1, "pipeline parallelism", "-pp"),
    "-dp": Feature(lambda i: i.parallel.dp > 1, "-dp {dp}", "-dp"),
    "-dcp": Feature(lambda i: i.parallel.dcp > 1, "contexts on several ranks", "-dcp"),
    "uneven contexts": Feature(lambda i: i.parallel.tp % i.parallel.dcp > 0, "ranks that even groups cannot hold"),
    "-ep": Feature(lambda i: i.parallel.experts, "whole experts on ranks", "--enable-expert-parallel"),
    "EPLB": Feature(lambda i: i.parallel.redundant is not None, "experts that move", "--enable-eplb"),
    "round robin": Feature(lambda i: i.parallel.round_robin, "experts in turn", "--expert-placement-strategy"),
    "hosts": Feature(lambda i: i.config.hosts.nnodes > 1, "several hosts", "--nnodes"),
    "Ray": Feature(_ray, "Ray", "--distributed-executor-backend ray"),
    "several ranks": Feature(lambda i: i.parallel.size > 1, "{parallel}"),
    "one rank": Feature(lambda i: i.parallel.size == 1, "one rank"),
    "too many ranks": Feature(lambda i: i.parallel.size > MOST_RANKS, "more ranks than can be planned"),
    "lock-step": Feature(lambda i: i.parallel.lockstep, "replicas that share experts", "{parallel}"),
    "hosts or Ray": Feature(lambda i: i.config.hosts.several, "ranks on several hosts"),
    "uneven hosts": Feature(
        lambda i: i.parallel.size % i.config.hosts.nnodes > 0 and not counts_replicas(i.config.hosts, i.parallel.dp),
        "ranks that hosts cannot share equally",
    ),
    "local replicas": Feature(
        given("data_parallel_size_local"), "a number of replicas of this host", "--data-parallel-size-local"
    ),
    "other replicas": Feature(wrong_local, "another number of hosts"),
    "layer partition": Feature(lambda i: bool(i.parallel.layers), "layers of each stage", "--pipeline-layer-partition"),
    "other layers": Feature(of_model(_odd_stages), "stages or layers of another number"),
    "fewer layers": Feature(of_model(lambda i, m: i.parallel.pp > m.num_layers), "fewer layers than stages"),
    "uneven heads": Feature(of_model(_uneven_heads), "attention heads that ranks cannot share equally"),
    "uneven KV heads": Feature(of_model(_uneven_kv_heads), "KV heads that ranks can neither share nor copy equally"),
    "shared KV": Feature(
        of_model(lambda i, m: any(m.kept_by(layer) != layer for layer in range(m.num_layers))),
        "layers that read the KV of other layers",
    ),
    "layer inputs": Feature(of_model(lambda i, m: m.inputs > 0), "embeddings for each layer"),
    "layers of transformers": Feature(
        of_model(lambda i, m: m.foreign is not None), "layers of transformers' code", "--model-impl"
    ),
    "layers in one piece": Feature(
        of_model(lambda i, m: m.foreign is not None and bool(m.foreign.divides)),
        "layers of transformers' code whose heads ranks cannot share",
    ),
    "collective checks": Feature(given("check_collectives"), "exchanges that are compared", "--check-collectives"),
    "captured exchanges": Feature(
        lambda i: i.device == "cuda" and i.parallel.size > 1 and not i.config.device.enforce_eager,
        "ranks whose exchanges are in CUDA graphs",
    ),
    "no experts": Feature(of_model(lambda i, m: m.moe is None), "a model without experts"),
    "fewer experts": Feature(lambda i: 0 < i.num_experts < i.parallel.expert_ranks, "fewer experts than ranks"),
    "one expert rank": Feature(
        lambda i: i.parallel.expert_ranks == 1 and (i.args is None or i.num_experts > 0),
        "no ranks that share whole experts",
    ),
    "uneven slots": Feature(_odd_slots, "slots of experts that ranks cannot share equally"),
    "too many slots": Feature(_many_slots, "more slots of a rank than experts"),
    "exchange": Feature(given("all2all_backend"), "an exchange that was asked for", "--all2all-backend"),
    "no exchange": Feature(
        of_model(lambda i, m: m.moe is None or not i.parallel.lockstep), "replicas that share no experts"
    ),
    "idle placement": Feature(lambda i: bool(idle_placement(i)), "experts that ranks do not share"),
    "overrides": Feature(
        lambda i: bool(i.config.load.hf_overrides), "values over those of config.json", "--hf-overrides"
    ),
    "routing": Feature(given("routing"), "experts that are drawn", "--routing"),
    "real weights": Feature(lambda i: i.config.load.load_format != "dummy", "weights of a checkpoint"),
}
DRAFTS: Mapping[str, Feature] = {
    "drafts": Feature(of_drafts(lambda i, s: True), "speculative decoding", SPEC),
    "n-grams": Feature(lambda i: i.method == "ngram", "drafts by n-grams", SPEC),
    "MTP": Feature(lambda i: i.method == "mtp", "method mtp", SPEC),
    "draft model": Feature(lambda i: i.method == "draft_model", "a draft model", SPEC),
    "EAGLE": Feature(lambda i: i.method in HEADS, "an EAGLE head", SPEC),
    "drafts of layers": Feature(of_drafts(lambda i, s: s.layered), "speculative decoding with method {method}", SPEC),
    "drafts of another model": Feature(lambda i: i.method in MODELS, "method {method}", SPEC),
    "planned method": Feature(of_drafts(lambda i, s: s.method not in METHODS), "method {method}"),
    "made-up acceptance": Feature(of_drafts(lambda i, s: bool(s.synthetic)), "synthetic acceptance", SPEC),
    "drafts of the model": Feature(lambda i: i.method in ("ngram", "mtp"), "method {method}", SPEC),
    "other ranks": Feature(of_drafts(_other_ranks), "another number of ranks for drafts"),
    "shared choice": Feature(
        of_drafts(lambda i, s: s.index_share_for_mtp_iteration is not None),
        "passes that share a choice of tokens",
        SPEC,
    ),
    "no indexer": Feature(of_model(_drafts_unchosen), "a prediction layer without an indexer"),
    "uneven drafter": Feature(lambda i: bool(uneven_drafter(i)), "heads that ranks cannot share equally"),
    "not one MTP layer": Feature(lambda i: bool(mtp_layers(i)), "a model without a prediction layer that can draft"),
    "dynamic rope": Feature(
        of_draft(lambda i, d: "dynamic" in [one.rope.kind for one in d.rotations]), "rope type dynamic"
    ),
    "other width": Feature(of_draft(lambda i, d: d.hidden_size != i.model.hidden_size), "states of another width"),
    "lacking layers": Feature(lambda i: bool(odd_layers(i)), "layers that the model does not have"),
    "other vocabulary": Feature(
        of_draft(lambda i, d: draft_vocabulary(d) != i.model.vocab_size), "another vocabulary than the model's"
    ),
    "shorter context": Feature(
        of_draft(lambda i, d: d.max_position_embeddings < i.length), "a context shorter than the engine's"
    ),
    "shorter draft length": Feature(
        of_drafts(lambda i, s: i.args is not None and 0 < s.max_model_len < i.length),
        'a "max_model_len" below the engine\'s',
    ),
}
CACHE: Mapping[str, Feature] = {
    "CacheBlend": Feature(given("enable_cache_blend"), "CacheBlend", "--enable-cache-blend"),
    "prompt embeddings": Feature(given("enable_prompt_embeds"), "prompts as embeddings", "--enable-prompt-embeds"),
    "few layers": Feature(of_model(lambda i, m: m.num_layers <= check_layer(m) + 1), "{layers} layers"),
    "states": Feature(_keeping(*RECURRENT), "recurrent layers"),
    "no states": Feature(of_model(lambda i, m: not _keeping(*RECURRENT)(i)), "a model without recurrent layers"),
    "places of checkpoints": Feature(given("state_checkpoint"), "places of states", "--state-checkpoint"),
    "state memory": Feature(given("state_memory_fraction"), "a share of memory for states", "--state-memory-fraction"),
    "type of matrices": Feature(
        given("mamba_ssm_cache_dtype"), "a type of recurrent layers' matrices", "--mamba-ssm-cache-dtype"
    ),
    "no matrices": Feature(
        of_model(lambda i, m: not _keeping(DeltaArgs, MambaArgs)(i)), "a model whose layers keep no matrices"
    ),
    "chosen tokens": Feature(
        lambda i: any(one is not None and _choosing(one) for one in (i.args, i.draft)), "sparse latent attention (DSA)"
    ),
    "rows of latents": Feature(
        lambda i: i.config.cache.kv_cache_dtype == DS_MLA, "a cache of type fp8_ds_mla", "--kv-cache-dtype fp8_ds_mla"
    ),
    "other attention": Feature(
        lambda i: any(one is not None and _attends_otherwise(one) for one in (i.args, i.draft)),
        "attention without latents",
    ),
    "no prefix cache": Feature(
        given("enable_prefix_caching"), "--no-enable-prefix-caching", "--no-enable-prefix-caching"
    ),
    "host memory": Feature(lambda i: i.tiers.kv_offload_gb > 0, "KV blocks in host memory", "--kv-offload-gb"),
    "disk": Feature(lambda i: bool(i.tiers.kv_offload_dir), "KV blocks on a disk", "--kv-offload-dir"),
    "sharing": Feature(given("kv_share"), "KV blocks that other engines read", "--kv-share"),
    "peers": Feature(given("kv_peers"), "KV blocks of other engines", "--kv-peers"),
    "KV events": Feature(lambda i: read_events_config(i.config) is not None, "KV events", "--kv-events-config"),
    "no host memory": Feature(lambda i: i.tiers.kv_offload_gb == 0, "no host memory for KV blocks"),
    "no folder": Feature(lambda i: i.tiers.kv_offload_dir is None, "no folder for KV blocks"),
    "not Linux": Feature(lambda i: i.platform != "linux", "a system other than Linux"),
    "tier policy": Feature(given("kv_offload_policy"), "a policy of KV tiers", "--kv-offload-policy"),
    "folder size": Feature(given("kv_offload_dir_gb"), "a size of files", "--kv-offload-dir-gb"),
    "shared folder": Feature(given("kv_offload_dir_shared"), "a folder of several users", "--kv-offload-dir-shared"),
    "prefill node": Feature(lambda i: i.role in ROLES[:2], "a prefill node", "--kv-transfer-config"),
    "decode node": Feature(lambda i: i.role in ROLES[::2], "a decode node", "--kv-transfer-config"),
    "no sharing": Feature(lambda i: not i.config.share.kv_share, "no --kv-share"),
    "no peers": Feature(lambda i: not i.config.share.kv_peers, "no --kv-peers"),
}
ADAPTERS: Mapping[str, Feature] = {
    "adapters": Feature(given("enable_lora"), "adapters", "--enable-lora"),
    "no adapters": Feature(lambda i: not i.config.adapters.enable_lora, "no adapters"),
    "slots of adapters": Feature(given("max_loras"), "a number of adapters on the device", "--max-loras"),
    "rank of adapters": Feature(given("max_lora_rank"), "a largest rank of adapters", "--max-lora-rank"),
    "held adapters": Feature(given("max_cpu_loras"), "a number of adapters in host memory", "--max-cpu-loras"),
    "modules of adapters": Feature(
        given("lora_target_modules"), "modules that adapters may change", "--lora-target-modules"
    ),
    "adapters of experts": Feature(
        lambda i: i.config.adapters.of_experts, "adapters of routed experts", "--lora-target-modules"
    ),
    "sharded adapters": Feature(
        given("fully_sharded_loras"), "adapters both of whose matrices are cut", "--fully-sharded-loras"
    ),
    "no slices": Feature(lambda i: i.parallel.tp == 1, "-tp 1"),
}
OTHERS: Mapping[str, Feature] = {
    "weights in host memory": Feature(given("cpu_offload_gb"), "weights in host memory", "--cpu-offload-gb"),
    "a CPU": Feature(lambda i: i.device == "cpu", "a CPU"),
    "batch invariance": Feature(given("batch_invariant"), "bits that do not depend on the batch", "--batch-invariant"),
    "latent attention": Feature(of_model(lambda i, m: "latent" in operations(m)), "latent attention"),
    "recurrent layers on a GPU": Feature(
        lambda i: i.device == "cuda" and _keeping(*RECURRENT)(i), "recurrent layers on a GPU"
    ),
    "gated shared experts on a CPU": Feature(
        of_model(lambda i, m: i.device == "cpu" and m.moe is not None and m.moe.shared_gate),
        "shared experts with a gate on a CPU",
    ),
    "GPU memory": Feature(given("gpu_memory_utilization"), "a share of GPU memory", "--gpu-memory-utilization"),
    "graph sizes": Feature(given("cudagraph_capture_sizes"), "sizes of CUDA graphs", "--cudagraph-capture-sizes"),
    "largest graph": Feature(
        given("max_cudagraph_capture_size"), "a largest CUDA graph", "--max-cudagraph-capture-size"
    ),
    "sleep": Feature(given("enable_sleep_mode"), "sleep", "--enable-sleep-mode"),
    "new weights": Feature(given("weight_transfer_config"), "new weights", "--weight-transfer-config"),
    "restarts": Feature(given("restart"), "restarts", "--restart"),
    "mock": Feature(lambda i: i.device == "mock", "the mock device", "--device mock"),
    "KV tiers": Feature(_any_tier, "tiers of KV blocks"),
    "chunks": Feature(lambda i: bool(i.request.chunks), "parts that reuse KV", "kv_chunks"),
    "numbered chunks": Feature(lambda i: i.request.chunks == "kv_chunks", "parts named by token numbers", "kv_chunks"),
    "transfer": Feature(lambda i: i.request.transfer, "KV of another engine", "kv_transfer_params"),
    "prompt logprobs": Feature(lambda i: i.request.prompt_logprobs, "prompt logprobs", "prompt_logprobs"),
    "truncated prompt": Feature(lambda i: i.request.truncated, "a prompt that is cut", "truncate_prompt_tokens"),
    "text prompt": Feature(lambda i: i.request.text, "a prompt that is a text"),
    "stream": Feature(lambda i: i.request.stream, "a streamed answer", "stream"),
    "given embeddings": Feature(lambda i: i.request.embeds, "a prompt of embeddings", "prompt_embeds"),
    "repetition penalty": Feature(lambda i: i.request.repetition, "a repetition penalty", "repetition_penalty"),
    "verify": Feature(lambda i: True, "quire verify"),
    "random weights": Feature(lambda i: i.config.load.load_format == "dummy", "random weights", "--load-format dummy"),
    "other dtype": Feature(lambda i: i.config.model.dtype not in FLOAT, "a type other than float32", "--dtype"),
    "coded cache": Feature(lambda i: "fp8" in i.config.cache.kv_cache_dtype, "a KV cache of codes", "--kv-cache-dtype"),
}
FEATURES: Mapping[str, Feature] = {**RANKS, **DRAFTS, **CACHE, **ADAPTERS, **OTHERS}
