"""Adapters (LoRA) in PEFT's form: adapter_config.json and adapter_model.safetensors, read without the weights.

y += scale * B (A x), with A = `lora_A.weight` [r, inputs] and B = `lora_B.weight` [outputs, r]. The tensors, not
`target_modules`, say which modules an adapter changes. scale = alpha / r, or alpha / sqrt(r) with `use_rslora`; r and
alpha may differ by module (`rank_pattern`, `alpha_pattern`). Source: github.com/huggingface/peft, tuners/lora.
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
PREFIX = "base_model.model."
FLOATS = ("F32", "BF16", "F16")
CHUNK = 8 << 20  # bytes summed at once
STARTS = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initializations that change the weights of the model
_LAYER = re.compile(r"(?:^|\.)(layers\.\d+\..+)$")
_MATRIX = re.compile(r"(.+)\.lora_([AB])\.weight")
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
class AdapterFiles:
    """An adapter as its files describe it: tail of a module's name (`tail_of`) -> its matrices."""

    folder: Path
    modules: Mapping[str, AdaptedModule]

    @property
    def rank(self) -> int:
        """The largest rank of a module."""
        return max(module.rank for module in self.modules.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all matrices, as they are stored."""
        return sum(one.a.num_bytes + one.b.num_bytes for one in self.modules.values())


def tail_of(module: str) -> str:
    """Return the end of a module's name by which checkpoints and adapters agree: from "layers.N." on.

    Wrappers of models put other names before it. A module outside of the layers has its last name, such as "lm_head".
    """
    found = _LAYER.search(known_name(f"{module}.weight").removesuffix(".weight"))
    return found[1] if found else module.rpartition(".")[2]


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
    modules = [_module(path, config, name, pair) for name, pair in pairs.items()]
    found = {tail_of(one.name): one for one in modules}
    if len(found) < len(modules):
        raise AdapterError(f"{path} has two adapters for one module of the model: {AGAIN}")
    return AdapterFiles(folder, found)


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
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value < 1e9:
            raise AdapterError(f"{path}: {key}={shown(value)}: must be a number of at least {least}.")
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(key) or {}
        if not isinstance(pattern, dict) or not all(isinstance(one, int | float) for one in pattern.values()):
            raise AdapterError(f"{path}: {key} must be an object of numbers.")
        for text in pattern:
            try:
                re.compile(text)
            except re.error:
                raise AdapterError(f"{path}: {key} has {shown(text)}, which is no pattern: correct it.") from None


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
    missing = {"A", "B"} - pair.keys()
    if missing:
        raise AdapterError(f"{path} has no {stored}.lora_{missing.pop()}.weight: {AGAIN}")
    a, b = pair["A"], pair["B"]
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
        raise AdapterError(
            f"{path}: {a.name} {list(a.shape)} and {b.name} {list(b.shape)} do not fit together: {AGAIN}"
        )
    rank = a.shape[0]
    told = _by_pattern(config.get("rank_pattern"), name, config["r"])
    if told != rank:
        raise AdapterError(f"{path}: {a.name} has rank {rank}, and {CONFIG} says {told}: {AGAIN}")
    alpha = _by_pattern(config.get("alpha_pattern"), name, config["lora_alpha"])
    return AdaptedModule(name, rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), a, b)


def _by_pattern(patterns: Mapping[str, float] | None, name: str, default: float) -> float:
    """Return the value of the first pattern that the end of a module's name matches, as PEFT's get_pattern_key."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def identify(name: str, folder: Path) -> Adapter:
    """Return the adapter in a folder, with the sum of its files. Raises `AdapterError` as `read_adapter` does."""
    read_adapter(folder)
    return Adapter(name, str(folder), digest_of(folder))


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
