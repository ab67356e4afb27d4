"""Errors name flags and keys that exist, by the names under which a user gives them."""

import pytest

from quire.args.checkpoint import parse_checkpoint_config
from quire.config.engine import EngineConfig
from quire.config.flags import error_text, keyword_config
from quire.config.serve import ServerConfig
from quire.contracts.errors import ConfigError
from quire.contracts.parallel import Parallel
from quire.contracts.speculation import read_speculative_config
from quire.entry.cli.main import main
from quire.entry.http.console import access_text

from ...support.filled_models import planned
from ...support.tiny_models import Tiny, tiny_config
from .test_balancing import check_parallel, model

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"method": "ngram", "num_speculative_tokns": 3}, 'did you mean "num_speculative_tokens"?'),
        (NGRAM | {"enforce_eagre": True}, 'did you mean "enforce_eager"?'),
        (NGRAM | {"max_model_len": 100}, '"max_model_len": 100 is not implemented for method ngram'),
        (NGRAM | {"revision": "x"}, "\"revision\": 'x' is not implemented for method ngram"),
        (NGRAM | {"kv_cache_dtype": "fp8"}, "\"kv_cache_dtype\": 'fp8' is not implemented"),
        (NGRAM | {"qqq": 1}, '"max_model_len", "revision"'),
    ],
)
def test_keys_of_an_object_are_not_called_flags(given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_speculative_config(given)
    text = error_text(caught.value)
    assert words in text and text.startswith("--speculative-config: ") and text.count("--") == 1


@pytest.mark.parametrize("given", ["1,2", "1 2", "[1, 2]", [1, 2], (1, 2)])
def test_lists_of_an_engine_may_be_texts(given: object) -> None:
    assert keyword_config("m", {"pipeline_layer_partition": given}).parallel.pipeline_layer_partition == (1, 2)


def test_a_list_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="argument pipeline_layer_partition"):
        keyword_config("m", {"pipeline_layer_partition": "one,two"})
    assert keyword_config("m", {"kv_peers": "a:1,b:2"}).share.kv_peers == ("a:1", "b:2")


@pytest.mark.parametrize(
    ("command", "flag", "words"),
    [
        ("bench latency", "--input-len", "the workloads have lengths of their own: --only"),
        ("bench throughput", "--num-prompts", "--scale changes the number of requests"),
        ("route --backend http://a", "--api-key", "a router passes the keys of clients on"),
    ],
)
def test_flags_of_other_commands(command: str, flag: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), flag, "5"]) == 2
    said = capsys.readouterr().err
    assert f"unknown flag {flag}: " in said and words in said and "Did you" not in said


def test_a_server_without_its_flag_is_told_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["route", "http://127.0.0.1:8001"]) == 2
    assert "unexpected argument 'http://127.0.0.1:8001': servers are named by --backend URL" in capsys.readouterr().err


def test_a_dense_model_is_not_told_to_use_experts() -> None:
    args = parse_checkpoint_config(tiny_config(Tiny(family="qwen3")))
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    with pytest.raises(ConfigError, match=r"cut: use -tp 1 or 2\.$"):
        planned(args, quantization=awq, parallel=Parallel(tp=4))


def test_balancing_advises_what_is_not_on() -> None:
    with pytest.raises(ConfigError, match="add -tp or -dp, or"):
        check_parallel(model(8), Parallel(experts=True, redundant=0))


def test_the_banner_names_keys() -> None:
    config = ServerConfig(engine=EngineConfig())
    keys = [ServerConfig.from_flat(api_key=keys) for keys in (("a",), ("a", "b"))]
    said = [access_text(each).split(", ")[1] for each in (config, *keys)]
    assert said == ["no key needed", "needs a key", "needs one of 2 keys"]
