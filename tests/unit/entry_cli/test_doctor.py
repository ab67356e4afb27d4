"""`quire doctor` finds what is wrong, says what to do, keeps secrets, and works where PyTorch does not."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.config import env
from quire.entry.cli import check_machine, check_software, doctor
from quire.entry.cli.doctor import examine
from quire.entry.cli.finding import BAD, OK, WARN, Finding
from quire.entry.cli.main import main
from quire.platforms.detect import DevicePlan

GOOD_TORCH = json.dumps({"version": "2.13.0", "cuda": None, "threads": 2, "gpus": 0})


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variables, an empty cache, and a PyTorch that answers at once."""
    for name in list(env.os.environ):
        if name.startswith(("QUIRE_", "VLLM_", "HF_", "HUGGINGFACE", "OPENAI_")) or name.lower() in env.PROXY_NAMES:
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    answer(monkeypatch, GOOD_TORCH)


def answer(monkeypatch: pytest.MonkeyPatch, out: str, *, code: int = 0, err: str = "") -> None:
    done = SimpleNamespace(returncode=code, stdout=out, stderr=err)
    monkeypatch.setattr(check_software.subprocess, "run", lambda *args, **settings: done)


def found(name: str, port: int = 1) -> list[Finding]:
    return [finding for finding in examine(port) if finding.name == name]


def test_a_good_machine_has_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "ok    torch          2.13.0, built for CPUs, 2 threads" in out
    assert re.search(r"\nNo problems: \d+ ok, \d+ warnings?\.\n$", out)


@pytest.mark.parametrize(
    ("levels", "words"),
    [
        ([OK] * 17 + [WARN] * 2, "No problems: 17 ok, 2 warnings."),
        ([OK, WARN], "No problems: 1 ok, 1 warning."),
        ([OK, BAD], "1 problem: 1 ok, 0 warnings."),
        ([BAD, BAD, WARN], "2 problems: 0 ok, 1 warning."),
    ],
)
def test_the_verdict_counts(
    levels: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda port: (Finding("x", level, "y") for level in levels))
    main(["doctor"])
    assert capsys.readouterr().out.splitlines()[-1] == words


