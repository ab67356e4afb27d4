"""Speculative decoding as an engine is asked for it: the keys of vLLM's `speculative_config`, and their meaning."""

import difflib
from collections.abc import Mapping
from typing import Any

import msgspec

from quire.contracts.errors import ConfigError, shown
from quire.contracts.step import MAX_VERIFY_ROWS

AUTO = (1, 3, 7)  # drafts to choose from with "auto"; of a device that captures steps, the first two
LOOKUP = 5  # tokens of an n-gram, as in vLLM
ALIASES = {"ngram_gpu": "ngram", "[ngram]": "ngram"}
METHODS = ("ngram", "mtp", "draft_model", "eagle", "eagle3")
HEADS = ("eagle", "eagle3")  # methods with a layer of another checkpoint, which reads the model's hidden states
MODELS = ("draft_model", *HEADS)  # methods with another checkpoint
LAYERED = ("mtp", *MODELS)  # methods with layers, and a KV cache of their own
MOST_LAYERED = 15  # drafts of these: each one costs a pass of the layers
PLANNED = ("suffix", "medusa", "mlp_speculator", "dflash", "dspark", "extract_hidden_states", "custom_class")
SIZES = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
OTHERS: Mapping[str, tuple[object, ...]] = {  # vLLM's other keys -> the values that change nothing here, beside None
    "rejection_sample_method": ("standard", "synthetic"), "draft_sample_method": ("greedy", "probabilistic"),
    "use_heterogeneous_vocab": (False,), "parallel_drafting": (False,), "enable_adaptive_verification": (False,),
    "disable_eagle_block_drop": (False, True),  # no block is dropped
    **dict.fromkeys(("kv_cache_dtype", "draft_load_config", "dspark_draft_topk", "suffix_decoding_max_tree_depth",
                     "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor",
                     "suffix_decoding_min_token_prob"), ()),
}  # fmt: skip
UNUSED = {  # vLLM's keys that change nothing here -> why; a value other than False is answered by a note
    "enforce_eager": "drafts are made in the steps of the model, which enforce_eager of the engine runs eagerly",
    "disable_padded_drafter_batch": "a drafter's passes are padded as the steps of the model are",
    "use_local_argmax_reduction": "ranks never gather the logits of drafts",
    "code_revision": "no code of a checkpoint runs",
    **dict.fromkeys(("moe_backend", "attention_backend"), "a drafter's kernels are chosen as the model's are"),
}
NAMES = "{}, {}, {}, {} and {}".format(*(f'"{name}"' for name in METHODS))
SYNTHETIC = ("synthetic_acceptance_length", "synthetic_acceptance_rates")
FIELDS: Mapping[str, tuple[type, tuple[str, ...]]] = {  # keys that are fields of `Speculation` -> type, methods
    "draft_tensor_parallel_size": (int, METHODS), "max_model_len": (int, MODELS), "revision": (str, MODELS),
    "quantization": (str, ("draft_model", "mtp")),  # of mtp a name of the checkpoint's
    "index_share_for_mtp_iteration": (bool, ("mtp",)),  # false for all: no pass of theirs shares a choice
}  # fmt: skip
MEANINGS = {int: "give a whole number from 1 on", str: "give a name", bool: "give true or false"}
KEYS = ("method", "model", *SIZES, "num_speculative_tokens_per_batch_size", *SYNTHETIC, *FIELDS)


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """Speculative decoding of an engine.

    method              the drafter; those in METHODS are implemented
    num_drafts          maximum number of drafts of a request in a step (k)
    model               folder or hub id of the draft model or EAGLE head; "": the method needs none
    shortest, longest   tokens of the n-grams that are looked up
    auto                numbers of drafts, ascending, from which the engine chooses by measured gain; (): `num_drafts`
    by_batch            (decoding requests, k), ascending: from so many requests on, each has at most k drafts
    synthetic           for measurements: shares of the runs in which the first draft counts, the first two, ...,
                        whatever was sampled; (): drafts count if they are right
    draft_tensor_parallel_size   ranks that divide the drafter: 0 or those of the model, or 1: each rank has the whole
    revision, quantization       of the draft model or EAGLE head; None: the default. The layer of method mtp has the
                        quantization of the checkpoint: a name must be one of it
    max_model_len       context of the draft model or EAGLE head that was asked for; 0: its own
    index_share_for_mtp_iteration   True: the later passes of the layer of method mtp attend to the tokens that the
                        first pass of a step has chosen; None: as the checkpoint says
    unused              keys that were given and change nothing
    """

    method: str
    num_drafts: int
    model: str = ""
    shortest: int = LOOKUP
    longest: int = LOOKUP
    auto: tuple[int, ...] = ()
    by_batch: tuple[tuple[int, int], ...] = ()
    synthetic: tuple[float, ...] = ()
    draft_tensor_parallel_size: int = 0
    revision: str | None = None
    quantization: str | None = None
    max_model_len: int = 0
    index_share_for_mtp_iteration: bool | None = None
    unused: tuple[str, ...] = ()

    @property
    def layered(self) -> bool:
        """True for a drafter with layers, which have a KV cache."""
        return self.method in LAYERED

    @property
    def head(self) -> str:
        """Method of the EAGLE head that drafts; "": there is none."""
        return self.method if self.method in HEADS else ""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Numbers of drafts that a request may have in a step, ascending, without 0."""
        return self.auto or tuple(sorted({k for _, k in self.by_batch or ((1, self.num_drafts),)} - {0}))

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines that the user should see."""
        unused = tuple(f"speculative_config: {name} changes nothing: {UNUSED[name]}." for name in self.unused)
        return (
            unused
            if not self.synthetic
            else (
                *unused,
                "for measurements only: rejection_sample_method=synthetic takes "
                f"{1 + sum(self.synthetic):.2f} tokens per run of drafts, right or wrong: answers are not the model's.",
            )
        )

    @property
    def lookup(self) -> tuple[int, int]:
        """Shortest and longest n-gram that is looked up; (0, 0): another method drafts."""
        return (self.shortest, self.longest) if self.method == "ngram" else (0, 0)

    def captured(self) -> "Speculation":
        """Return the speculation for a device that captures steps: a number of drafts that does not fit
        `MAX_VERIFY_ROWS` is 0, not a smaller number that is not captured."""
        auto = self.auto[:2]
        most = auto[-1] if auto else self.num_drafts
        asked = [(size, min(k, most)) for size, k in self.by_batch or ((1, most),)]
        ranges = tuple[tuple[int, int], ...]()
        for (size, k), (end, _) in zip(asked, [*asked[1:], (MAX_VERIFY_ROWS + 2, 0)], strict=True):
            room = MAX_VERIFY_ROWS // (1 + k)  # requests whose drafts fit
            ranges += ((size, k if size <= room else 0),)
            ranges += ((room + 1, 0),) if k and size <= room < end - 1 else ()
        return msgspec.structs.replace(self, num_drafts=most, auto=auto, by_batch=ranges)

    def __str__(self) -> str:
        number = f"0, {', '.join(map(str, self.auto))} (by measured gain)" if self.auto else str(self.num_drafts)
        words = f"{self.method}{f' {self.model}' * bool(self.model)}, {number} drafts per request"
        lengths = f"{self.shortest}" if self.shortest == self.longest else f"{self.shortest} to {self.longest}"
        lookup = f", the last {lengths} tokens looked up" if self.method == "ngram" else ""
        ranges = ", ".join(f"{k} from {size} requests on" for size, k in self.by_batch)
        false = ", SYNTHETIC acceptance: answers are not the model's" if self.synthetic else ""
        return words + lookup + (f" ({ranges})" if ranges else "") + false


