"""Adapters (LoRA) in PEFT's form: adapter_config.json and adapter_model.safetensors, read without the weights.

y += scale * B (A x), with A = `lora_A.weight` [r, inputs] and B = `lora_B.weight` [outputs, r]. The tensors, not
`target_modules`, say which modules an adapter changes. scale = alpha / r, or alpha / sqrt(r) with `use_rslora`; r and
alpha may differ by module (`rank_pattern`, `alpha_pattern`). Source: github.com/huggingface/peft, tuners/lora.

A parameter with the matrices of all E experts (`target_parameters`) has A [E * r, inputs] with the ranks of an expert
one below the other, and B [outputs, r * E] with the experts of a rank side by side. Of two such parameters of a module,
the matrices of one stand under `base_layer`; their sizes tell which parameter they change.
No torch.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from quire.contracts.adapters import Adapter
from quire.contracts.errors import AdapterError, WeightsError, shown
from quire.contracts.text_table import read_rows
from quire.weights.files import AGAIN, StoredTensor, known_name, read_header

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
MAX_CONFIG = 4 << 20  # bytes
MOST = 1e9  # of a rank and of an alpha
MOST_REPEATS = 4  # repetitions of a pattern
PREFIX = "base_model.model."
FLOATS = ("F32", "BF16", "F16")
CHUNK = 8 << 20  # bytes summed at once
STARTS = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initializations that change the weights of the model
_LAYER = re.compile(r"(?:^|\.)(layers\.\d+\..+)$")
_MATRIX = re.compile(r"(.+)\.lora_([AB])\.weight")
_EXPERT = re.compile(r"layers\.(\d+)\.(?:.+\.)?experts\.(\d+)\.(\w+)")
_STACK = re.compile(r"layers\.(\d+)\.(?:.+\.)?experts((?:\.base_layer)*)")
_SLOW, _REPEATS = re.compile(r"\)[*+{]"), re.compile(r"[*+{]")
SIDES = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
PARAMETERS = ("gate_up_proj", "down_proj")  # of a module that has the matrices of all experts
_ROWS = [row for row in read_rows(Path(__file__).with_name("adapter_config.txt"))]
KNOWN = {key for _, keys, *_ in _ROWS for key in keys.split()}
REFUSED = {key: why[0] for kind, keys, *why in _ROWS if kind == "off" for key in keys.split()}


@dataclass(frozen=True)
class AdaptedModule:
    """The matrices of an adapter for a module.

    name   of the module in the adapter's files, without PEFT's prefix
    rank   rows of `a` and columns of `b`
    """

    name: str
    rank: int
    scale: float
    a: StoredTensor
    b: StoredTensor


@dataclass(frozen=True)
class AdaptedStack:
    """The matrices of an adapter for a parameter that has those of all experts; see the module.

    name    of the module in the adapter's files, without PEFT's prefix
    ranks   rank and scale that the config gives each of `PARAMETERS`
    """

    name: str
    ranks: Mapping[str, tuple[int, float]]
    a: StoredTensor
    b: StoredTensor


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter as its files describe it.

    modules   tail of a module's name (`tail_of`) -> its matrices
    stacks    number of a layer -> the matrices for parameters of all its experts
    """

    folder: Path
    modules: Mapping[str, AdaptedModule]
    stacks: Mapping[int, tuple[AdaptedStack, ...]]


def tail_of(module: str) -> str:
    """Return the end of a module's name by which checkpoints and adapters agree: from "layers.N." on.

    Wrappers of models put other names before it. A module outside of the layers has its last name, such as "lm_head".
    Experts have one spelling, `expert_tail`.
    """
    found = _LAYER.search(known_name(f"{module}.weight").removesuffix(".weight"))
    tail = found[1] if found else module.rpartition(".")[2]
    own = _EXPERT.fullmatch(tail)
    return expert_tail(int(own[1]), int(own[2]), SIDES.get(own[3], own[3])) if own else tail


def expert_tail(layer: int, expert: int, side: str) -> str:
    """Return the tail of an expert's matrix. side: gate, up or down"""
    return f"layers.{layer}.experts.{expert}.{side}"


