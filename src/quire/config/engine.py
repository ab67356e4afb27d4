"""Configuration of an engine: a small frozen dataclass per component. Flags are derived from the fields."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_args, get_origin, get_type_hints

from quire.config.adapters import AdapterConfig, check_adapters
from quire.config.checkpoints import read_places
from quire.config.hosts import HostsConfig, hosts_of_replicas
from quire.config.life import LifeConfig, check_life
from quire.config.option import option
from quire.contracts.errors import ConfigError

CPU_TOKENS = 2048  # token budget of a step
SEQUENCES = 256  # requests running at once
DEVICES = ("auto", "cpu", "cuda", "mock")
MODEL_IMPLS = ("auto", "quire", "transformers", "vllm")  # vllm: quire
DTYPES = ("auto", "float32", "bfloat16", "float16", "half", "float")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model and its files."""

    model: str = option("", "model folder or hub id, as the argument MODEL")
    tokenizer: str | None = option(None, "tokenizer folder or hub id (default: the model's own)")
    skip_tokenizer_init: bool = option(False, "token ids in and out, no tokenizer")
    trust_remote_code: bool = option(False, "accepted for compatibility; remote code is never run")
    model_impl: str = option(
        "auto",
        "code of the model's layers: quire = Quire's own; transformers = that of transformers, with Quire's attention, "
        "cache and projections; auto = transformers for a model that Quire has no file for",
        choices=MODEL_IMPLS,
    )
    revision: str | None = option(None, "branch, tag or commit, used for every file")
    dtype: str = option("auto", "dtype of weights and activations", choices=DTYPES)
    max_model_len: int | None = option(
        None, "context length in tokens (default: what the model and memory allow)", least=1
    )
    generation_config: str = option(
        "auto", "auto: sampling defaults from the model's generation_config.json; none: no such defaults"
    )
    override_generation_config: dict[str, Any] | None = option(
        None, 'sampling defaults that replace the model\'s, as JSON: {"temperature": 0.5}'
    )
    seed: int = option(0, "seed of the engine: requests without a seed draw theirs from it")
    enable_prompt_embeds: bool = option(
        False, "prompts may be embeddings (prompt_embeds): tensors [tokens, hidden], as the first layer reads them"
    )
    max_logprobs: int = option(20, "maximum logprobs per token that a request may ask for; -1: the whole vocabulary")
    chat_template: str | None = option(None, "chat template: a file, or the template itself")
    pooler_config: dict[str, Any] | None = option(
        None,
        'pooling of embeddings, as JSON: {"pooling_type": "MEAN", "normalize": true}; MEAN, LAST or CLS '
        "(default: as in the model's files, else the last token's hidden state, normalized)",
        flags=("--override-pooler-config",),
    )


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """Loading of a model: its config.json and its weights."""

    load_format: str = option(
        "auto",
        "auto = safetensors (so are fastsafetensors and runai_streamer); dummy = random weights",
        choices=("auto", "safetensors", "dummy"),
    )
    routing: str = option(
        "model",
        "choice of experts: model = by the routers; uniform = at random, so that timings "
        "with dummy weights are like those of trained ones; zipf = at random, some experts far "
        "more often than others",
        choices=("model", "uniform", "zipf"),
    )
    quantization: str | None = option(
        None,
        "format of the weights; fp8 quantizes an unquantized checkpoint while it is loaded (default: as the "
        "checkpoint says)",
        flags=("-q",),
    )
    hf_overrides: dict[str, Any] | None = option(
        None, 'values over those of the model\'s config.json, as JSON: {"max_position_embeddings": 65536}'
    )
    load_device: str = option(
        "auto",
        "device that loads and packs weights: auto = the engine's device; cpu = the CPU, and packed weights "
        "then move to the engine's device",
        choices=("auto", "cpu"),
        flags=("--weights-load-device",),
    )
    cpu_offload_gb: float = option(
        0.0,
        "GiB of weights of each GPU that stay in host memory; their layers are copied to the GPU while others compute "
        "(0: none)",
        least=0,
    )
    download_dir: str | None = option(None, "folder for downloaded models (default: the hub's cache)")
    offline: bool = option(False, "make no network call; the model must be in the cache")
    hf_token: str | None = option(None, "token for gated repositories")
    use_tqdm_on_load: bool = option(True, "show a progress bar while loading")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The KV cache."""

    block_size: int | None = option(None, "tokens per KV block (default: 32 on a CPU, 128 on a GPU)", least=1)
    kv_cache_memory_bytes: int | None = option(None, "exact size of the KV cache in bytes", least=1)
    kv_cache_dtype: str = option(
        "auto",
        "type of the KV cache; auto: of the computation, or FP8 if the checkpoint "
        "says so; fp8 (fp8_e4m3) and fp8_e5m2 hold twice the tokens in the same memory; fp8_ds_mla: latents in FP8 "
        "with scales of their own, beside rotated keys in bfloat16",
        choices=("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", *DTYPES[1:]),
    )
    gpu_memory_utilization: float = option(
        0.92,
        "share of the GPU's memory for weights, activations, CUDA graphs and KV cache together; no effect on a CPU",
    )
    num_gpu_blocks_override: int | None = option(None, "exact number of KV blocks", flags=("--num-blocks",), least=1)
    enable_prefix_caching: bool = option(True, "reuse the KV of shared prefixes across requests")
    kv_offload_gb: float = option(
        0.0,
        "GiB of host memory, of all ranks together, for KV blocks that leave the "
        "device; they come back by copy (0: none)",
        flags=("--kv-offloading-size",),
        least=0,
    )
    kv_offload_policy: str = option(
        "lazy",
        "blocks that go to host memory: lazy = those that are about to be evicted; write_through = all",
        choices=("lazy", "write_through"),
    )
    kv_offload_dir: str | None = option(
        None, "folder for KV blocks on a disk, through --kv-offload-gb; restarts and other engines find them"
    )
    kv_offload_dir_gb: float = option(
        100.0, "GiB of files in --kv-offload-dir, of all ranks of a replica; the least recently used go first", above=0
    )
    enable_cache_blend: bool = option(False, "reuse KV of texts cached alone at any position (CacheBlend, approximate)")
    blend_ratio: float = option(0.15, "share of the tokens so reused that is computed again; 1 or more: all", least=0)
    blend_separator: str = option(" # # ", "text between the parts of a prompt that are reused by themselves")
    kv_transfer_config: dict[str, Any] | None = option(
        None,
        'vLLM\'s connector, as JSON: {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", '
        '"kv_connector_extra_config": {"cpu_bytes_to_use": 8000000000}}; LMCacheConnectorV1 likewise; QuireConnector: '
        "the role says whether prompts are computed for other engines, or taken from them; MultiConnector: both",
    )


@dataclass(frozen=True, kw_only=True)
class StateConfig:
    """States of recurrent layers."""

    state_checkpoint: str = option(
        "prompt,branch,turn",
        "places where states are kept for later requests, with commas: prompt = at the end of a prompt, branch = where "
        "a prompt left a cached one, turn = in an answer the last multiple of 256 tokens, or of N; every=N = in a "
        "prompt each multiple of N tokens, at most two in a step; N and 256 are rounded up to whole KV blocks; "
        "none = nowhere",
    )
    state_memory_fraction: float | None = option(
        None,
        "share of the memory of states and KV cache that states take, at most half of them for running requests, the "
        "others as checkpoints (default: computed; quire explain shows it)",
        above=0,
    )
    mamba_ssm_cache_dtype: str = option(
        "auto",
        "type in which recurrent layers keep their matrices: auto = float32; bfloat16 halves their memory, and changes "
        "answers a little",
        choices=("auto", "float32", "bfloat16"),
    )


@dataclass(frozen=True, kw_only=True)
class ShareConfig:
    """KV blocks and other engines."""

    kv_share: str | None = option(
        None,
        "address HOST:PORT on which other engines read the blocks in this one's host "
        "memory, those of replica i at PORT + i; they need the same key (QUIRE_CLUSTER_KEY)",
    )
    kv_peers: tuple[str, ...] = option(
        (), "addresses HOST:PORT of engines whose blocks this one reads, through --kv-offload-gb"
    )
    kv_events_config: dict[str, Any] | None = option(
        None,
        "events about the blocks of the prefix cache, for routers, as JSON with vLLM's keys: "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"} (default endpoint: port 5557 of loopback)',
    )
    kv_offload_dir_shared: bool = option(
        False,
        "take a --kv-offload-dir into which other users may write: they can change what this engine answers; a group "
        "shares it where its engines have umask 0002",
    )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Scheduling and batching."""

    max_num_batched_tokens: int | None = option(
        None,
        "token budget of a step (default: 2048 on a CPU, 8192 on a GPU; in LLM 16384 for experts on a large GPU)",
        least=1,
    )
    max_num_seqs: int | None = option(
        None,
        "requests running at once (default: 256, on a GPU of 70 GiB or more 1024, "
        "and no more than max_num_batched_tokens)",
        least=1,
    )
    max_waiting: int | None = option(
        None,
        "requests that may wait, not counting those that free slots can take; more "
        "are answered 429 (default: 8 x max_num_seqs, at least 1,024, in a server; no "
        "limit offline)",
        least=1,
    )
    scheduling_policy: str = option(
        "fcfs", "order of waiting requests: first come first served, or by priority", choices=("fcfs", "priority")
    )
    watermark: float = option(0.01, "share of the KV blocks kept free when a request is admitted while others run")
    speculative_config: dict[str, Any] | None = option(
        None,
        'speculative decoding, as JSON: {"method": "ngram", "num_speculative_tokens": 3} guesses 3 tokens and '
        "verifies them in one step; answers stay the same",
        flags=("-sc",),
    )

    def sequences(self) -> int:
        """Return max_num_seqs, or its default: 256, at most max_num_batched_tokens. A GPU's default may be larger."""
        return self.max_num_seqs or min(SEQUENCES, self.max_num_batched_tokens or SEQUENCES)

    def token_budget(self, default: int = CPU_TOKENS) -> int:
        """Return max_num_batched_tokens; if not set, the larger of `default` and `sequences()`."""
        return self.max_num_batched_tokens or max(default, self.sequences())


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Device and CUDA graphs."""

    device: str = option(
        "auto",
        "device; auto: a GPU if there is one; mock: no model, made-up tokens, for testing servers",
        choices=DEVICES,
    )
    num_threads: int | None = option(None, "CPU threads (default: all cores)", least=1)
    async_depth: int | None = option(None, "steps in flight; 2 plans one step ahead (default: 1 on a CPU, 2 on a GPU)")
    enforce_eager: bool = option(
        False,
        "run every step in Python: no CUDA graphs, no recorded CPU steps; less memory "
        "and a faster start, but slower steps",
    )
    batch_invariant: bool = option(
        False,
        "the bits of a request's logits do not depend on other requests, chunks of its prompt or cached prefixes; "
        "slower (VLLM_BATCH_INVARIANT=1 does the same)",
    )
    cudagraph_capture_sizes: tuple[int, ...] = option(
        (),
        "numbers of tokens of a step for which CUDA graphs are captured (default: chosen by --max-num-seqs)",
        flags=("--cuda-graph-sizes",),
        least=1,
    )
    max_cudagraph_capture_size: int | None = option(None, "largest number of tokens of a captured CUDA graph", least=1)
    mock_step_ms: float = option(0.0, "duration of a step with device=mock, in milliseconds")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Several devices."""

    tensor_parallel_size: int = option(1, "devices that each hold a slice of every layer", flags=("-tp",), least=1)
    pipeline_parallel_size: int = option(
        1, "stages of devices that each hold a range of layers", flags=("-pp",), least=1
    )
    pipeline_layer_partition: tuple[int, ...] = option(
        (),
        "layers of each stage, as numbers that add up to the model's layers (vLLM's VLLM_PP_LAYER_PARTITION; "
        "default: equal)",
        least=1,
    )
    data_parallel_size: int = option(
        1, "replicas of the engine behind one port; with -ep they share the experts", flags=("-dp",), least=1
    )
    decode_context_parallel_size: int = option(
        1, "devices of -tp that divide the tokens of the KV cache (latent attention)", flags=("-dcp",), least=1
    )
    enable_expert_parallel: bool = option(
        False, "distribute whole experts over the devices, not slices of each", flags=("-ep",)
    )
    expert_placement_strategy: str = option(
        "linear",
        "whole experts on devices: linear = neighbours together; round_robin = in turn",
        choices=("linear", "round_robin"),
    )
    enable_eplb: bool = option(False, "move experts between devices, and copy hot ones, so that all are equally busy")
    eplb_config: dict[str, Any] | None = option(
        None, 'settings of --enable-eplb, as JSON: {"num_redundant_experts": 32, "step_interval": 3000}'
    )
    all2all_backend: str = option(
        "auto", "exchange of tokens between replicas that share experts; auto: chosen for prefill and decode"
    )
    disable_custom_all_reduce: bool = option(False, "sum over GPUs through NCCL, not through memory that all map")
    check_collectives: bool = option(
        False, "compare every exchange between ranks before it runs, and name the ranks that differ; slow"
    )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Complete configuration of an engine."""

    model: ModelConfig = ModelConfig()
    load: LoadConfig = LoadConfig()
    cache: CacheConfig = CacheConfig()
    state: StateConfig = StateConfig()
    share: ShareConfig = ShareConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    device: DeviceConfig = DeviceConfig()
    parallel: ParallelConfig = ParallelConfig()
    hosts: HostsConfig = HostsConfig()
    adapters: AdapterConfig = AdapterConfig()
    life: LifeConfig = LifeConfig()

    @classmethod
    def from_flat(cls, **values: Any) -> "EngineConfig":
        """Build a configuration from flat option names: `from_flat(model="m", max_model_len=4096)`."""
        config, parts = cls(), by_part(values, flat_names())
        config = replace(config, **{part: replace(getattr(config, part), **kw) for part, kw in parts.items()})
        check_config(config)
        return replace(config, hosts=hosts_of_replicas(config.hosts, config.parallel.data_parallel_size))


def flat_names() -> dict[str, str]:
    """Return option name -> the field of `EngineConfig` that holds the option: max_num_seqs -> scheduler."""
    default = EngineConfig()
    return {f.name: part.name for part in fields(default) for f in fields(getattr(default, part.name))}


def by_part(values: Mapping[str, Any], known: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Group options by part of the configuration; `known`: option -> part. Raises `ConfigError` if one is unknown."""
    parts: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name not in known:
            import difflib

            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else "`quire serve --help` lists what there is."
            raise ConfigError(f"Quire has no option {name!r}. {hint}")
        parts.setdefault(known[name], {})[name] = value
    return parts


