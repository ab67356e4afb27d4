"""A random walk over engines on CPUs: models, sets of features, requests, and the answers of plain engines.

A number is the seed of an engine. A plain engine has one rank and no feature: no cache, no drafts, one step in flight.
"""

import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from quire import LLM, RequestOutput, SamplingParams
from quire.args.checkpoint import ModelArgs
from quire.assemble.engine import read_files
from quire.config.bundled import bundled_model
from quire.config.engine import EngineConfig
from quire.contracts.adapters import LoRARequest
from quire.contracts.blocks import KVGroup
from quire.contracts.structured import StructuredOutputsParams
from quire.plan.kinds import mixer
from quire.plan.kv_geometry import layer_groups
from quire.plan.meeting_rows.records import IDLE
from quire.plan.meetings import inputs_of, met
from quire.text.token_bytes import byte_alphabet

from ..support import eagle
from ..support import qwen_prediction as qwen
from ..support.adapters import everything, merge, named, write_adapter
from ..support.addresses import free_address
from ..support.foreign_models import random_foreign
from ..support.full import FULL
from ..support.prediction_layers import noisy, predicting
from ..support.tiny_models import MARGIN, Tiny, random_model, write_model

CONTEXT, LONGEST = 128, 90  # tokens of an engine's context, and of a request at most
POOL = 64 if FULL else 14  # requests of a model; an engine gets some of them
ADAPTERS = (3, 8) if FULL else (3,)  # their ranks
BASE: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "use_tqdm_on_load": False, "max_model_len": CONTEXT}
PLAIN: dict[str, Any] = {"enable_prefix_caching": False, "enforce_eager": True, "async_depth": 1, "max_num_seqs": 16}
ATOL = 3e-4  # of log-probabilities
NOISE = (3e-6, -3e-6) if FULL else ()  # 50 roundings of float32; the engines of CI are known to pass


@dataclass(frozen=True)
class Walked:
    """A checkpoint of the walk, made at first use.

    write     writes the checkpoint into a folder; returns its drafters by method, without "num_speculative_tokens"
    adapted   adapters can be merged into its weights
    """

    write: Callable[[Path], Mapping[str, dict[str, Any]]]
    adapted: bool = True


def tiny(family: str) -> Walked:
    """Return a random model of a family, which a noisy copy of it drafts for."""

    def write(folder: Path) -> Mapping[str, dict[str, Any]]:
        write_model(random_model(Tiny(family=family), 5), folder, family)
        return {"draft_model": {"model": str(noisy(folder, folder.parent / "noisy"))}}

    return Walked(write)


def foreign(model_type: str) -> Walked:
    """Return a random model of a family that runs through transformers' code."""

    def write(folder: Path) -> Mapping[str, dict[str, Any]]:
        random_foreign(model_type, 5).save_pretrained(folder)
        return {}

    return Walked(write, adapted=False)


def with_mtp(family: str) -> Walked:
    """Return a model with a layer that drafts, which knows some of its tokens."""

    def write(folder: Path) -> Mapping[str, dict[str, Any]]:
        predicting(folder, family, bundled_model(), 0.5)
        return {"mtp": {}}

    return Walked(write, adapted=family == "glm4_moe")


def with_heads(family: str) -> Walked:
    """Return a model with an EAGLE and an EAGLE-3 head, which know some of its tokens."""

    def write(folder: Path) -> Mapping[str, dict[str, Any]]:
        eagle.model(folder, bundled_model(), 0.04, family)
        heads = {kind: folder.parent / kind for kind in ("eagle", "eagle3")}
        return {k: {"model": str(eagle.write(at, k, eagle.knowing(k, folder)))} for k, at in heads.items()}

    return Walked(write)


def qwen_mtp(family: str) -> Walked:
    """Return a model with recurrent layers and a layer that drafts."""

    def write(folder: Path) -> Mapping[str, dict[str, Any]]:
        model = qwen.with_layer(family)
        qwen.write(model, qwen.own_tensors(model), folder)
        return {"mtp": {}}

    return Walked(write)


