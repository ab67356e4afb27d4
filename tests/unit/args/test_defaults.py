"""A config.json of sizes alone is read with the defaults of transformers.

Checkpoints lack keys whose value is the default. Random checkpoints have all keys: they cannot show a wrong default.
"""

from dataclasses import replace

import pytest

from quire.args.checkpoint import ModelArgs, parse_checkpoint_config
from quire.contracts.errors import ModelError

from ...support.default_configs import default_configs
from ...support.tiny_models import FAMILIES

OWN = [family for family, case in FAMILIES.items() if not (case.peer or case.of)]


def read(raw: dict[str, object]) -> ModelArgs:
    return replace(parse_checkpoint_config(raw), notes=(), dtype="")


@pytest.mark.parametrize("family", OWN)
def test_keys_that_config_json_lacks_have_the_defaults_of_transformers(family: str) -> None:
    whole, sizes = default_configs(family)
    assert read(sizes) == read(whole)


@pytest.mark.parametrize("family", OWN)
def test_a_missing_number_of_kv_heads_is_that_of_transformers_or_refused(family: str) -> None:
    whole, sizes = default_configs(family)
    del sizes["num_key_value_heads"]
    try:
        assert read(sizes) == read(whole)
    except ModelError as error:
        assert "num_key_value_heads is missing" in str(error)
