"""The choice of implementations is a value with reasons."""

import subprocess
import sys

import pytest

from quire.contracts.errors import ConfigError
from quire.kernels.attention import cpu, native, ref
from quire.kernels.select import IMPLEMENTATIONS, Needs, Support, objection, select, select_kernels

ELSEWHERE = tuple((name, "runs on cuda, not on cpu") for name in ("hopper", "triton"))


def test_best_that_fits() -> None:
    choice, module = select("attention", Needs(device="cpu", dtype="float32"))
    if native.SUPPORT.missing:
        assert module is cpu and choice.name == "cpu" and choice.rejected[2:] == (("native", native.SUPPORT.missing),)
    else:
        assert module is native and choice.name == "native" and choice.rejected == ELSEWHERE


def test_reasons_for_the_rejected() -> None:
    choice, module = select("attention", Needs(device="cpu", dtype="float32", features=frozenset({"window", "sinks"})))
    assert module is ref and choice.rejected[3:] == (("cpu", "has no sinks, window"),)
    lacking = native.SUPPORT.missing or "has no sinks, window"
    assert choice.rejected[:3] == (*ELSEWHERE, ("native", lacking))
    assert "not cpu: has no sinks, window" in str(choice)
    choice, _ = select("norm", Needs(device="cpu", dtype="float16"))
    assert choice.name == "ref" and "not in float16" in choice.rejected[2][1]


def test_forced() -> None:
    choice, module = select("attention", Needs(device="cpu", dtype="float32"), forced="ref")
    assert module is ref and choice.reason == "asked for" and choice.rejected[3] == ("cpu", "ref was asked for")


@pytest.mark.parametrize(
    ("op", "features", "forced", "said"),
    [
        ("attention", frozenset({"window"}), "cpu", "has no window"),
        ("attention", frozenset(), "triton", "runs on cuda, not on cpu"),
        ("attention", frozenset(), "fortran", "does not exist"),
        ("attention", frozenset({"tree_mask"}), None, "has no tree_mask"),
    ],
)
def test_impossible_is_an_error(op: str, features: frozenset[str], forced: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        select(op, Needs(device="cpu", dtype="float32", features=features), forced)


def test_objections_in_order() -> None:
    support = Support(devices=frozenset({"cuda"}), dtypes=frozenset({"bfloat16"}), missing="no compiler")
    assert "not on cpu" in objection(support, Needs(device="cpu", dtype="float32"))
    assert objection(support, Needs(device="cuda", dtype="float32")) == "no compiler"


def test_wider_heads_than_an_implementation_can() -> None:
    narrow = Support(devices=frozenset({"cpu"}), dtypes=frozenset({"float32"}), max_head_dim=512)
    assert objection(narrow, Needs(device="cpu", dtype="float32", head_dim=512)) == ""
    said = objection(narrow, Needs(device="cpu", dtype="float32", head_dim=640))
    assert said == "has heads of at most 512, not of 640"
    kernels = select_kernels("cpu", "float32", head_dim=640)
    assert kernels.attention is cpu
    if not native.SUPPORT.missing:
        assert f"not native: {said}" in str(kernels.choices[-1])


def test_kernels_of_a_model() -> None:
    kernels = select_kernels("cpu", "float32", forced={"linear": "ref"})
    assert [choice.op for choice in kernels.choices] == list(IMPLEMENTATIONS)
    assert kernels.linear.__name__.endswith("linear.ref")
    assert kernels.attention is select("attention", Needs(device="cpu", dtype="float32"))[1]
    with pytest.raises(ConfigError, match="lineer"):
        select_kernels("cpu", "float32", forced={"lineer": "ref"})


def test_every_kernel_module_can_be_imported_without_triton() -> None:
    program = """
import importlib, importlib.util, pkgutil
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
import quire.kernels
from quire.kernels import triton_runtime
assert triton_runtime.missing() == "Triton is not installed"
for module in pkgutil.walk_packages(quire.kernels.__path__, "quire.kernels."):
    importlib.import_module(module.name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
