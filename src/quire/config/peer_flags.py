"""The flags of vLLM, which our users' launch lines hold: what each one means here. One table, no exceptions elsewhere.

    WORKS     we have it, under the same name and with the same meaning
    ALIAS     we have it under another name
    NO_OP     accepted; changes nothing here, and says why
    REFUSED   an error that says what is missing, unless its value asks for nothing

Knows names and reasons; `peer_args.py` takes them from a command line or a file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Meaning(StrEnum):
    """What a flag of theirs does here."""

    WORKS = "works"
    ALIAS = "alias"
    NO_OP = "no-op"
    REFUSED = "refused"


class Takes(StrEnum):
    """What follows a flag: nothing (and --no-flag exists), one value or several."""

    SWITCH = "switch"
    VALUE = "value"
    LIST = "list"


SWITCH, VALUE, LIST = Takes
ON, OFF = "on", "off"


@dataclass(frozen=True, kw_only=True)
class PeerFlag:
    """One flag of theirs.

    neutral   values with which a refused flag asks for nothing (ON and OFF for a switch)
    option    of ours, that an alias sets; `values` maps theirs to ours (empty: the same texts)
    """

    names: tuple[str, ...]
    meaning: Meaning
    takes: Takes = VALUE
    why: str = ""
    neutral: tuple[str, ...] = ()
    option: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The main spelling."""
        return self.names[0]


def _rows(meaning: Meaning, flags: str, takes: Takes, why: str, neutral: tuple[str, ...] = ()) -> Iterator[PeerFlag]:
    """One row per flag; spellings of one flag are joined by slashes."""
    for names in flags.split():
        yield PeerFlag(names=tuple(names.split("/")), meaning=meaning, takes=takes, why=why, neutral=neutral)


def _works(flags: str) -> Iterator[PeerFlag]:
    return _rows(Meaning.WORKS, flags, VALUE, "")


def _no_op(flags: str, takes: Takes, why: str) -> Iterator[PeerFlag]:
    return _rows(Meaning.NO_OP, flags, takes, why)


def _refused(flags: str, takes: Takes, why: str, *neutral: str) -> Iterator[PeerFlag]:
    return _rows(Meaning.REFUSED, flags, takes, why, neutral or ((OFF,) if takes is SWITCH else ()))


def _alias(names: str, option: str, takes: Takes = VALUE, why: str = "", **values: Any) -> PeerFlag:
    return PeerFlag(names=tuple(names.split("/")), meaning=Meaning.ALIAS, takes=takes, option=option, values=values,
                    why=why or f"is --{option.replace('_', '-')} here")


LATER = "not implemented yet"
DEVICES = f"several devices are {LATER}: leave the flag out, or start several servers"
ONE_DEVICE = "there is one device, so nothing is spread over several"
EXPERTS = f"mixture-of-experts models are {LATER}"
NO_EXPERTS = f"it counts only for mixture-of-experts models, which are {LATER}"
LORA, DRAFTS = f"adapters (LoRA) are {LATER}", f"speculative decoding is {LATER}"
NO_LORA = f"it counts only with adapters, which are {LATER}"
TEXT_ONLY = "only text goes in; no image, sound or video is read"
POOLING = "only text generation is implemented"
NO_COMPILER = "nothing is compiled but kernels; --enforce-eager and --cudagraph-capture-sizes choose the graphs"
TOOLS = f"parsing of tool calls is {LATER}"
GRAMMAR = f"structured outputs are {LATER}"
OWN_KERNELS = "kernels are chosen by Quire, and no other is there to be forced"
CODE = "code that is not Quire's own is never loaded"
CPU_MEMORY = "weights stay on their device"
OWN_LOADER = "the loader has one way: each file is read once"
TRANSFER = f"the KV cache is not shared with other servers or tiers; that is {LATER}"
REMOTE = "the core process is started by the server, on this machine"

