"""An engine that cannot be built, whatever its weights are, is refused before they are read."""

import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

import quire.assemble.engine
from quire.args.checkpoint import parse_checkpoint_config
from quire.assemble.early_checks import check_early, check_folder
from quire.assemble.engine import assemble
from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError
from quire.contracts.parallel import Parallel
from quire.plan.engine import Machine
from quire.plan.host_layers import HostLayers
from quire.plan.memory import GIB

from ...support.filled_models import planned
from ...support.tiny_models import Tiny, tiny_config

ARGS = parse_checkpoint_config(tiny_config(Tiny(family="qwen3")))


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test of this file may come to the weights."""

    def read(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(quire.assemble.engine, "obtain_weights", read)
    monkeypatch.setattr(quire.assemble.engine, "_assemble_replicas", read)


@pytest.fixture
def taken() -> Any:
    """A port that is taken."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def refused(match: str, **options: Any) -> None:
    with pytest.raises(ConfigError, match=match):
        assemble(EngineConfig.from_flat(device="cpu", **options))


def test_memory_and_context() -> None:
    refused("kv_offload_gb=900000: this host has .* lower kv_offload_gb", kv_offload_gb=9e5)
    refused("does not hold a KV block", kv_offload_gb=1e-6)
    refused("max_model_len=9999999 exceeds the model's context", max_model_len=9_999_999)
    refused(r"max_model_len=200 needs .* lower max_model_len", max_model_len=200, num_gpu_blocks_override=4)


def test_weights_in_host_memory_need_room_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.plan.meetings.ROWS", ())
    plan = planned(ARGS, cpu_offload_gb=1.0, kv_offload_gb=0.1)
    check_early([plan], GIB)
    large = HostLayers(num_bytes=GIB)
    monkeypatch.setattr("quire.assemble.early_checks.host_layers", lambda plan: large)
    with pytest.raises(ConfigError, match=r"^cpu_offload_gb=1: 2.00 GiB of weights .* beside 0.20 GiB for KV blocks"):
        check_early([plan, plan], GIB)


def test_folders(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "broken").symlink_to(tmp_path / "nothing")
    for name in ("file", "file/below", "broken/below"):
        refused(
            f"kv_offload_dir='{tmp_path / name}' cannot be used: .* is not a folder",
            kv_offload_gb=0.1,
            kv_offload_dir=str(tmp_path / name),
        )
    check_folder(str(tmp_path / "new" / "newer"), shared=False)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_holds_no_block(tmp_path: Path) -> None:
    folder = {"kv_offload_gb": 0.1, "kv_offload_dir": str(tmp_path)}
    refused(
        r"kv_offload_dir_gb=1e-05 does not hold a KV block of .* raise kv_offload_dir_gb to [\d.e-]+ or more",
        **folder,
        kv_offload_dir_gb=1e-5,
    )


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=f"this user may not write in {tmp_path}"):
        check_folder(str(tmp_path / "new"), shared=False)


def test_ports(taken: int, tmp_path: Path) -> None:
    refused(f"kv_share=127.0.0.1:{taken}: this host cannot listen", kv_offload_gb=0.1, kv_share=f"127.0.0.1:{taken}")
    events = {
        "enable_kv_cache_events": True,
        "replay_endpoint": f"tcp://127.0.0.1:{taken}",
        "endpoint": f"ipc://{tmp_path}/e",
    }
    refused("kv_events_config: replay_endpoint .* cannot be used", kv_events_config=events)


def test_ranks_share_the_memory_of_a_host() -> None:
    ranks = [planned(ARGS, parallel=Parallel(tp=2), number=number, kv_offload_gb=1.5) for number in range(2)]
    check_early(ranks, 2 * GIB)
    with pytest.raises(ConfigError, match="kv_offload_gb=1.5: this host has 1.0 GiB of free memory"):
        check_early(ranks, GIB)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_gpu_blocks_override": 4}, "num_gpu_blocks_override gives .* are missing. Try --max-model-len"),
        ({"kv_cache_memory_bytes": 4096}, "kv_cache_memory_bytes gives .* are missing"),
        ({"num_gpu_blocks_override": 1 << 30}, "num_gpu_blocks_override asks for .* lower it to"),
    ],
    ids=str,
)
def test_sizes_of_a_gpus_cache_that_fit_no_gpu(options: dict[str, int], match: str) -> None:
    machine, replace = Machine(device="cuda", words="a GPU", total_memory=8 * GIB), msgspec.structs.replace
    with pytest.raises(ConfigError, match=match):
        check_early([replace(planned(ARGS, max_model_len=200, **options), machine=machine)], GIB)
    check_early([replace(planned(ARGS, max_model_len=200), machine=machine)], GIB)
