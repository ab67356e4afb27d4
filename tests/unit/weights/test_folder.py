"""Folders of model names, without a network."""

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from quire.config.bundled import bundled_model
from quire.config.engine import EngineConfig
from quire.contracts.errors import ModelNotFound
from quire.weights import folder


def resolve(model: str, **options: Any) -> Path:
    """The folder of a model that is named so."""
    return folder.resolve_folders(EngineConfig.from_flat(model=model, **options))[0]


class FakeResponse:
    """The fields of an answer that the hub client's errors read."""

    status_code = 503
    headers: dict[str, str] = {}
    request = None
    url = "https://example.invalid"


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path


def test_the_bundled_model_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve("quire-tiny") == bundled_model()
    (tmp_path / "quire-tiny").mkdir()
    assert resolve("quire-tiny") == Path("quire-tiny")


@pytest.mark.parametrize("typed", ["./nowhere", "/no/such/folder", "a/b/c", "~/nothing-here", "plain", "bad name/x"])
def test_paths_that_lead_nowhere(typed: str) -> None:
    with pytest.raises(ModelNotFound) as error:
        resolve(typed)
    assert typed in str(error.value) and "\n" not in str(error.value)


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelNotFound, match="give the folder"):
        resolve(str(tmp_path / "model.safetensors"))


def test_offline_makes_no_call_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="without --offline"):
        resolve("nobody/nothing", offline=True, download_dir=str(tmp_path))


def test_revision_reaches_the_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda model, **kw: calls.append((model, kw)) or tmp_path)
    found = resolve("a/b", hf_token="t", download_dir=str(tmp_path), revision="abc")
    assert found == tmp_path
    ((model, asked),) = calls
    assert model == "a/b" and asked["revision"] == "abc" and asked["token"] == "t" and not asked["local_files_only"]
    assert not any(
        fnmatch(name, pattern)
        for pattern in asked["allow_patterns"]
        for name in ("pytorch_model.bin", "model.pt", "model.safetensors")
    )


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: errors.GatedRepoError("m", response=FakeResponse()), "gated"),
        (lambda: errors.RepositoryNotFoundError("m", response=FakeResponse()), "neither a folder here nor"),
        (lambda: errors.RevisionNotFoundError("m", response=FakeResponse()), "no revision 'abc'"),
        (lambda: errors.LocalEntryNotFoundError("m"), "cannot be reached"),
        (lambda: errors.HfHubHTTPError("m", response=FakeResponse()), "503): try again later"),
        (lambda: OSError("disk full\nmore"), "disk full"),
    ],
)
def test_hub_errors_become_one_line(monkeypatch: pytest.MonkeyPatch, make, said: str) -> None:  # type: ignore[no-untyped-def]
    def fail(*_: object, **__: object) -> None:
        raise make()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelNotFound) as error:
        resolve("a/b", revision="abc")
    assert said in str(error.value) and "'a/b'" in str(error.value) and "\n" not in str(error.value)