MODEL = (
    *_works("--model --tokenizer --trust-remote-code --dtype --seed --revision --max-model-len --max-logprobs "
            "--skip-tokenizer-init --served-model-name --hf-token --generation-config --override-generation-config "
            "--device --enforce-eager"),
    *_refused("--runner", VALUE, POOLING, "auto", "generate"),
    *_refused("--task", VALUE, POOLING, "auto", "generate"),
    *_refused("--convert", VALUE, POOLING, "auto"),
    *_refused("--tokenizer-mode", VALUE, "only Hugging Face's tokenizer.json is read", "auto", "hf", "slow"),
    *_refused("--hf-config-path", VALUE, "config.json is read from the model's own folder"),
    *_no_op("--code-revision", VALUE, "code from a repository is never run"),
    *_refused("--tokenizer-revision", VALUE, "--revision holds for every file of a model"),
    *_refused("--quantization/-q", VALUE, f"quantized weights are {LATER}: use the unquantized checkpoint"),
    *_refused("--quantization-config", VALUE, f"quantized weights are {LATER}: use the unquantized checkpoint", "{}"),
    *_no_op("--allow-deprecated-quantization", SWITCH, f"quantized weights are {LATER}"),
    *_refused("--logprobs-mode", VALUE, "log-probabilities are those of the model, before any change",
              "raw_logprobs"),
    *_no_op("--use-fp64-gumbel", SWITCH, "noise is drawn in one way, by counter"),
    *_no_op("--disable-sliding-window", SWITCH, f"models with a sliding window are {LATER}"),
    *_no_op("--disable-cascade-attn", SWITCH, "there is no cascade attention to switch off"),
    *_refused("--enable-prompt-embeds", SWITCH, "prompts are text or token ids"),
    *_refused("--config-format", VALUE, "only Hugging Face's config.json is read", "auto", "hf"),
    *_refused("--hf-overrides --model-class-overrides", VALUE, "config.json counts as it is: change a copy", "{}"),
    *_refused("--rope-scaling", VALUE, "config.json counts as it is: change a copy", "{}"),
    *_refused("--rope-theta", VALUE, "config.json counts as it is: change a copy"),
    *_refused("--pooler-config --override-pooler-config", VALUE, POOLING, "{}"),
    *_refused("--enable-sleep-mode", SWITCH, f"putting an engine to sleep is {LATER}"),
    *_refused("--model-impl", VALUE, "models are Quire's own", "auto", "vllm"),
    *_refused("--logits-processors", LIST, CODE),
    *_refused("--logits-processor-pattern --io-processor-plugin --tool-parser-plugin --reasoning-parser-plugin",
              VALUE, CODE),
    *_no_op("--renderer-num-workers", VALUE, "long prompts are encoded in threads as they come"),
    *_no_op("--allowed-local-media-path", VALUE, TEXT_ONLY),
    *_no_op("--allowed-media-domains", LIST, TEXT_ONLY),
    *_refused("--enable-return-routed-experts", SWITCH, EXPERTS),
)

LOADING = (
    *_works("--load-format --download-dir --use-tqdm-on-load"),
    *_no_op("--safetensors-load-strategy --safetensors-prefetch-num-threads --max-parallel-loading-workers", VALUE,
            OWN_LOADER),
    *_refused("--model-loader-extra-config", VALUE, OWN_LOADER, "{}"),
    *_no_op("--ignore-patterns", LIST, "only the files that a model needs are downloaded"),
    *_refused("--cpu-offload-gb", VALUE, f"weights kept in the CPU's memory beside a GPU are {LATER}", "0"),
    *_no_op("--offload-backend --cpu-offload-params --offload-group-size --offload-num-in-group "
            "--offload-prefetch-step", VALUE, CPU_MEMORY),
)

KERNELS = (
    *_refused("--attention-backend --moe-backend --linear-backend", VALUE, OWN_KERNELS, "auto"),
    *_refused("--attention-config/-ac --kernel-config", VALUE, OWN_KERNELS, "{}"),
    *_no_op("--enable-flashinfer-autotune", SWITCH, OWN_KERNELS),
    *_no_op("--ir-op-priority", VALUE, OWN_KERNELS),
    *_no_op("--mamba-backend --mamba-cache-mode --mamba-cache-dtype --mamba-ssm-cache-dtype --mamba-block-size", VALUE,
            f"Mamba models are {LATER}"),
)

