"""Parsers from the texts that users type to the values of options.

Knows the spellings (sizes with suffixes, switches, lists, JSON) and the spelling of each option. Knows nothing of
argparse, the environment or files.
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
FORMATS_LACK = "use safetensors, unquantized or in FP8, INT8, AWQ or GPTQ"
# Formats of files that are refused as load format, and as quantization: value -> the reason.
REFUSED_FORMATS = {
    "gguf": "its files have names, a tokenizer and block formats of their own, without readers and kernels here",
    "bitsandbytes": "its NF4 and INT8 weights need kernels that are not here",
}
READERS = ("fastsafetensors", "runai_streamer", "hf")  # load formats that read the same files in other ways
LIST, COUNTS = tuple[str, ...], tuple[int, ...]
OBJECT = dict[str, Any] | None
OPTIONAL = (str | None, int | None, float | None, OBJECT)


def parse_size(text: str) -> int:
    """Parse a whole number with an optional suffix: 32k = 32,000, 32K = 32Ki = 32,768; also m/M, g/G, t/T.

    Raises ValueError for any other text, also for a number with a fraction.
    """
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a whole number such as 32768, 32k (32,000) or 32K (32,768)")
    number, suffix, binary = match.groups()
    base = 1024 if suffix and (suffix.isupper() or binary) else 1000
    value = float(number) * base ** POWERS[suffix.lower()] if suffix else float(number)
    if value != int(value) or ("." in number and not suffix):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value) if suffix else int(number)


def parse_number(text: str) -> float:
    """Parse a number. Raises ValueError."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def parse_bool(text: str) -> bool:
    """Parse a switch: 1, true, yes, on or 0, false, no, off. Raises ValueError."""
    if text.lower() in TRUE + FALSE:
        return text.lower() in TRUE
    raise ValueError(f"{text!r} is neither {'/'.join(TRUE)} nor {'/'.join(FALSE)}")


def parse_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError."""
    value = _parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f'{text!r} is not a JSON object such as {{"temperature": 0.5}}')
    return value


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{text!r} is not JSON ({error})") from None


def parse_list(text: str) -> tuple[str, ...]:
    """Parse several texts: separated by commas, or a JSON list of strings. Raises ValueError."""
    if not text.lstrip().startswith("["):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return parse_item(text)


def parse_item(text: str) -> tuple[str, ...]:
    """Return a tuple with the text itself, or with the strings of a JSON list. Raises ValueError."""
    if not text.lstrip().startswith("["):
        return (text,)
    value = _parse_json(text)
    if not all(isinstance(item, str) for item in value):
        raise ValueError(f"{text!r} is not a list of strings")
    return tuple(value)


def parse_counts(text: str) -> tuple[int, ...]:
    """Parse several whole numbers: separated by commas or spaces, or a JSON list. Raises ValueError."""
    return tuple(parse_size(part) for part in re.split(r"[,\s]+", text.strip().strip("[]").strip()) if part)


def parse_length(text: str) -> int | None:
    """Parse a context length such as 32k; -1 and auto give None: the longest that model and memory allow."""
    return None if text in AUTO else parse_size(text)


def parse_port(text: str) -> int:
    """Parse a port; 0 means any free port. Raises ValueError."""
    if not text.strip().isdecimal() or int(text) > 65535:
        raise ValueError(f"{text!r} is not a port: give 1 to 65535, or 0 for any free one")
    return int(text)


def parse_device(text: str) -> str:
    """Parse the name of a device. Raises ValueError for an accelerator that is not supported."""
    if ACCELERATOR.match(text):
        raise ValueError(
            f"{text!r}: only NVIDIA GPUs are supported: give cuda or cpu, or leave it out; "
            "docs/add-a-platform.md tells what another platform would bring"
        )
    if text.startswith("cuda:"):
        raise ValueError(f"{text!r}: give cuda; the environment variable CUDA_VISIBLE_DEVICES chooses which GPU")
    return text


def parse_load_format(text: str) -> str:
    """Parse a load format. vLLM's other readers of safetensors files, such as runai_streamer, give "safetensors".

    Raises ValueError for bitsandbytes, gguf and Mistral's own files.
    """
    if text == "mistral":
        raise ValueError(
            "'mistral' is not implemented: leave out --load-format, --config-format and --tokenizer-mode. The files in "
            "Hugging Face's form are read, which the same repositories have"
        )
    if text in REFUSED_FORMATS:
        raise ValueError(f"{text!r} is not implemented ({REFUSED_FORMATS[text]}): {FORMATS_LACK}")
    return "safetensors" if text in READERS else text


# Parsers by option, where the type is not enough.
OWN_PARSERS: dict[str, Callable[[str], Any]] = {
    "max_model_len": parse_length,
    "port": parse_port,
    "device": parse_device,
    "load_format": parse_load_format,
}
PARSERS: dict[Any, Callable[[str], Any]] = {
    bool: parse_bool,
    str: str,
    str | None: str,
    int: parse_size,
    int | None: parse_size,
    float: parse_number,
    float | None: parse_number,
    OBJECT: parse_object,
    LIST: parse_list,
    COUNTS: parse_counts,
}
METAVARS: dict[Any, str] = {
    str: "TEXT",
    str | None: "TEXT",
    int: "N",
    int | None: "N",
    float: "X",
    float | None: "X",
    OBJECT: "JSON",
    LIST: "TEXT",
    COUNTS: "N",
}


def option_parser(option: Field[Any]) -> Callable[[str], Any]:
    """Return the parser from a text to a value of the option. The parser raises ValueError for a wrong text."""
    return OWN_PARSERS.get(option.name, PARSERS[option.type])


def read_value(option: Field[Any], value: object) -> Any:
    """Convert a YAML or JSON value to the option's value; strings are parsed like a flag's text. Raises ValueError."""
    kind = option.type
    if value is None and kind in OPTIONAL:
        return None
    if isinstance(value, str):
        return (value,) if kind == LIST and not value.lstrip().startswith("[") else option_parser(option)(value)
    if kind in (str, str | None) or (kind == LIST and not isinstance(value, list)):
        raise ValueError(f"{value!r} is not a text: put it in quotes")
    if kind == COUNTS and not (isinstance(value, list) and all(type(item) is int for item in value)):
        raise ValueError(f"{value!r} is not a list of whole numbers")
    if kind is bool and not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return option_parser(option)(json.dumps(value, default=str))