def read_speculative_config(given: Mapping[str, Any] | None) -> Speculation | None:
    """Return the speculation that `speculative_config` asks for; None without any.

    Raises `ConfigError` for wrong names and values. A method that is only planned is returned, so that `explain` can
    tell what is missing.
    """
    given = {name: value for name, value in (given or {}).items() if value is not None}
    if not given:
        return None
    for name in given:
        if name not in KEYS and name not in OTHERS and name not in UNUSED:
            near = difflib.get_close_matches(str(name), (*KEYS, *OTHERS, *UNUSED), n=1)
            keys = ", ".join(f'"{key}"' for key in KEYS)
            raise _wrong(f"{shown(name)} does not exist", f'did you mean "{near[0]}"?' if near else f"use {keys}.")
    method = _method(given)
    if method not in METHODS:
        return Speculation(method=method, num_drafts=0)
    for name, value in given.items():
        if name in OTHERS and value not in OTHERS[name]:
            raise _wrong(f"{_said(name, value)} is not implemented for method {method}", "leave it out")
    layered = method in LAYERED
    if method in MODELS:
        if not isinstance(given.get("model"), str):
            raise _wrong(f"method {method} needs a model", "give the key model, a folder or hub id")
    elif "model" in given and ALIASES.get(str(given["model"]), given["model"]) != method:
        own = "drafts with the served model's own layers" if layered else "has no model"
        raise _wrong(
            f"method {method} {own}, and {shown(given['model'])} is given as model",
            "leave model out" + ', or give "method": "draft_model" for a model with its own KV' * layered,
        )
    if layered and (lookup := next((name for name in SIZES[1:] if name in given), "")):
        raise _wrong(f"{lookup}={shown(given[lookup])}: method {method} looks no n-grams up", f"leave {lookup} out")
    given = {"num_speculative_tokens": 1, **given} if method == "mtp" else given
    sizes = {
        name: _size(name, given[name], MOST_LAYERED if layered else MAX_VERIFY_ROWS - 1)
        for name in SIZES
        if name in given
    }
    if "num_speculative_tokens" not in sizes:
        raise _wrong(
            "num_speculative_tokens is missing", 'give it, as in {"method": "ngram", "num_speculative_tokens": 3}'
        )
    shortest, longest = (sizes.get(f"prompt_lookup_{name}") for name in ("min", "max"))
    shortest, longest = shortest or longest or LOOKUP, longest or shortest or LOOKUP
    if shortest > longest:
        raise _wrong(f"prompt_lookup_min={shortest} is above prompt_lookup_max={longest}", "lower prompt_lookup_min")
    most = sizes["num_speculative_tokens"]
    auto = AUTO if given["num_speculative_tokens"] == "auto" else ()
    model = given["model"] if method in MODELS else ""
    return Speculation(
        method=method,
        num_drafts=most,
        model=model,
        shortest=shortest,
        longest=longest,
        auto=auto,
        synthetic=_synthetic(given, most),
        **_fields(given, method),
        by_batch=_by_batch(given.get("num_speculative_tokens_per_batch_size", ()), most),
    )


