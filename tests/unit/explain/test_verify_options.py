"""Options that `quire verify` does not compare are refused by name, before the model is loaded."""

from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError
from quire.explain.verify import parity


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            r"\(method ngram\): leave out --spec",
        ),
        ({"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}, r"\(method mtp\): leave out --spec"),
        ({"speculative_config": {"model": "x", "num_speculative_tokens": 1}}, r"\(a draft model\)"),
        ({"kv_cache_dtype": "fp8"}, "leave out --kv-cache-dtype fp8"),
        ({"kv_cache_dtype": "bfloat16"}, "leave out --kv-cache-dtype bfloat16"),
        ({"dtype": "bfloat16"}, "leave out --dtype bfloat16"),
    ],
    ids=str,
)
def test_what_is_not_compared_is_refused(options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "assemble", lambda config: pytest.fail("the model was loaded"))
    with pytest.raises(ConfigError, match=words):
        parity.verify("", EngineConfig.from_flat(**options))


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "float32", "dtype": "float32"}], ids=str)
def test_what_is_compared_is_assembled(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Assembled(Exception):
        """The model would be loaded now."""

    def assemble(config: EngineConfig) -> None:
        assert (config.model.dtype, config.cache.kv_cache_dtype, config.device.device) == ("float32", "float32", "cpu")
        raise Assembled

    monkeypatch.setattr(parity, "assemble", assemble)
    with pytest.raises(Assembled):
        parity.verify("", EngineConfig.from_flat(**options))