MODELS: dict[str, Walked] = {
    **{name: tiny(name) for name in ("qwen3", "gemma3_text", "gpt_oss", "llama4_text", "gemma4_inputs", "gemma4_moe")},
    **{name: tiny(name) for name in ("qwen3_moe", "deepseek_v3", "glm_moe_dsa", "deepseek_v32", "kimi_linear")},
    **{name: tiny(name) for name in ("nemotron_moe", "granite_moe", "falcon_h1", "lfm2_moe", "olmo_hybrid")},
    **{f"{name}+mtp": with_mtp(name) for name in ("glm4_moe", "deepseek_v3", "glm_moe_dsa", "deepseek_v32")},
    **{f"{name}+eagle": with_heads(name) for name in ("qwen3", "qwen3_5_text", "nemotron_h")},
    **{f"{name}+mtp": qwen_mtp(name) for name in ("qwen3_next", "qwen3_5_moe_text")},
    **{name: foreign(name) for name in ("starcoder2", "olmoe", "gpt_neox")},
}


@dataclass
class Asked:
    """A request, and what the plain engine answers.

    adapter   number of the adapter; 0: none
    chunks    parts of the prompt that may be reused by CacheBlend, all computed again; of engines that have it
    embeds    the prompt may be given as embeddings
    """

    prompt: list[int]
    params: dict[str, Any]
    adapter: int = 0
    chunks: list[list[int]] = field(default_factory=list)
    embeds: bool = False
    answer: RequestOutput | None = None


class Case:
    """A model of the walk with its adapters, its requests and their answers.

    methods     method of speculative decoding -> its keys of `speculative_config`
    embedding   [V, D] of the tokens
    """

    def __init__(self, name: str, tmp: Path) -> None:
        self.name, self.walked, self.folder = name, MODELS[name], tmp / "model"
        self.methods = {"ngram": {}, **self.walked.write(self.folder)}
        self.args = read_files(EngineConfig.from_flat(model=str(self.folder), **BASE)).args
        if not (self.folder / "tokenizer.json").exists():
            write_tokenizer(self.folder, self.args.vocab_size)
        drafting = f"layers.{self.args.num_layers}.", "mtp."  # a layer that drafts has no adapters

        def chosen(name: str) -> bool:
            return everything(name) and not any(part in name for part in drafting)

        self.adapters = [
            write_adapter(self.folder, tmp / f"a{rank}", rank=rank, size=0.06, chosen=chosen) for rank in ADAPTERS
        ]
        self.named: list[LoRARequest | None] = [None, *map(named, self.adapters)]
        merged = [merge(self.folder, one, tmp / f"merged{one.name}") for one in self.adapters * self.walked.adapted]
        rng = random.Random(name)
        self.asked = [self._request(rng) for _ in range(POOL)]
        for number, folder in enumerate([self.folder, *merged]):
            self._answer(folder, [one for one in self.asked if one.adapter == number])
        self.asked = [one for one in self.asked if one.answer is not None]
        assert len(self.asked) > POOL // 2, f"{name}: {len(self.asked)} answers do not depend on rounding"

    def _request(self, rng: random.Random) -> Asked:
        vocab = self.args.vocab_size
        stems = [[], [(7 * i) % vocab for i in range(40)], [(5 * i + 3) % vocab for i in range(57)]]
        stem = rng.choice(stems)
        prompt = stem + [rng.randrange(vocab) for _ in range(rng.randint(1, 12))]
        params: dict[str, Any] = {"max_tokens": rng.choice([1, 6, 12, 20]), "ignore_eos": True, "temperature": 0.0}
        params["logprobs"] = rng.choice([2, 2, 0])
        asked = Asked(prompt, params)
        kind = rng.random()
        if kind < 0.15:
            params["prompt_logprobs"] = 1
        elif kind < 0.3:
            params["structured_outputs"] = StructuredOutputsParams(regex="[A-Za-z]{4,30}")
        elif kind < 0.4:
            params["n"] = 2
        elif kind < 0.5:
            params |= {"temperature": 0.8, "seed": rng.randrange(1000)}
        elif kind < 0.6:
            asked.embeds = True
        if kind > 0.15 and len(stem) > 8 and rng.random() < 0.5:
            asked.chunks = [[0, len(stem)]] if rng.random() < 0.3 else [[3, len(stem)]]
        if self.walked.adapted and rng.random() < 0.3:
            asked.adapter = rng.randint(1, len(ADAPTERS))
        return asked

    def _answer(self, folder: Path, asked: list[Asked]) -> None:
        """Set the answers of requests. A greedy one ends before its first close choice.

        Other weights by a few roundings must give the same numbers; else a choice of experts is close, and the request
        has no answer.
        """
        for change in (0.0, *NOISE):
            with LLM(str(changed(folder, change)), **BASE | PLAIN) as llm:

                def outputs(some: list[Asked], llm: LLM = llm) -> list[RequestOutput]:
                    given = [one.prompt for one in some]
                    return llm.generate(given, [self.params(one) for one in some], use_tqdm=False)

                if change:
                    for one, output in zip(asked, outputs(asked), strict=True):
                        if one.answer is not None and differs(output, one.answer):
                            one.answer = None
                    continue
                greedy = [one for one in asked if not one.params["temperature"]]
                scored = [Asked(one.prompt, one.params | {"logprobs": 2}) for one in greedy]
                for one, output in zip(greedy, outputs(scored), strict=True):
                    one.params["max_tokens"] = clear_tokens(output)
                asked = [one for one in asked if one.params["max_tokens"]]
                for one, output in zip(asked, outputs(asked), strict=True):
                    one.answer = output
                if folder == self.folder:
                    with torch.inference_mode():
                        self.embedding = llm.engine.runner.model.embed(torch.arange(self.args.vocab_size)).clone()

    def params(self, one: Asked, **more: Any) -> SamplingParams:
        return SamplingParams(**one.params | more)