def check_config(config: EngineConfig) -> None:
    """Raise `ConfigError` for values that can never work; the message names the option and the range."""
    for part in fields(EngineConfig):
        check_types(getattr(config, part.name))
    s, c, hosts = config.scheduler, config.cache, config.hosts
    if hosts.node_rank >= hosts.nnodes:
        raise ConfigError(
            f"node_rank={hosts.node_rank}: {hosts.nnodes} hosts have the numbers 0 to "
            f"{hosts.nnodes - 1}: give nnodes, the number of hosts, too."
        )
    if not 0.0 <= s.watermark < 1.0:
        raise ConfigError(f"watermark={s.watermark}: must be in [0, 1).")
    if not 0.0 < c.gpu_memory_utilization <= 1.0:
        raise ConfigError(f"gpu_memory_utilization={c.gpu_memory_utilization}: must be above 0 and at most 1.")
    read_places(config.state.state_checkpoint)
    check_adapters(config.adapters)
    check_life(config.life)
    if not (config.state.state_memory_fraction or 0.0) < 1.0:
        raise ConfigError(f"state_memory_fraction={config.state.state_memory_fraction}: must be below 1, such as 0.3.")
    if not 0.0 <= config.device.mock_step_ms <= 60_000.0:
        raise ConfigError(f"mock_step_ms={config.device.mock_step_ms}: must be in [0, 60000].")
    if config.device.async_depth not in (None, 1, 2):
        raise ConfigError(f"async_depth={config.device.async_depth}: must be 1 or 2.")
    if s.max_num_batched_tokens is not None and s.max_num_batched_tokens < s.sequences():  # both were given
        raise ConfigError(
            f"max_num_batched_tokens={s.max_num_batched_tokens} is below max_num_seqs={s.sequences()}: a step could "
            f"not advance every running request. Lower max_num_seqs or raise max_num_batched_tokens."
        )


