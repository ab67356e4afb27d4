"""The command line as a whole: help, exit codes, and errors in one line."""

import subprocess
import sys
from pathlib import Path

import pytest

from quire import __version__
from quire.config.flags import error_text
from quire.contracts.errors import ConfigError, EngineDead, InvalidParameter, QuireError, WeightsError
from quire.entry.cli import weights
from quire.entry.cli.main import COMMANDS, main


class OutOfMemoryError(QuireError):
    """Named as PyTorch's."""


SOURCE = Path(__file__).resolve().parents[3] / "src"


def test_the_commands_are_these() -> None:
    assert list(COMMANDS) == [
        "serve",
        "route",
        "top",
        "chat",
        "complete",
        "run-batch",
        "bench",
        "weights",
        "quantize",
        "tour",
        "explain",
        "verify",
        "trace",
        "doctor",
        "completion",
    ]


@pytest.mark.parametrize("flag", ["--version", "-v", "-V"])
def test_version(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag]) == 0
    assert capsys.readouterr().out == f"quire {__version__}\n"


@pytest.mark.parametrize("args", [["--help"], ["-h"], []])
def test_help_lists_the_commands(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 0
    text = capsys.readouterr().out
    assert all(module.SUMMARY[0].islower() and not module.SUMMARY.endswith(".") for module in COMMANDS.values())
    assert all(f"\n    {name} " in text for name in COMMANDS)
    assert "`quire COMMAND --help`" in text and "--max-num-batched-tokens" not in text


@pytest.mark.parametrize(
    "args",
    [[name] for name in COMMANDS] + [["bench", kind] for kind in ("latency", "throughput", "startup", "kernels")],
)
def test_every_command_has_help(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*args, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: quire {' '.join(args)}")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["complete", "--max-modl-len", "4"], "Did you mean --max-model-len? (`quire complete --help`"),
        (["bench"], "the following arguments are required: KIND"),
        (["bench", "latency", "--repeat", "0"], "'0' is not a whole number above 0 (`quire bench latency --help`"),
        (["--no-such"], "unknown flag --no-such."),
        (["complete", "-p", "x", "--temperature", "9"], "temperature=9.0 is out of range"),
        (["completion", "powershell"], "invalid choice: 'powershell'"),
        (["version"], "there is no command 'version': it is `quire --version`"),
        (["serve", "--port", "99999"], "argument --port: '99999' is not a port: give 1 to 65535"),
        (["complete", "--device", "gpu"], "'gpu': only NVIDIA GPUs are supported: give cuda or cpu"),
        (["explain", "--device", "xpu"], "docs/add-a-platform.md tells what another platform would bring"),
        (["complete", "--device", "cuda:1"], "give cuda; the environment variable CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_misuse_is_one_line_and_exit_code_2(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert err.startswith("quire: error: ") and message in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["weights", "a", "--model", "b"], "two models are named"),
        (["weights", "/no/such/folder"], "'/no/such/folder' does not exist"),
        (["complete", "-p", "x", "--block-size", "0"], "--block-size=0: must be at least 1"),
        (["bench", "throughput", "--only", "nothing"], "unknown workload 'nothing'"),
        (["bench", "throughput", "--scale", "0"], "--scale 0.0: must be above 0"),
        (["bench", "kernels", "--models", "nothing"], "--models 'nothing': no such configuration"),
        (["serve", "-pcp", "2"], "-pcp 2: a prompt is not divided among devices by its tokens: use -tp"),
        (["serve", "-dp", "4", "-dpl", "5"], "give at most 4, and leave out nnodes"),
        (["serve", "-dp", "2", "--nnodes", "2", "--node-rank", "1"], "only host 0 has an engine core"),
        (["serve", "--ssl-keyfile", "k"], "--ssl-keyfile and --ssl-certfile go together"),
        (["serve", "--config", "/no/such.yaml"], "--config /no/such.yaml: No such file"),
        (["route", "--backend", "here"], "--backend here: not the URL of a server: give one such as http://127.0.0.1"),
        (["chat", "--api-key", "k"], "--api-key and --model-name go with --url"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_exit_code_3(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 3
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert err.startswith("quire: error: ") and message in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (WeightsError("model.safetensors is truncated:\n  download it again."), 3),
        (ConfigError("max_model_len=5 needs 4 GiB of KV cache and there is 1 GiB out of memory"), 3),
        (EngineDead("the engine stopped: RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried"), 4),
        (EngineDead("the engine stopped: MemoryError"), 4),
        (OutOfMemoryError("CUDA out of memory."), 4),
        (InvalidParameter("n=0 is out of range."), 2),
        (EngineDead("the engine stopped: nan"), 1),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 141),
    ],
)
def test_what_a_command_raises_becomes_an_exit_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> int:
        raise error

    monkeypatch.setattr(weights, "run", fail)
    assert main(["weights"]) == code
    err = capsys.readouterr().err
    assert "Traceback" not in err
    if isinstance(error, QuireError):
        assert err == f"quire: error: {error_text(error)}\n"


@pytest.mark.parametrize("args", [["--debug", "weights", "/no/such"], ["weights", "/no/such", "--debug"]])
def test_debug_shows_the_traceback(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 3
    assert "Traceback" in capsys.readouterr().err


def test_a_fault_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(weights, "run", fail)
    with pytest.raises(ZeroDivisionError):
        main(["weights"])


def test_unread_variables_are_mentioned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VLLM_USE_V1", "1")
    main(["weights"])
    assert "quire: warning: VLLM_USE_V1" in capsys.readouterr().err


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=SOURCE, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_and_weights_leave_torch_out() -> None:
    lines = run_python("""
import sys
from quire.entry.cli.main import main
for args in (["--help"], ["complete", "--help"], ["bench", "startup", "--help"], ["serve", "--help"],
             ["serve", "--print-config"], ["completion", "bash"], ["weights"], ["weights", "--json"]):
    assert main(args) == 0, args
print("torch loaded:", "torch" in sys.modules)
""").splitlines()
    assert lines[-1] == "torch loaded: False"


def test_help_brings_nothing_that_is_heavy() -> None:
    lines = run_python("""
import sys
from quire.entry.cli.main import main
assert main(["serve", "--help"]) == 0
heavy = ("torch", "numpy", "starlette", "uvicorn", "zmq", "prometheus_client", "tokenizers", "jinja2", "yaml", "rich")
print("loaded:", [name for name in heavy if name in sys.modules])
""").splitlines()
    assert lines[-1] == "loaded: []"


def test_a_misspelt_variable_stops_a_command_and_no_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_MAX_MODEL_LENGTH", "1")
    assert main(["weights"]) == 3
    assert "did you mean QUIRE_MAX_MODEL_LEN?" in capsys.readouterr().err
    assert main(["serve", "--help"]) == 0


def test_a_reader_that_leaves_early_is_no_error() -> None:
    code = "import sys; from quire.entry.cli.main import main; sys.exit(main(['weights']))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=SOURCE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.parametrize("kind", ["latency", "throughput", "profile", "startup"])
def test_the_help_of_a_measurement_names_one_default_model(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", kind, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("qwen3-0.6b") == 1 and "quire- tiny" not in text and "quire-tiny" not in text