def changed(folder: Path, change: float) -> Path:
    """Return a copy of a checkpoint whose weights differ by this part of them, times random numbers; 0: itself."""
    if not change:
        return folder
    copy = folder.parent / f"{folder.name}{change}"
    shutil.copytree(folder, copy)
    for file in copy.glob("*.safetensors"):
        noise, weights = torch.Generator().manual_seed(0), load_file(file)
        for name, one in weights.items():
            weights[name] = one * (1 + change * torch.randn(one.shape, generator=noise))
        save_file(weights, file, {"format": "pt"})
    return copy


def differs(found: RequestOutput, answer: RequestOutput) -> str:
    """Return how an output differs from an answer: in its tokens, its end, or in log-probabilities that it has."""
    for ours, theirs in zip(found.outputs, answer.outputs, strict=True):
        if (ours.token_ids, ours.finish_reason) != (theirs.token_ids, theirs.finish_reason):
            return f"{ours.token_ids} {ours.finish_reason} {ours.error}, not {theirs.token_ids} {theirs.finish_reason}"
        if words := _other_numbers(ours.logprobs, theirs.logprobs):
            return words
    return _other_numbers(found.prompt_logprobs, answer.prompt_logprobs)


def _other_numbers(ours: Any, theirs: Any) -> str:
    if (ours is None) != (theirs is None) or len(ours or ()) != len(theirs or ()):
        return "other rows of log-probabilities"
    for at, (row, other) in enumerate(zip(ours or (), theirs or (), strict=True)):
        for token, one in list((other or {}).items())[:1]:  # that was chosen, or is in the prompt
            if token not in row or abs(row[token].logprob - one.logprob) > ATOL:
                return f"row {at}: {row}, not {other}"
    return ""