PARALLEL = (
    *_refused("--tensor-parallel-size/-tp --pipeline-parallel-size/-pp --decode-context-parallel-size/-dcp "
              "--prefill-context-parallel-size/-pcp", VALUE, DEVICES, "1"),
    *_refused("--data-parallel-size/-dp", VALUE, f"replicas are {LATER}: start one server per replica", "1"),
    *_refused("--data-parallel-size-local/-dpl", VALUE, f"replicas are {LATER}: start one server per replica", "1"),
    *_refused("--enable-expert-parallel/-ep --enable-eplb --enable-dbo --enable-elastic-ep", SWITCH, EXPERTS),
    *_no_op("--all2all-backend --eplb-config --expert-placement-strategy --dbo-decode-token-threshold "
            "--dbo-prefill-token-threshold --ubatch-size", VALUE, NO_EXPERTS),
    *_no_op("--enable-ep-weight-filter", SWITCH, NO_EXPERTS),
    *_no_op("--data-parallel-rank/-dpn --data-parallel-start-rank/-dpr --data-parallel-address/-dpa "
            "--data-parallel-rpc-port/-dpp --data-parallel-backend/-dpb --master-addr --master-port "
            "--distributed-timeout-seconds", VALUE, ONE_DEVICE),
    *_refused("--data-parallel-hybrid-lb/-dph --data-parallel-external-lb/-dpe --data-parallel-multi-port/-dpm",
              SWITCH, f"replicas are {LATER}: start one server per replica"),
    *_refused("--distributed-executor-backend", VALUE, f"Ray is {LATER}", "uni", "mp"),
    *_refused("--nnodes/-n", VALUE, f"several machines are {LATER}", "1"),
    *_refused("--node-rank/-r", VALUE, f"several machines are {LATER}", "0"),
    *_refused("--device-ids", LIST, "the environment variable CUDA_VISIBLE_DEVICES chooses the GPU", "0"),
    *_no_op("--numa-bind", SWITCH, "start Quire under numactl to bind it"),
    *_no_op("--numa-bind-nodes --numa-bind-cpus", LIST, "start Quire under numactl to bind it"),
    *_no_op("--disable-custom-all-reduce --disable-nccl-for-dp-synchronization", SWITCH, ONE_DEVICE),
    *_refused("--worker-cls", VALUE, CODE, "auto"),
    *_refused("--worker-extension-cls", VALUE, CODE),
    *_refused("--enable-fault-tolerance", SWITCH, f"restarting a dead engine is {LATER}: let the service manager"),
    *_refused("--headless", SWITCH, REMOTE),
    *_refused("--grpc", SWITCH, "the server speaks HTTP"),
    *_refused("--api-server-count/-asc", VALUE, "one process speaks HTTP", "1"),
    *_no_op("--ray-workers-use-nsight", SWITCH, f"Ray is {LATER}"),
    *_refused("--worker-use-ray --engine-use-ray", SWITCH, f"Ray is {LATER}"),
)

CACHE = (
    *_works("--block-size --gpu-memory-utilization --kv-cache-memory-bytes --num-gpu-blocks-override "
            "--enable-prefix-caching"),
    *_no_op("--swap-space", VALUE, "preempted requests are computed again, nothing is swapped"),
    *_no_op("--preemption-mode", VALUE, "preempted requests are computed again"),
    *_refused("--kv-cache-dtype", VALUE, f"a quantized KV cache is {LATER}", "auto"),
    *_no_op("--kv-cache-dtype-skip-layers", LIST, f"a quantized KV cache is {LATER}"),
    *_no_op("--calculate-kv-scales", SWITCH, f"a quantized KV cache is {LATER}"),
    *_no_op("--prefix-caching-hash-algo", VALUE, "blocks are always known by sha256"),
    *_refused("--prefix-match-unit", VALUE, "prefixes are found by whole blocks"),
    *_refused("--kv-offloading-size", VALUE, TRANSFER, "0"),
    *_no_op("--kv-offloading-backend", VALUE, TRANSFER),
    *_no_op("--kv-sharing-fast-prefill", SWITCH, f"models whose layers share a KV cache are {LATER}"),
    *_refused("--kv-transfer-config --kv-events-config --ec-transfer-config --weight-transfer-config", VALUE,
              TRANSFER, "{}"),
    *_no_op("--use-v2-block-manager", SWITCH, "there is one block manager"),
)

