"""Options that `quire verify` does not compare are refused by name, before the model is loaded."""

from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError
from quire.explain.verify import parity, request


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data_parallel_size": 2}, "on one replica: leave out -dp"),
        ({"nnodes": 2, "tensor_parallel_size": 2}, "reads files of its ranks: use one host"),
        ({"dtype": "bfloat16"}, "in float32: leave out --dtype, or compare with a reference that --dump"),
        ({"load_format": "dummy"}, "load_format=dummy makes random weights"),
        ({"dump": Path("no", "such", "file")}, "--dump no/such/file: there is no folder .*/no/such"),
    ],
    ids=str,
)
def test_what_is_not_compared_is_refused(options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "assemble", lambda config: pytest.fail("the model was loaded"))
    dump = options.pop("dump", None)
    with pytest.raises(ConfigError, match=words):
        parity.verify("", EngineConfig.from_flat(**options), dump=dump)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, ("float32", "float32", "cpu")),
        ({"kv_cache_dtype": "float32", "dtype": "float32"}, ("float32", "float32", "cpu")),
        ({"kv_cache_dtype": "fp8"}, ("float32", "fp8", "cpu")),
    ],
    ids=str,
)
def test_what_is_compared_is_assembled(
    options: dict[str, Any], found: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Assembled(Exception):
        """The model would be loaded now."""

    def assemble(config: EngineConfig) -> None:
        assert (config.model.dtype, config.cache.kv_cache_dtype, config.device.device) == found
        raise Assembled

    monkeypatch.setattr(request, "assemble", assemble)
    with pytest.raises(Assembled):
        parity.verify("", EngineConfig.from_flat(**options))