def clear_tokens(output: RequestOutput) -> int:
    """Return the number of tokens before the first choice that rounding could change."""
    for at, row in enumerate(output.outputs[0].logprobs or ()):
        best, *others = sorted((one.logprob for one in row.values()), reverse=True)[:2]
        if others and np.isfinite(others[0]) and best - others[0] < MARGIN:
            return at
    return len(output.outputs[0].token_ids)


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Write a tokenizer whose ids are bytes, letters first."""
    letters = sorted(byte_alphabet(), key=lambda letter: (not letter.isascii(), letter))
    backend = Backend(models.BPE(vocab={letter: i for i, letter in enumerate(letters[:vocab])}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


# --- features -----------------------------------------------------------------------------------------------------

RANKS: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"data_parallel_size": 2},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    {"data_parallel_size": 2, "enable_expert_parallel": True},
    {"data_parallel_size": 2, "pipeline_parallel_size": 2, "enable_expert_parallel": True},
    {"data_parallel_size": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True},
]
MOVES: dict[str, Any] = {
    "enable_eplb": True,
    "eplb_config": {"num_redundant_experts": 4, "step_interval": 6, "window_size": 4},
}


def features(case: Case, rng: random.Random, tmp: Path, *, ranks: bool | None = None) -> dict[str, Any]:
    """Draw the options of an engine: each feature that the table allows beside those before it.

    ranks   whether there are several; None: drawn
    """
    options: dict[str, Any] = {
        "block_size": rng.choice([8, 16, 32]),
        "async_depth": rng.choice([1, 2, 2]),
        "max_num_batched_tokens": rng.choice([16, 64, 512]),
        "max_num_seqs": rng.choice([2, 7, 12]),
        "enable_prefix_caching": rng.random() < 0.85,
        "enforce_eager": rng.random() < 0.3,
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
    }

    def draw(chance: float, *choices: Mapping[str, Any]) -> None:
        if rng.random() < chance and possible(case, more := options | rng.choice(choices)):
            options.update(more)

    if ranks is not False:
        draw(0.5 if ranks is None else 1.0, *RANKS)
    drafts = [
        {"method": name, "num_speculative_tokens": rng.randint(1, 3)} | keys for name, keys in case.methods.items()
    ]
    features = [
        (0.25, MOVES),
        (0.2, {"expert_placement_strategy": "round_robin"}),
        (0.2, {"check_collectives": True}),
        (0.4, {"enable_cache_blend": True}),
        (0.4, {"enable_lora": True, "max_loras": rng.choice([1, 2]), "max_lora_rank": 8}),
        (0.3, {"enable_prompt_embeds": True}),
        (0.4, {"kv_offload_gb": 0.02, "kv_offload_policy": rng.choice(["lazy", "write_through"])}),
        (0.3, {"kv_offload_dir": str(tmp / "kv")}),
        (0.2, {"kv_share": free_address(4)}),
        (0.3, {"state_checkpoint": rng.choice(["every=16", "none", "turn"]), "state_memory_fraction": 0.5}),
    ]
    features += [(0.9 / len(drafts), {"speculative_config": one}) for one in drafts]
    rng.shuffle(features)
    features.sort(key=lambda one: "kv_offload_dir" in one[1] or "kv_share" in one[1])  # behind host memory
    for chance, one in features:
        if not ("speculative_config" in one and "speculative_config" in options):
            draw(chance, one)
    if rng.random() < 0.4:
        options["num_gpu_blocks_override"] = few_blocks(case.args, options)
    else:
        options["kv_cache_memory_bytes"] = 1 << 24
    return options


def possible(case: Case, options: Mapping[str, Any]) -> bool:
    """Return True if no row of the table applies to an engine, but for options without effect."""
    config = EngineConfig.from_flat(model=str(case.folder), device="cpu", **BASE, **options)
    facts = read_files(config).facts
    return all(one.status == IDLE for one in met(inputs_of(config, facts.args, "cpu", draft=facts.draft)))


def few_blocks(args: ModelArgs, options: Mapping[str, Any]) -> int:
    """Return the number of blocks for two of the longest requests."""
    size, chunk = options["block_size"], options["max_num_batched_tokens"]
    windows = [mixer(args.layers[layers[0]].mixer).window for layers in layer_groups(args)]
    groups = [KVGroup(layers=(), components=(), block_size=size, window=one) for one in windows]
    return 2 * sum(one.most_blocks(CONTEXT, chunk) for one in groups) + 2