BATCHING = (
    *_works("--max-num-batched-tokens --max-num-seqs --scheduling-policy --watermark --stream-interval"),
    _alias("--max-num-queued-reqs", "max_waiting"),
    _alias("--async-scheduling", "async_depth", SWITCH, "is --async-depth 2 here", on=2, off=1),
    *_refused("--max-num-scheduled-tokens", VALUE, "--max-num-batched-tokens is the one budget of a step"),
    *_refused("--long-prefill-token-threshold", VALUE, f"a bound on the chunks of one prompt is {LATER}", "0"),
    *_refused("--max-num-partial-prefills --max-long-partial-prefills", VALUE,
              f"a bound on prompts in progress is {LATER}", "1"),
    *_refused("--enable-chunked-prefill", SWITCH, "long prompts are always computed in chunks", ON),
    *_no_op("--disable-chunked-mm-input", SWITCH, TEXT_ONLY),
    *_no_op("--scheduler-reserve-full-isl", SWITCH, "a request is always admitted with room for its whole prompt"),
    *_refused("--prefill-schedule-interval", VALUE, f"replicas are {LATER}", "1"),
    *_no_op("--disable-hybrid-kv-cache-manager", SWITCH, "all layers of the models served keep the same tokens"),
    *_refused("--scheduler-cls", VALUE, CODE),
    *_refused("--num-scheduler-steps", VALUE, "a step makes one token per request", "1"),
    *_no_op("--multi-step-stream-outputs --disable-async-output-proc", SWITCH, "a step makes one token per request"),
    *_no_op("--scheduler-delay-factor", VALUE, "requests never wait for others to come"),
)

COMPILING = (
    *_works("--cudagraph-capture-sizes/--cuda-graph-sizes --max-cudagraph-capture-size"),
    *_no_op("-O/--optimization-level --compilation-config/-cc --performance-mode --max-seq-len-to-capture "
            "--max-context-len-to-capture", VALUE, NO_COMPILER),
)

FEATURES = (
    *_refused("--speculative-config/-sc", VALUE, DRAFTS, "{}"),
    *_refused("--spec-method --spec-model --spec-tokens --speculative-model --num-speculative-tokens "
              "--ngram-prompt-lookup-max --ngram-prompt-lookup-min", VALUE, DRAFTS),
    *_refused("--structured-outputs-config", VALUE, GRAMMAR, "{}", '{"backend": "auto"}'),
    *_refused("--guided-decoding-backend", VALUE, GRAMMAR, "auto"),
    *_refused("--reasoning-parser", VALUE, f"splitting reasoning from answers is {LATER}"),
    *_refused("--reasoning-config", VALUE, f"splitting reasoning from answers is {LATER}", "{}"),
    *_refused("--enable-reasoning", SWITCH, f"splitting reasoning from answers is {LATER}"),
    *_refused("--enable-lora --enable-lora-bias --enable-prompt-adapter", SWITCH, LORA),
    *_refused("--lora-modules --prompt-adapters", LIST, LORA),
    *_no_op("--fully-sharded-loras --enable-mixed-moe-lora-format", SWITCH, NO_LORA),
    *_no_op("--max-loras --max-lora-rank --max-cpu-loras --lora-dtype --lora-extra-vocab-size "
            "--default-mm-loras", VALUE, NO_LORA),
    *_no_op("--lora-target-modules", LIST, NO_LORA),
    *_no_op("--limit-mm-per-prompt --mm-processor-cache-gb --mm-encoder-tp-mode --mm-processor-kwargs "
            "--media-io-kwargs --mm-processor-cache-type --mm-encoder-attn-backend --video-pruning-rate", VALUE,
            TEXT_ONLY),
    *_no_op("--language-model-only --skip-mm-profiling --interleave-mm-strings --disable-mm-preprocessor-cache "
            "--enable-mm-embeds", SWITCH, TEXT_ONLY),
    *_refused("--additional-config", VALUE, CODE, "{}"),
)