def test_advice_names_no_package_of_an_index_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Quire is on no index: what README says is said here."""
    answer(monkeypatch, "", code=1, err="Traceback ...\nModuleNotFoundError: No module named 'torch'")
    monkeypatch.setattr(check_software.importlib.metadata, "requires", lambda name: ["no-such-package>=1"])
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert out.count("-> run `pip install .` in Quire's folder") == 2
    assert "`pip install .`" in (Path(__file__).parents[3] / "README.md").read_text()


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert all(set(f) == {"name", "level", "text", "fix"} and f["level"] in (OK, WARN) for f in report["findings"])
    names = {finding["name"] for finding in report["findings"]}
    assert {
        "python",
        "quire",
        "torch",
        "cpu",
        "memory",
        "gpu",
        "open files",
        "disk: models",
        "hub cache",
        "hub token",
        "compiler",
        "kernel cache",
        "port",
    } <= names


def test_a_broken_torch_is_bad_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, "", code=1, err="Traceback ...\nImportError: libcudart.so.13: cannot open shared object file")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "BAD   torch" in out and "cannot be imported: ImportError: libcudart.so.13" in out and "-> pip" in out


def test_torch_is_asked_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run(command: list[str], **settings: Any) -> Any:
        asked.append(command)
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(check_software.subprocess, "run", run)
    assert [f.level for f in check_software.torch()] == [BAD]
    assert asked[0][1] == "-c" and "import json, torch" in asked[0][2]


def test_keys_and_tokens_are_not_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("hub-secret")
    for name, text in {
        "HF_TOKEN": "env-secret",
        "QUIRE_API_KEY": "key-secret",
        "OPENAI_API_KEY": "their-secret",
        "VLLM_API_KEY": "peer-secret",
        "HTTPS_PROXY": "http://me:proxy-secret@proxy.example.org:3128",
        "ALL_PROXY": "me:bare-secret@proxy:1",
    }.items():
        monkeypatch.setenv(name, text)
    line = b"serve\0--api-key\0one-secret\0two-secret\0--hf-token=tok-secret\0"
    monkeypatch.setattr(Path, "read_bytes", lambda path: line if path.name == "cmdline" else b"")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for json_flag in ([], ["--json"]):
            main(["doctor", "--port", str(taken.getsockname()[1]), *json_flag])
            out = capsys.readouterr().out
            assert "secret" not in out
            assert "found, in the environment" in out and "***@proxy.example.org:3128" in out
            assert sys.platform != "linux" or "(serve --api-key *** --hf-token=***)" in out


def test_a_stored_token_is_found(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("x")
    assert found("hub token")[0].text == "found, stored by `hf auth login`"


def test_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert found("hub")[0].level == WARN


def test_a_misspelt_variable_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_MAX_MODEL_LENGTH", "1")
    (finding,) = found("environment")
    assert finding == Finding(
        "environment", BAD, "QUIRE_MAX_MODEL_LENGTH is not known", "did you mean QUIRE_MAX_MODEL_LEN?"
    )


def test_a_port_in_use_names_the_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (finding,) = found("port", taken.getsockname()[1])
    assert finding.level == WARN and "in use by" in finding.text or "cannot be taken" in finding.text
    assert [f.level for f in found("port", 70000)] == [BAD]


def test_gpus_and_who_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def smi(program: str, query: str) -> list[list[str]]:
        if "query-gpu" in query:
            return [["0", "NVIDIA H200", "580.1", "9.0", "100 MiB", "143771 MiB"]]
        return [["GPU-1", "77", "python", "50 MiB"]]

    monkeypatch.setattr(check_machine.shutil, "which", lambda name: "/bin/nvidia-smi")
    monkeypatch.setattr(check_machine, "_smi", smi)
    texts = [finding.text for finding in check_machine.gpus()]
    assert texts[0] == "NVIDIA H200, driver 580.1, capability 9.0, 100 MiB of 143771 MiB in use"
    assert texts[1] == "process 77 (python) holds 50 MiB"


@pytest.mark.parametrize(("device", "said"), [("cpu", ["no GPU is used: too old"]), ("cuda", [])])
def test_a_gpu_that_is_not_used_says_why(monkeypatch: pytest.MonkeyPatch, device: str, said: list[str]) -> None:
    monkeypatch.setattr(check_machine.shutil, "which", lambda name: "/bin/nvidia-smi")
    monkeypatch.setattr(check_machine, "_smi", lambda smi, query: [["0"] * 6] if "query-gpu" in query else [])
    monkeypatch.setattr(check_machine, "resolve_device", lambda asked: DevicePlan(device=device, reason="too old"))
    assert [finding.text for finding in check_machine.gpus()][1:] == said


def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(program: str, query: str) -> list[list[str]]:
        raise subprocess.CalledProcessError(9, program)

    monkeypatch.setattr(check_machine.shutil, "which", lambda name: "/bin/nvidia-smi")
    monkeypatch.setattr(check_machine, "_smi", broken)
    assert [f.level for f in check_machine.gpus()] == [WARN]


def test_a_containers_share_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_machine, "_quota", lambda: 0.5)
    (finding,) = [f for f in check_machine.cpu() if f.name == "cpu limit"]
    assert "may use 0.5 CPUs" in finding.text and "--num-threads 1" in finding.fix


@pytest.mark.parametrize(
    ("installed", "bounds", "wrong"),
    [
        ("2.13.0+cpu", ">=2.11,<2.14", False),
        ("2.14.0", ">=2.11,<2.14", True),
        ("2.9", ">=2.11,<2.14", True),
        ("3.1.6", ">=3.1.6", False),
        (None, ">=1", True),
    ],
)
def test_versions_are_compared_as_numbers(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, bounds: str, wrong: bool
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise check_software.importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(check_software.importlib.metadata, "version", version)
    assert bool(check_software._mismatch("p", bounds)) is wrong


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise OSError("gone")

    checks: list[Callable[[], Any]] = [fail]
    monkeypatch.setattr(check_machine, "memory", checks[0])
    assert "a check failed (OSError: gone)" in found("doctor")[0].text


def test_a_damaged_library_of_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "quire-0123.so").write_bytes(b"part of a library")
    whole, damaged = found("kernel cache")
    assert whole.level == OK and "1 libraries" in whole.text
    assert damaged.level == WARN and damaged.text == "damaged: quire-0123.so"
