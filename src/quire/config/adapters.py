"""Options of adapters (LoRA): small matrices that are added to the weights for the requests that name them."""

import json
from dataclasses import dataclass

from quire.config.option import option
from quire.contracts.errors import ConfigError

MOST_RANK = 256
ROUTED, ALL_LINEAR = "experts", "all-linear"  # words of lora_target_modules


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Adapters (LoRA)."""

    enable_lora: bool = option(False, "let requests name an adapter (LoRA) in PEFT's form")
    max_loras: int = option(1, "adapters on the device at once; more wait in host memory", least=1)
    max_lora_rank: int = option(16, "largest rank of an adapter, 1 to 256", least=1)
    max_cpu_loras: int | None = option(
        None, "adapters in host memory, those on the device included (default: --max-loras)", least=1
    )
    fully_sharded_loras: bool = option(
        False, "cut both matrices of an adapter over the ranks of -tp: not implemented, refused with -tp"
    )
    lora_target_modules: tuple[str, ...] = option(
        (),
        "last names of the modules that adapters may change, such as q_proj v_proj; all-linear: all linear layers but "
        "those of routed experts (default); experts: these; the device has memory for these modules alone",
    )

    @property
    def num_slots(self) -> int:
        """Adapters that the device has room for; 0: adapters are off."""
        return self.max_loras if self.enable_lora else 0

    @property
    def of_experts(self) -> bool:
        """True: adapters may change routed experts."""
        return self.enable_lora and ROUTED in self.lora_target_modules

    @property
    def num_held(self) -> int:
        """Adapters that host memory has room for."""
        return self.max_cpu_loras or self.max_loras


def check_adapters(config: AdapterConfig) -> None:
    """Raise `ConfigError` for options of adapters that can never work."""
    if config.max_lora_rank > MOST_RANK:
        raise ConfigError(f"max_lora_rank={config.max_lora_rank}: must be at most {MOST_RANK}.")
    if config.num_held < config.max_loras:
        raise ConfigError(
            f"max_cpu_loras={config.max_cpu_loras} is below max_loras={config.max_loras}: host memory has all adapters "
            "that the device has. Raise max_cpu_loras, or leave it out."
        )
    if not all(config.lora_target_modules):
        raise ConfigError("lora_target_modules: a name must not be empty: leave the option out for all modules.")


@dataclass(frozen=True, kw_only=True)
class NamedAdapterConfig:
    """Names of adapters."""

    lora_modules: tuple[str, ...] = option(
        (),
        "adapters that requests may name as their model: NAME=PATH, or JSON such as "
        '{"name": "sql", "path": "/adapters/sql"}; a path is a folder or an id on the hub',
    )
    lora_folder: str | None = option(
        None, "folder of adapters: a request may name any folder in it as its model, which is read at first use"
    )
    allow_runtime_lora_updating: bool = option(
        False, "let /v1/load_lora_adapter and /v1/unload_lora_adapter change the names of adapters: for trusted callers"
    )


def read_modules(given: tuple[str, ...]) -> dict[str, str]:
    """Return name -> path of the adapters of `lora_modules`. Raises `ConfigError`."""
    found: dict[str, str] = {}
    for text in given:
        name, path = _read_module(text)
        if name in found:
            raise ConfigError(f"lora_modules names {name!r} twice: leave one out.")
        found[name] = path
    return found


def _read_module(text: str) -> tuple[str, str]:
    wrong = ConfigError(f'lora_modules={text!r}: give NAME=PATH, or {{"name": "...", "path": "..."}}.')
    if not text.lstrip().startswith("{"):
        name, equal, path = text.partition("=")
        if not (name and equal and path):
            raise wrong
        return name, path
    try:
        value = json.loads(text)
    except ValueError:
        raise wrong from None
    unknown = sorted(value.keys() - {"name", "path", "base_model_name"})
    name, path = value.get("name"), value.get("path")
    if unknown or not (isinstance(name, str) and isinstance(path, str) and name and path):
        raise wrong
    return name, path
