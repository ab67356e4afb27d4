"""Rows of the table of what works with what, by theme."""

from quire.plan.meeting_rows.records import IDLE, MISSING, REFUSED, REQUEST, STEPS, VERIFY, Row

OFF = "leave out --enable-cache-blend"
NGRAM = 'use "method": "ngram", or leave out --speculative-config'
MEMORY = "set kv_offload_gb, too, such as 8"
ONE = "leave one of them out"
RANKS: tuple[Row, ...] = (
    Row("-tp", "uneven heads", REFUSED, "-tp {tp}: {uneven_parts} cannot be divided by {tp}",
        "use -tp {fitting_tp}"),
    Row("-tp", "uneven KV heads", REFUSED,
        "-tp {tp}: {uneven_parts} can be neither divided nor copied evenly among {tp} ranks",
        "use -tp {fitting_tp}"),
    Row("-pp", "fewer layers", REFUSED, "-pp {pp}: the model has only {layers} layers, and every stage needs a layer",
        "use -pp {layers} at most"),
    Row("-pp", "shared KV", MISSING, "they may be on another stage than the layers with their KV",
        "leave out -pp, or use -tp"),
    Row("-tp", "layers in one piece", MISSING, "{in_one_piece}", "leave out -tp, or use -pp"),
    Row("-pp", "layer inputs", MISSING, "the first stage alone has embeddings", "leave out -pp, or use -tp"),
    Row("layer partition", "other layers", REFUSED, "pipeline_layer_partition={partition}: {partition_stages} stages "
        "with {partition_layers} layers do not fit -pp {pp} and the model's {layers} layers",
        "give {pp} numbers that add up to {layers}"),
    Row("several ranks", "too many ranks", REFUSED,
        "{parallel}: {ranks} ranks are more than the {most_ranks} that can be planned", "lower a size"),
    Row("hosts", "uneven hosts", REFUSED, "{parallel}: {ranks} ranks cannot be divided equally among {hosts} hosts",
        "change nnodes, or a size"),
    Row("hosts", "Ray", REFUSED, "nnodes={hosts}: Ray knows its hosts itself",
        "leave out nnodes, or use distributed_executor_backend=mp"),
    Row("Ray", "one rank", REFUSED, "distributed_executor_backend=ray: one rank runs on this host, without Ray",
        "leave it out, or ask for several ranks (-tp, -pp, -dp)"),
    Row("local replicas", "other replicas", REFUSED,
        "data_parallel_size_local={local}: {hosts} hosts (nnodes) with {local} replicas each do not have {dp} (-dp)",
        "give at most {dp}, and leave out nnodes where hosts have other numbers"),
    Row("local replicas", "Ray", IDLE, "data_parallel_size_local changes nothing: Ray chooses the nodes of replicas"),
    Row("collective checks", "captured exchanges", REFUSED,
        "check_collectives waits for the GPUs at each collective, and CUDA graphs cannot capture that",
        "add enforce_eager (--enforce-eager), or leave check_collectives out"),
)  # fmt: skip
EXPERTS: tuple[Row, ...] = (
    Row("-ep", "no experts", REFUSED, "--enable-expert-parallel: this model has no experts", "leave it out"),
    Row("-ep", "fewer experts", REFUSED,
        "{parallel}: {experts} experts are fewer than the {expert_ranks} ranks (tp x dp) that share them",
        "lower -tp or -dp"),
    Row("overrides", "layers of transformers", MISSING, "the module is read with the config.json of its folder",
        "leave out hf_overrides, and change a copy of config.json"),
    Row("-ep", "layers of transformers", MISSING, "the module chooses experts, and rows do not travel from there",
        "leave out --enable-expert-parallel, or use -tp"),
    Row("routing", "layers of transformers", MISSING, "the module chooses experts", "leave it out"),
    Row("-ep", "one expert rank", IDLE, "--enable-expert-parallel changes nothing: one rank has all experts"),
    Row("EPLB", "no experts", REFUSED, "--enable-eplb: this model has no experts", "leave it out"),
    Row("EPLB", "one expert rank", REFUSED,
        "--enable-eplb: {parallel} has nothing to balance, because no two ranks divide whole experts",
        "add {more_ranks}, or leave it out"),
    Row("EPLB", "uneven slots", REFUSED, "eplb_config: num_redundant_experts={redundant}: {slots} slots for "
        "{experts} experts do not divide among {expert_ranks} ranks", "use {fitting_slots}"),
    Row("EPLB", "too many slots", REFUSED, "eplb_config: num_redundant_experts={redundant}: a rank would have more "
        "slots than there are experts ({experts})", "use at most {most_redundant}"),
    Row("exchange", "no exchange", IDLE, "--all2all-backend {exchange} changes nothing: every rank has the tokens of "
        "its experts, because no replicas share experts"),
    Row("round robin", "idle placement", IDLE,
        "--expert-placement-strategy round_robin changes nothing: {idle_placement}"),
    Row("routing", "no experts", REFUSED, "routing={routing} is for models with experts, which this one has not",
        "leave it out"),
    Row("routing", "real weights", REFUSED, "routing={routing} ignores what a model has learned",
        "use it only with load_format=dummy"),
)  # fmt: skip
DRAFTS: tuple[Row, ...] = (
    Row("drafts", "planned method", MISSING, "drafts come by method ngram, mtp, draft_model, eagle or eagle3 alone",
        'use "method": "ngram"'),
    Row("MTP", "not one MTP layer", REFUSED, "speculative_config: method mtp drafts with the multi-token-prediction "
        "(MTP) layer of the checkpoint, which {mtp_layers}", NGRAM),
    Row("EAGLE", "dynamic rope", MISSING, "its positions beyond the trained context change with it",
        "use another head"),
    Row("EAGLE", "layers of transformers", MISSING, "no head for such a model was tried", NGRAM),
    Row("EAGLE", "other width", REFUSED,
        "speculative_config: the EAGLE head {draft} reads states of {draft_width} numbers and the model's have {width}",
        "use the head that was made for this model"),
    Row("EAGLE", "lacking layers", REFUSED, "speculative_config: the EAGLE head {draft} reads the states before "
        "layer {odd_layer}, and the model has the layers 0 to {last_layer}",
        "use the head that was made for this model"),
    Row("drafts of another model", "other vocabulary", REFUSED,
        "speculative_config: the draft model {draft} has {draft_vocabulary} token ids and the model has {vocabulary}",
        "use a draft model with the model's vocabulary"),
    Row("drafts of another model", "shorter context", REFUSED, "speculative_config: the draft model {draft} has a "
        "context of {draft_context} tokens and the engine of {length}",
        "lower max_model_len to {draft_context}, or use another draft model"),
    Row("drafts of another model", "shorter draft length", REFUSED, 'speculative_config: "max_model_len": '
        '{draft_length} is below the {length} tokens of the engine, whose requests have drafts in all of their '
        'context', "raise it, or leave it out"),
    Row("drafts of another model", "other ranks", REFUSED, "speculative_config: draft_tensor_parallel_size="
        "{draft_ranks}: the ranks of a stage (-tp {tp}) divide the drafter, or each has the whole of it",
        "use 1 or {tp}"),
    Row("drafts of another model", "uneven drafter", REFUSED, "speculative_config: {uneven_draft} of the drafter "
        "{draft} can be neither divided nor copied evenly among {tp} ranks", 'give "draft_tensor_parallel_size": 1'),
    Row("drafts of the model", "other ranks", IDLE, "speculative_config: draft_tensor_parallel_size={draft_ranks} "
        "changes nothing: method {method} drafts on all ranks of the model (tensor_parallel_size={tp})"),
    Row("shared choice", "no indexer", IDLE, "speculative_config: index_share_for_mtp_iteration changes nothing: the "
        "layer that drafts attends to all tokens"),
)  # fmt: skip
STATES: tuple[Row, ...] = (
    Row("CacheBlend", "states", MISSING, "a state stands for all tokens before it", OFF),
    Row("places of checkpoints", "no states", IDLE, "state_checkpoint changes nothing: no layer keeps states"),
    Row("state memory", "no states", IDLE, "state_memory_fraction changes nothing: no layer keeps states"),
    Row("type of matrices", "no matrices", IDLE, "mamba_ssm_cache_dtype changes nothing: no layer keeps matrices"),
)  # fmt: skip
NO_DCP = "leave out --decode-context-parallel-size"
LATENTS: tuple[Row, ...] = (
    Row("rows of latents", "other attention", REFUSED,
        "--kv-cache-dtype fp8_ds_mla is a type of latents, and some layers here attend without them",
        "use --kv-cache-dtype fp8"),
    Row("-dcp", "uneven contexts", REFUSED, "-dcp {dcp}: the {tp} ranks of -tp cannot be divided into groups of {dcp}",
        "use a -dcp that divides -tp"),
    Row("-dcp", "other attention", MISSING, "kernels of latents alone return log-sum-exps; -tp divides heads", NO_DCP),
    Row("-dcp", "chosen tokens", MISSING, "an indexer compares the keys of all tokens, not of a rank's alone", NO_DCP),
    Row("-dcp", "drafts of another model", MISSING, "such a drafter has no groups that divide contexts", NGRAM),
    Row("-dcp", "CacheBlend", MISSING, "a text at other positions would be on other ranks", NO_DCP),
    Row("-dcp", "sharing", MISSING, "a rank has some tokens of each block alone", NO_DCP),
    Row("-dcp", "peers", MISSING, "a rank has some tokens of each block alone", NO_DCP),
)  # fmt: skip
BLEND: tuple[Row, ...] = (
    Row("CacheBlend", "no prefix cache", MISSING, "texts are reused from the prefix cache", OFF),
    Row("CacheBlend", "layers of transformers", MISSING, "the module rotates heads, and moved keys are rotated by ours",
        OFF),
    Row("CacheBlend", "few layers", MISSING, "the first {check_layers} compute all tokens", OFF),
    Row("CacheBlend", "rows of latents", MISSING, "its kernels move latents of one scale alone",
        "use --kv-cache-dtype fp8 or auto"),
    Row("CacheBlend", "chosen tokens", MISSING, "its layers share a choice of tokens, which is made for all rows", OFF),
)  # fmt: skip
NO_EMBEDS = "leave out --enable-prompt-embeds"
EMBEDS: tuple[Row, ...] = (
    Row("prompt embeddings", "CacheBlend", MISSING, "texts are found again by their tokens", NO_EMBEDS),
    Row("prompt embeddings", "layer inputs", MISSING, "each layer reads an embedding of the token, too", NO_EMBEDS),
    Row("prompt embeddings", "KV events", MISSING, "events name a block by its tokens", NO_EMBEDS),
    Row("prompt embeddings", "mock", REFUSED, "enable_prompt_embeds: device=mock has no layers", "leave it out"),
)  # fmt: skip
TIERS: tuple[Row, ...] = (
    Row("sharing", "no host memory", REFUSED,
        "kv_share: engines read each other's blocks through host memory, and kv_offload_gb is 0", MEMORY),
    Row("peers", "no host memory", REFUSED,
        "kv_peers: engines read each other's blocks through host memory, and kv_offload_gb is 0", MEMORY),
    Row("disk", "no host memory", REFUSED,
        "kv_offload_dir={folder}: blocks go to a disk through host memory, and kv_offload_gb is 0", MEMORY),
    Row("tier policy", "no host memory", REFUSED,
        "kv_offload_policy={policy}: no block goes to host memory, because kv_offload_gb is 0", MEMORY),
    Row("folder size", "no folder", REFUSED,
        "kv_offload_dir_gb={folder_size}: there are no files, because no folder is named", "give kv_offload_dir, too"),
    Row("shared folder", "no folder", REFUSED, "kv_offload_dir_shared: no folder is named", "give kv_offload_dir, too"),
    Row("host memory", "no prefix cache", REFUSED,
        "kv_offload_gb={offload}: blocks are found again by the prefix cache, which is off",
        "leave out enable_prefix_caching=False, or kv_offload_gb"),
    Row("KV events", "no prefix cache", REFUSED, "kv_events_config tells the content of the prefix cache, which is off",
        "leave out enable_prefix_caching=False, or kv_events_config"),
    Row("prefill node", "no sharing", REFUSED, "kv_transfer_config: kv_role={role} without kv_share",
        "a prefill node shares its blocks (--kv-share HOST:PORT)"),
    Row("decode node", "no peers", REFUSED, "kv_transfer_config: kv_role={role} without kv_peers",
        "a decode node reads blocks of prefill nodes (--kv-peers)"),
    Row("sharing", "not Linux", MISSING, "it needs memory that processes share, which is implemented for Linux alone",
        "leave it out", what="sharing on this system"),
)  # fmt: skip
NO_INVARIANCE = "leave out --batch-invariant"
INVARIANCE: tuple[Row, ...] = (
    Row("batch invariance", "-tp", MISSING, "ranks add parts of a sum in an order that depends on the number of rows",
        "use -pp or -dp, or leave out --batch-invariant"),
    Row("batch invariance", "lock-step", MISSING, "the sums of ranks follow the rows that replicas exchange",
        "leave out --enable-expert-parallel, or --batch-invariant"),
    Row("batch invariance", "CacheBlend", REFUSED, "batch_invariant: CacheBlend reuses KV that was computed behind "
        "other texts, so bits depend on what is cached", "leave out --enable-cache-blend"),
    Row("batch invariance", "adapters", MISSING, "products of adapters are divided by the rows of an adapter",
        NO_INVARIANCE),
    Row("batch invariance", "layers of transformers", MISSING, "the module runs kernels of PyTorch, which choose the "
        "order of a sum by the number of rows", NO_INVARIANCE),
    Row("batch invariance", "latent attention", MISSING, "prompts expand latents and decodes absorb them, which are "
        "two orders of a sum", NO_INVARIANCE),
    Row("batch invariance", "recurrent layers on a GPU", MISSING, "prompts go through a state in chunks and decodes "
        "row by row, which are two orders of a sum", "use --device cpu, or leave out --batch-invariant"),
    Row("batch invariance", "coded cache", MISSING, "its kernels read and write caches of the computation's type alone",
        "leave out --kv-cache-dtype, or --batch-invariant"),
    Row("batch invariance", "gated shared experts on a CPU", MISSING, "PyTorch's sigmoid of a number depends on the "
        "numbers beside it", NO_INVARIANCE),
)  # fmt: skip
ADAPTERS: tuple[Row, ...] = (
    Row("adapters", "routing", IDLE, "routing={routing}: adapters of routers change nothing, because no router runs"),
    Row("adapters of experts", "lock-step", MISSING,
        "rows travel to the experts of other replicas without their adapters, whose slots differ by replica",
        "leave experts out of lora_target_modules, or leave out --enable-expert-parallel"),
    Row("adapters of experts", "EPLB", MISSING, "experts move between ranks without the matrices of adapters",
        "leave experts out of lora_target_modules, or leave out --enable-eplb"),
    Row("slots of adapters", "no adapters", IDLE, "max_loras changes nothing without enable_lora"),
    Row("rank of adapters", "no adapters", IDLE, "max_lora_rank changes nothing without enable_lora"),
    Row("held adapters", "no adapters", IDLE, "max_cpu_loras changes nothing without enable_lora"),
    Row("modules of adapters", "no adapters", IDLE, "lora_target_modules changes nothing without enable_lora"),
    Row("sharded adapters", "no adapters", IDLE, "fully_sharded_loras changes nothing without enable_lora"),
    Row("sharded adapters", "no slices", IDLE, "fully_sharded_loras changes nothing with tensor_parallel_size=1"),
    Row("sharded adapters", "-tp", MISSING,
        "each rank has one matrix of an adapter whole, and cutting it, too, would add an exchange between the ranks to "
        "each linear layer", "leave it out: answers are the same, and --max-loras decides the memory of adapters"),
)  # fmt: skip
HOST_WEIGHTS: tuple[Row, ...] = (
    Row("weights in host memory", "a CPU", REFUSED, "cpu_offload_gb={cpu_offload}: the memory of a CPU is host memory, "
        "so no weights can leave it", "leave out --cpu-offload-gb; a quantized model takes less memory"),
    Row("weights in host memory", "mock", REFUSED, "cpu_offload_gb={cpu_offload}: device=mock has no weights",
        "leave out --cpu-offload-gb"),
    Row("weights in host memory", "EPLB", MISSING, "experts move between ranks in the memory of the GPUs, and the "
        "copies in host memory would stay behind", "leave out --enable-eplb, or --cpu-offload-gb"),
)  # fmt: skip
LIFE: tuple[Row, ...] = (
    Row("new weights", "disk", MISSING, "files name blocks by the weights of the start", "leave out --kv-offload-dir"),
    Row("new weights", "sharing", MISSING, "peers know its blocks by the weights of the start", "leave out --kv-share"),
    Row("new weights", "peers", MISSING, "blocks of peers are of the weights of the start", "leave out --kv-peers"),
    Row("new weights", "EPLB", MISSING, "the loader fills the ranks of the start", "leave out --enable-eplb"),
    Row("new weights", "layers of transformers", MISSING, "no such model was tried", "leave it out"),
    Row("sleep", "sharing", MISSING, "other engines would read memory that is not there", "leave out --kv-share"),
    Row("sleep", "EPLB", MISSING, "level 2 reads experts for the ranks of the start", "leave out --enable-eplb"),
    Row("sleep", "layers of transformers", MISSING, "no such model was tried", "leave it out"),
    Row("weights in host memory", "new weights", MISSING, "the copies would stay behind", "leave out --cpu-offload-gb"),
    Row("weights in host memory", "sleep", MISSING, "the copies have no part in it", "leave out --cpu-offload-gb"),
    Row("restarts", "new weights", REFUSED,
        "restart: the next core would have the weights of the files, not those that came",
        "leave out --restart, or --weight-transfer-config"),
    Row("restarts", "hosts or Ray", MISSING, "ranks of other hosts end with the core that started them",
        "leave out --restart, and start all hosts again"),
    Row("mock", "new weights", REFUSED, "weight_transfer_config: device=mock has no weights", "leave it out"),
    Row("mock", "sleep", REFUSED, "enable_sleep_mode: device=mock has no memory to free", "leave it out"),
)  # fmt: skip
DEVICES: tuple[Row, ...] = (
    Row("GPU memory", "a CPU", IDLE, "gpu_memory_utilization changes nothing on a CPU"),
    Row("graph sizes", "a CPU", IDLE, "cudagraph_capture_sizes changes nothing on a CPU"),
    Row("largest graph", "a CPU", IDLE, "max_cudagraph_capture_size changes nothing on a CPU"),
    Row("mock", "KV tiers", REFUSED, "device=mock has no tiers of KV blocks",
        "leave out kv_offload_gb, kv_offload_dir, kv_transfer_config, kv_share and kv_peers"),
    Row("mock", "drafts of layers", REFUSED, "speculative_config: device=mock has no layers for method {method}",
        'use "method": "ngram"'),
    Row("mock", "made-up acceptance", REFUSED,
        "speculative_config: device=mock takes 0, 1, ... and all drafts for right in turn",
        "leave out rejection_sample_method=synthetic"),
)  # fmt: skip
REQUESTS: tuple[Row, ...] = (
    Row("numbered chunks", "truncated prompt", REFUSED,
        "kv_chunks excludes truncate_prompt_tokens, which moves the tokens of the prompt", ONE, scope=REQUEST),
    Row("numbered chunks", "text prompt", REFUSED, "kv_chunks counts tokens, and the prompt is a text",
        "send token ids, put the engine's --blend-separator between the parts of the text, or mark content parts of "
        'messages with "kv_chunk": true', scope=REQUEST),
    Row("given embeddings", "chunks", REFUSED, "prompt_embeds excludes {chunks}, which counts tokens", ONE,
        scope=REQUEST),
    Row("given embeddings", "transfer", REFUSED, "prompt_embeds excludes kv_transfer_params, which finds KV by tokens",
        ONE, scope=REQUEST),
    Row("given embeddings", "prompt logprobs", REFUSED,
        "prompt_embeds excludes prompt_logprobs and echo, because the prompt has no tokens", ONE, scope=REQUEST),
    Row("given embeddings", "repetition penalty", REFUSED,
        "prompt_embeds excludes repetition_penalty, which reads the tokens of the prompt", ONE, scope=REQUEST),
    Row("given embeddings", "truncated prompt", REFUSED, "prompt_embeds excludes truncate_prompt_tokens",
        "cut the tensor before sending it", scope=REQUEST),
    Row("transfer", "stream", REFUSED, "kv_transfer_params: a prefill node answers as a whole",
        "leave out stream, and send max_tokens 1", scope=REQUEST),
)  # fmt: skip
VERIFIED: tuple[Row, ...] = (
    Row("verify", "-dp", REFUSED, "quire verify runs one request, on one replica", "leave out -dp", scope=VERIFY),
    Row("verify", "hosts or Ray", REFUSED, "quire verify reads files of its ranks", "use one host", scope=VERIFY),
    Row("verify", "random weights", REFUSED, "load_format=dummy makes random weights", "leave it out", scope=VERIFY),
    Row("verify", "layers of transformers", REFUSED, "quire verify would compare it with itself", scope=VERIFY),
    Row("verify", "other dtype", REFUSED, "quire verify compares step by step in float32",
        "leave out --dtype, or compare with a reference that --dump has stored (--against)", scope=STEPS),
    Row("verify", "overrides", REFUSED, "quire verify compares with transformers, which reads config.json as it is",
        "leave out --hf-overrides, and change a copy of config.json", scope=STEPS),
    Row("verify", "EPLB", REFUSED, "quire verify compares each rank's parameters with the files, and experts move",
        "leave out --enable-eplb", scope=STEPS),
    Row("verify", "weights in host memory", REFUSED, "quire verify compares parameters on the device with files, and "
        "those of some layers are in host memory", "leave out --cpu-offload-gb", scope=STEPS),
    Row("coded cache", "chosen tokens", REFUSED, "keys by which tokens are chosen are codes, too, and no bound says "
        "which other choice their rounding explains", "leave out --kv-cache-dtype", scope=STEPS),
)  # fmt: skip
ROWS: tuple[Row, ...] = (
    *RANKS,
    *EXPERTS,
    *DRAFTS,
    *STATES,
    *LATENTS,
    *BLEND,
    *EMBEDS,
    *TIERS,
    *ADAPTERS,
    *INVARIANCE,
    *HOST_WEIGHTS,
    *LIFE,
    *DEVICES,
    *REQUESTS,
    *VERIFIED,
)