OBSERVING = (
    *_works("--disable-log-stats --enable-log-requests --shutdown-timeout"),
    *_no_op("--disable-log-requests", SWITCH, "requests are logged only with --enable-log-requests"),
    *_no_op("--enable-log-outputs --enable-log-deltas", SWITCH, "texts of users never reach a log"),
    *_refused("--otlp-traces-endpoint", VALUE, f"tracing is {LATER}"),
    *_refused("--collect-detailed-traces", LIST, f"tracing is {LATER}"),
    *_refused("--kv-cache-metrics --enable-mfu-metrics", SWITCH, f"these metrics are {LATER}"),
    *_no_op("--kv-cache-metrics-sample", VALUE, f"these metrics are {LATER}"),
    *_no_op("--cudagraph-metrics --enable-logging-iteration-details", SWITCH, "/metrics holds what a step does"),
    *_refused("--enable-layerwise-nvtx-tracing", SWITCH, f"marks for a profiler are {LATER}"),
    *_refused("--profiler-config", VALUE, f"profiling through the server is {LATER}", "{}"),
    *_no_op("--jit-monitor-mode", VALUE, NO_COMPILER),
    *_no_op("--show-hidden-metrics-for-version", VALUE, "there are no hidden metrics"),
    *_no_op("--aggregate-engine-logging", SWITCH, ONE_DEVICE),
)

FRONTEND = (
    *_works("--config --host --port --uds --api-key --ssl-keyfile --ssl-certfile --allowed-origins --root-path "
            "--chat-template --enable-force-include-usage --h11-max-incomplete-event-size --h11-max-header-count"),
    _alias("--disable-uvicorn-access-log", "access_log", SWITCH, "is --no-access-log here", on=False, off=True),
    *_no_op("--disable-access-log-for-endpoints", VALUE, "requests are logged only with --access-log"),
    *_no_op("--uvicorn-log-level --log-config-file", VALUE, "the HTTP library itself logs nothing"),
    *_refused("--ssl-ca-certs", VALUE, "client certificates are not asked for; a proxy can do that"),
    *_refused("--ssl-cert-reqs", VALUE, "client certificates are not asked for; a proxy can do that", "0"),
    *_refused("--ssl-ciphers", VALUE, "the ciphers are Python's defaults; a proxy can choose others"),
    *_refused("--enable-ssl-refresh", SWITCH, "restart the server to read a new certificate"),
    *_no_op("--allow-credentials", SWITCH, "keys go in a header, never in cookies"),
    *_no_op("--allowed-methods --allowed-headers", VALUE, "--allowed-origins is enough: all that is served is allowed"),
    *_refused("--middleware", LIST, CODE),
    *_refused("--chat-template-content-format", VALUE, "text parts are joined and given to the template as one text",
              "auto", "string"),
    *_refused("--default-chat-template-kwargs", VALUE, "give chat_template_kwargs with each request", "{}"),
    *_refused("--trust-request-chat-template", SWITCH, "a request cannot bring its own template: --chat-template can"),
    *_refused("--enable-auto-tool-choice", SWITCH, TOOLS),
    *_refused("--tool-call-parser --tool-server", VALUE, TOOLS),
    *_no_op("--exclude-tools-when-tool-choice-none", SWITCH, TOOLS),
    *_no_op("--enable-prompt-tokens-details", SWITCH, "usage always tells how many prompt tokens were cached"),
    *_no_op("--enable-request-id-headers", SWITCH, "every answer has an X-Request-Id"),
    *_refused("--enable-per-request-metrics --enable-server-load-tracking", SWITCH,
              f"this is {LATER}; /metrics holds the server's totals"),
    *_refused("--tokens-only", SWITCH, "tokens and text go in and out of the same routes"),
    *_refused("--return-tokens-as-token-ids", SWITCH, "ask with return_tokens_as_token_ids in a request"),
    *_no_op("--fingerprint-mode", VALUE, "answers carry no system fingerprint"),
    *_no_op("--max-log-len", VALUE, "texts of users never reach a log"),
    *_refused("--response-role", VALUE, "the one who answers is the assistant", "assistant"),
    *_no_op("--disable-fastapi-docs --disable-frontend-multiprocessing --enable-offline-docs", SWITCH,
            "there is nothing to switch"),
)

PEER_FLAGS: tuple[PeerFlag, ...] = (*MODEL, *LOADING, *KERNELS, *PARALLEL, *CACHE, *BATCHING, *COMPILING, *FEATURES,
                                    *OBSERVING, *FRONTEND)
