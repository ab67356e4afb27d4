"""From the texts that people type to the values of options, whatever the texts come from.

Knows the spellings (sizes with suffixes, switches, lists, JSON) and which option takes which. Knows neither argparse
nor the environment nor files.
"""

import json
import re
from collections.abc import Callable
from dataclasses import Field
from typing import Any

SIZE = re.compile(r"(-?\d+(?:\.\d+)?)(?:([kKmMgGtT])(i?)B?)?")
POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
AUTO = ("auto", "-1")  # spellings of "not set" for max_model_len
ACCELERATOR = re.compile(r"gpu|rocm|hip|xpu|tpu|mps|hpu|npu|neuron")
QUANTIZED_FORMATS = ("bitsandbytes", "gguf")
READERS = ("fastsafetensors", "runai_streamer")  # other ways to read the same files
LIST, COUNTS = tuple[str, ...], tuple[int, ...]
OBJECT = dict[str, Any] | None
OPTIONAL = (str | None, int | None, float | None, OBJECT)


def parse_size(text: str) -> int:
    """A whole number, with a suffix if you like: 32k = 32,000, 32K = 32Ki = 32,768; also m/M, g/G, t/T.

    Raises ValueError for anything else, a fraction of one included.
    """
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no whole number such as 32768, 32k (32,000) or 32K (32,768)")
    number, suffix, binary = match.groups()
    base = 1024 if suffix and (suffix.isupper() or binary) else 1000
    value = float(number) * base ** POWERS[suffix.lower()] if suffix else float(number)
    if value != int(value) or ("." in number and not suffix):
        raise ValueError(f"{text!r} is no whole number")
    return int(value) if suffix else int(number)


def parse_number(text: str) -> float:
    """A number; raises ValueError."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number") from None


def parse_bool(text: str) -> bool:
    """1, true, yes, on or 0, false, no, off; raises ValueError."""
    if text.lower() in TRUE + FALSE:
        return text.lower() in TRUE
    raise ValueError(f"{text!r} is neither {'/'.join(TRUE)} nor {'/'.join(FALSE)}")


def parse_object(text: str) -> dict[str, Any]:
    """A JSON object; raises ValueError."""
    value = _parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is no JSON object such as {{\"temperature\": 0.5}}")
    return value


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{text!r} is no JSON ({error})") from None


def parse_list(text: str) -> tuple[str, ...]:
    """Several texts: separated by commas, or a JSON list of strings; raises ValueError."""
    if not text.lstrip().startswith("["):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return parse_item(text)


def parse_item(text: str) -> tuple[str, ...]:
    """One text as it is, or a JSON list of strings; raises ValueError."""
    if not text.lstrip().startswith("["):
        return (text,)
    value = _parse_json(text)
    if not all(isinstance(item, str) for item in value):
        raise ValueError(f"{text!r} is no list of strings")
    return tuple(value)


def parse_counts(text: str) -> tuple[int, ...]:
    """Several whole numbers, separated by commas or spaces, or as a JSON list; raises ValueError."""
    return tuple(parse_size(part) for part in re.split(r"[,\s]+", text.strip().strip("[]").strip()) if part)


def parse_length(text: str) -> int | None:
    """A context length: a size, or -1 or auto for the longest that the model and the memory allow (None)."""
    return None if text in AUTO else parse_size(text)


def parse_port(text: str) -> int:
    """A port, 0 for any free one; raises ValueError."""
    if not text.strip().isdecimal() or int(text) > 65535:
        raise ValueError(f"{text!r} is no port: give 1 to 65535, or 0 for any free one")
    return int(text)


def parse_device(text: str) -> str:
    """The name of a device; raises ValueError for one of an accelerator that is not there."""
    if ACCELERATOR.match(text):
        raise ValueError(f"{text!r}: only NVIDIA GPUs are supported: give cuda or cpu, or leave it out")
    if text.startswith("cuda:"):
        raise ValueError(f"{text!r}: give cuda; the environment variable CUDA_VISIBLE_DEVICES chooses which GPU")
    return text


def parse_load_format(text: str) -> str:
    """The name of a format; raises ValueError for quantized ones. Those that say how safetensors are read are one."""
    if text in QUANTIZED_FORMATS:
        raise ValueError(f"{text!r}: quantized weights are not implemented yet: use the unquantized checkpoint")
    return "safetensors" if text in READERS else text


# By option, where the type does not say enough.
OWN_PARSERS: dict[str, Callable[[str], Any]] = {
    "max_model_len": parse_length, "port": parse_port, "device": parse_device, "load_format": parse_load_format}
PARSERS: dict[Any, Callable[[str], Any]] = {
    bool: parse_bool, str: str, str | None: str, int: parse_size, int | None: parse_size, float: parse_number,
    float | None: parse_number, OBJECT: parse_object, LIST: parse_list, COUNTS: parse_counts}
METAVARS: dict[Any, str] = {str: "TEXT", str | None: "TEXT", int: "N", int | None: "N", float: "X", float | None: "X",
                            OBJECT: "JSON", LIST: "TEXT", COUNTS: "N"}


def option_parser(option: Field[Any]) -> Callable[[str], Any]:
    """From a text to the option's value; raises ValueError."""
    return OWN_PARSERS.get(option.name, PARSERS[option.type])


def read_value(option: Field[Any], value: object) -> Any:
    """The option's value from a YAML or JSON value, a text as in a flag included; raises ValueError."""
    kind = option.type
    if value is None and kind in OPTIONAL:
        return None
    if isinstance(value, str):
        return (value,) if kind == LIST and not value.lstrip().startswith("[") else option_parser(option)(value)
    if kind in (str, str | None) or (kind == LIST and not isinstance(value, list)):
        raise ValueError(f"{value!r} is no text: put it in quotes")
    if kind == COUNTS and not (isinstance(value, list) and all(type(item) is int for item in value)):
        raise ValueError(f"{value!r} is no list of whole numbers")
    if kind is bool and not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return option_parser(option)(json.dumps(value, default=str))