def read_adapter(folder: Path) -> AdapterFiles:
    """Read config and header of an adapter. Raises `AdapterError` that names the file, the key or tensor, the fix."""
    config = read_adapter_config(folder)
    path = folder / WEIGHTS
    if not path.is_file():
        why = f"{folder} has no {WEIGHTS}"
        if (folder / PICKLE).is_file():
            why += f", only {PICKLE}, which can run code when opened and is not read"
        raise AdapterError(f"{why}: save the adapter with safe_serialization=True.")
    try:
        tensors = read_header(path)
    except (OSError, WeightsError) as error:
        raise AdapterError(str(error)) from None
    pairs: dict[str, dict[str, StoredTensor]] = {}
    for tensor in tensors:
        match = _MATRIX.fullmatch(tensor.name)
        if match is None:
            raise AdapterError(f"{path}: {_unknown(tensor.name)}")
        if tensor.dtype not in FLOATS:
            raise AdapterError(f"{path}: {tensor.name} is {tensor.dtype}: save the adapter as F32, BF16 or F16.")
        pairs.setdefault(match[1], {})[match[2]] = tensor
    if not pairs:
        raise AdapterError(f"{path} has no tensors: {AGAIN}")
    modules, stacks = list[AdaptedModule](), dict[int, tuple[AdaptedStack, ...]]()
    for name, pair in pairs.items():
        if own := _STACK.fullmatch(tail_of(name)):
            stacks[int(own[1])] = (*stacks.get(int(own[1]), ()), _stack(path, config, name, pair))
        else:
            modules.append(_module(path, config, name, pair))
    found = {tail_of(one.name): one for one in modules}
    if len(found) < len(modules):
        raise AdapterError(f"{path} has two adapters for one module of the model: {AGAIN}")
    return AdapterFiles(folder, found, stacks)


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the checked adapter_config.json. Raises `AdapterError` for keys that would change the answers."""
    path = folder / CONFIG
    if not path.is_file():
        raise AdapterError(f"{folder} has no {CONFIG}: give the folder of an adapter that PEFT has saved.")
    try:
        if path.stat().st_size > MAX_CONFIG:
            raise ValueError
        config = json.loads(path.read_bytes())
        if not isinstance(config, dict):
            raise ValueError
    except (ValueError, RecursionError, OSError):
        raise AdapterError(f"{path} is not a JSON object: {AGAIN}") from None
    for key, value in config.items():
        if key in REFUSED and value:
            raise AdapterError(f"{path}: {key}={shown(value)}: {REFUSED[key]}.")
        if key not in KNOWN and value:
            raise AdapterError(
                f"{path}: {shown(key)} is unknown, and its value {shown(value)} may change the answers: save the "
                "adapter without it."
            )
    _check_values(path, config)
    return config


def _check_values(path: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type", "LORA") != "LORA":
        raise AdapterError(f"{path}: peft_type={shown(config['peft_type'])} is not implemented: use LORA.")
    if config.get("bias", "none") not in ("none", None, False):
        raise AdapterError(f"{path}: bias={shown(config['bias'])} changes biases of the model: train it with none.")
    if config.get("fan_in_fan_out"):
        raise AdapterError(f"{path}: fan_in_fan_out is for models with transposed weights: use another adapter.")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(STARTS):
        raise AdapterError(
            f"{path}: init_lora_weights={shown(start)} has changed the model's weights, too: save the adapter with "
            "path_initial_model_for_weight_conversion."
        )
    for key, least in (("r", 1), ("lora_alpha", 0)):
        value = config.get(key)
        if not _is_number(value, least):
            raise AdapterError(f"{path}: {key}={shown(value)}: must be a number of at least {least}.")
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(key) or {}
        least = 1 if key == "rank_pattern" else 0
        if not isinstance(pattern, dict) or not all(_is_number(one, least) for one in pattern.values()):
            raise AdapterError(f"{path}: {key} must be an object of numbers of at least {least}.")
        for text in pattern:
            try:
                re.compile(text)
            except re.error:
                raise AdapterError(f"{path}: {key} has {shown(text)}, which is no pattern: correct it.") from None
            if _SLOW.search(text) or len(_REPEATS.findall(text)) > MOST_REPEATS:
                raise AdapterError(
                    f"{path}: {key} has {shown(text)}, which may take for ever to match: name the modules without "
                    f"repeated groups, and with at most {MOST_REPEATS} repetitions."
                )


def _is_number(value: object, least: int) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value < MOST


def _unknown(name: str) -> str:
    """Return the reason why a tensor of an adapter cannot be used."""
    if "lora_magnitude_vector" in name:
        return f"{name} belongs to DoRA: {REFUSED['use_dora']}."
    if "lora_embedding_" in name:
        return f"{name} changes the embedding, which is not implemented: train it without embed_tokens."
    if name.endswith((".lora_A.bias", ".lora_B.bias")):
        return f"{name}: {REFUSED['lora_bias']}."
    return f"{name} is no matrix of an adapter: {REFUSED['modules_to_save']}."


def _module(path: Path, config: Mapping[str, Any], stored: str, pair: Mapping[str, StoredTensor]) -> AdaptedModule:
    """Return the matrices of a module. stored: its name in the file"""
    name = stored.removeprefix(PREFIX)
    a, b = _matrices(path, stored, pair)
    rank, (told, scale) = a.shape[0], _rank_and_scale(config, name)
    if told != rank:
        raise AdapterError(f"{path}: {a.name} has rank {rank}, and {CONFIG} says {told}: {AGAIN}")
    return AdaptedModule(name, rank, scale, a, b)


def _stack(path: Path, config: Mapping[str, Any], stored: str, pair: Mapping[str, StoredTensor]) -> AdaptedStack:
    """Return the matrices for a parameter of all experts. stored: name of the module in the file"""
    name = stored.removeprefix(PREFIX)
    module = name.replace(".base_layer", "")
    ranks = {parameter: _rank_and_scale(config, f"{module}.{parameter}") for parameter in PARAMETERS}
    return AdaptedStack(name, ranks, *_matrices(path, stored, pair))


def _matrices(path: Path, stored: str, pair: Mapping[str, StoredTensor]) -> tuple[StoredTensor, StoredTensor]:
    """Return A and B of a module, which fit together."""
    missing = {"A", "B"} - pair.keys()
    if missing:
        raise AdapterError(f"{path} has no {stored}.lora_{missing.pop()}.weight: {AGAIN}")
    a, b = pair["A"], pair["B"]
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
        raise AdapterError(
            f"{path}: {a.name} {list(a.shape)} and {b.name} {list(b.shape)} do not fit together: {AGAIN}"
        )
    return a, b


def _rank_and_scale(config: Mapping[str, Any], name: str) -> tuple[int, float]:
    """Return rank and scale that the config gives a module, or a parameter."""
    rank = _by_pattern(config.get("rank_pattern"), name, config["r"])
    alpha = _by_pattern(config.get("alpha_pattern"), name, config["lora_alpha"])
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(patterns: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    """Return the value of the first pattern that the end of a module's name matches, as PEFT's get_pattern_key."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def identify(name: str, folder: Path) -> Adapter:
    """Return the adapter in a folder, with the sum of its files. Raises `AdapterError` as `read_adapter` does."""
    read_adapter(folder)
    return Adapter(name, str(folder), digest_of(folder))


def stamp_of(folder: Path) -> tuple[tuple[int, int, int], ...]:
    """Return inode, time of change and bytes of both files of an adapter; () for files that cannot be seen."""
    try:
        found = [(folder / name).stat() for name in (CONFIG, WEIGHTS)]
    except OSError:
        return ()
    return tuple((one.st_ino, one.st_mtime_ns, one.st_size) for one in found)


def digest_of(folder: Path) -> str:
    """Return the sha256 of both files of an adapter, each behind its length, in hexadecimal digits."""
    total = sha256(b"quire.adapter.v1")
    try:
        for name in (CONFIG, WEIGHTS):
            path = folder / name
            total.update(path.stat().st_size.to_bytes(8, "little"))
            with path.open("rb") as file:
                while data := file.read(CHUNK):
                    total.update(data)
    except OSError as error:
        raise AdapterError(f"{folder} cannot be read ({error.strerror}): {AGAIN}") from None
    return total.hexdigest()