def _fields(given: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Return the fields of `Speculation` that keys are named after, and the keys that change nothing."""
    found: dict[str, Any] = {"unused": tuple(name for name in UNUSED if given.get(name) not in (None, False))}
    for name, (kind, methods) in FIELDS.items():
        if name not in given:
            continue
        if kind is bool and given[name] is False and method not in methods:
            continue
        if method not in methods:
            raise _wrong(f"{_said(name, given[name])} is not implemented for method {method}", "leave it out")
        empty = kind is not bool and not given[name]
        if type(given[name]) is not kind or empty or (kind is int and given[name] < 1):
            raise _wrong(f"{_said(name, given[name])} has no meaning", MEANINGS[kind])
        found[name] = given[name]
    return found


def _synthetic(given: Mapping[str, Any], most: int) -> tuple[float, ...]:
    """Return `Speculation.synthetic`. A length of 2.6 is one right draft in 40% of the runs, two in the others."""
    length, rates = given.get(SYNTHETIC[0]), given.get(SYNTHETIC[1])
    asked = given.get("rejection_sample_method") == "synthetic"
    if not asked and length is None and rates is None:
        return ()
    found = list(rates) if isinstance(rates, list | tuple) else []
    if rates is None and length is not None and _within(length, 1, 1 + most):
        found = [min(1.0, max(0.0, length - 1 - place)) for place in range(most)]
    elif length is not None or len(found) != most or not all(_within(rate, 0, 1) for rate in found):
        asked = False
    if not asked or found != sorted(found, reverse=True):
        raise _wrong(
            "synthetic acceptance is asked for in a way that has no meaning",
            'give "rejection_sample_method": "synthetic", and either synthetic_acceptance_length, a number '
            f"from 1 to {1 + most}, or synthetic_acceptance_rates, {most} numbers from 1 to 0, none above the "
            "one before",
        )
    return tuple(map(float, found))


def _within(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _method(given: Mapping[str, Any]) -> str:
    """Return the method that is named, or that the name of the model stands for, as in vLLM."""
    if "method" not in given and "model" not in given:
        raise _wrong("method is missing", f"give it: {NAMES} are implemented")
    named = given.get("method", given.get("model"))
    method = str(ALIASES.get(str(named), named))
    if "method" not in given and method not in METHODS:
        return next((name for name in ("eagle3", "eagle", "dflash", "dspark") if name in method.lower()), "draft_model")
    if method.endswith("_mtp"):
        return "mtp"
    if method not in (*METHODS, *PLANNED):
        raise _wrong(f"method={shown(named)} does not exist", f"use {NAMES}")
    return method


def _size(name: str, value: object, drafts: int) -> int:
    if name == "num_speculative_tokens" and value == "auto":
        return AUTO[-1]
    most = drafts if name == "num_speculative_tokens" else 32
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        others = ', or "auto"' * (name == "num_speculative_tokens")
        raise _wrong(f"{name}={shown(value)} is out of range", f"give a whole number from 1 to {most}{others}")
    return value


def _by_batch(given: Any, most: int) -> tuple[tuple[int, int], ...]:
    """Return (first number of requests, k) of each range [first, last, k]; a gap belongs to the range before it."""
    found = list[tuple[int, int]]()
    end = 0
    for entry in given if isinstance(given, list | tuple) else (given,):
        numbers = entry if isinstance(entry, list | tuple) and len(entry) == 3 else ()
        if not numbers or any(type(number) is not int for number in numbers):
            break
        first, last, k = numbers
        if not (end < first <= last and 0 <= k <= most and (found or first == 1)):
            break
        found.append((first, k))
        end = last
    else:
        return tuple(found)
    raise _wrong(
        f"num_speculative_tokens_per_batch_size={shown(given)} is wrong",
        "give ranges [first, last, k] of batch sizes, ascending, the first from 1 on, and no k above "
        f"num_speculative_tokens={most}",
    )


def _said(name: str, value: object) -> str:
    """Return a key and its value as in JSON: some keys have the names of options, and messages show those as flags."""
    return f'"{name}": {shown(value)}'


def _wrong(what: str, remedy: str) -> ConfigError:
    return ConfigError(f"speculative_config: {what}: {remedy}{'' if remedy[-1] in '.?' else '.'}")