def check_types(component: Any) -> None:
    """Raise `ConfigError` if an option in `component` has a wrong type, or is outside its choices or bounds."""
    types = get_type_hints(type(component))
    for f in fields(component):
        choices, value = f.metadata["choices"], getattr(component, f.name)
        if not _is_a(value, types[f.name]):
            raise ConfigError(f"{f.name}={value!r}: must be {_words(types[f.name])}, not {type(value).__name__}.")
        if choices and value not in choices:
            raise ConfigError(f"{f.name}={value!r}: must be one of {', '.join(choices)}.")
        least, above = f.metadata["least"], f.metadata["above"]
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and least is not None and not number >= least:
                raise ConfigError(f"{f.name}={number}: must be at least {least}.")
            if number is not None and above is not None and not number > above:
                raise ConfigError(f"{f.name}={number}: must be above {above}.")


def _is_a(value: object, kind: Any) -> bool:
    """True when the value has the option's declared type. An int counts as a float, a bool not as an int."""
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_a(item, get_args(kind)[0]) for item in value)
    kinds = tuple(get_origin(k) or k for k in get_args(kind) or (kind,))
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (float in kinds and isinstance(value, int))


def _words(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return "a tuple of strings" if get_args(kind)[0] is str else "a tuple of integers"
    names = {int: "an integer", float: "a number", bool: "True or False", str: "a string", dict: "a mapping"}
    names[type(None)] = "None"
    return " or ".join(names[get_origin(k) or k] for k in get_args(kind) or (kind,))


def check_context(model: ModelConfig, context: int) -> None:
    """Raise `ConfigError` when max_model_len exceeds the model's longest sequence, `context` tokens."""
    asked = model.max_model_len
    if asked is not None and asked > context:
        raise ConfigError(
            f"max_model_len={asked} exceeds the model's context of {context} tokens: lower it "
            f"(--max-model-len {context}), or leave it out."
        )
