"""The choice of implementations is a value with reasons, and reading what they can do imports nothing."""

import importlib
import os
import subprocess
import sys

import pytest
import torch

from quire.contracts.errors import ConfigError
from quire.kernels.attention import cpu, native, triton
from quire.kernels.linear import onednn_support as units
from quire.kernels.select import KernelNeeds, choose_kernels, here, objection, select, select_kernels
from quire.kernels.supports import DENSE, NEEDS, SUPPORTS, Support, module_of

ELSEWHERE = tuple((name, "runs on cuda, not on cpu") for name in ("hopper", "triton"))
CPU = KernelNeeds(device="cpu", dtype="float32")


def everything(need: str) -> str:
    assert need in NEEDS
    return ""


def nothing(need: str) -> str:
    return f"there is no {need}"


def test_best_that_fits() -> None:
    choice = select("attention", CPU, probe=everything)
    assert choice.name == "native" and choice.rejected == ELSEWHERE
    assert choice.features == ("chunked", "recording", "rows", "sinks", "soft_cap", "window")
    choice = select("attention", CPU, probe=lambda need: nothing(need) if need == "native" else "")
    assert choice.name == "cpu" and choice.rejected[2:] == (("native", "there is no native"),)


def test_reasons_for_the_rejected() -> None:
    needs = KernelNeeds(device="cpu", dtype="float32", features=frozenset({"window", "sinks"}))
    assert select("attention", needs, probe=everything).name == "native"
    choice = select("attention", needs, probe=lambda need: nothing(need) if need == "native" else "")
    assert choice.name == "ref"
    assert choice.rejected == (*ELSEWHERE, ("native", "there is no native"), ("cpu", "has no sinks, window"))
    assert "not cpu: has no sinks, window" in str(choice)
    choice = select("norm", KernelNeeds(device="cpu", dtype="float16"))
    assert choice.name == "ref" and "not in float16" in choice.rejected[2][1]


def test_forced() -> None:
    choice = select("attention", CPU, "ref", everything)
    assert choice.name == "ref" and choice.reason == "asked for" and choice.rejected[3] == ("cpu", "ref was asked for")


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
        select(op, KernelNeeds(device="cpu", dtype="float32", features=features), forced)


def test_a_machine_is_asked_last_and_only_what_decides() -> None:
    asked: list[str] = []
    select("attention", CPU, probe=lambda need: asked.append(need) or "")  # type: ignore[func-returns-value]
    assert asked == ["native"]
    support = Support(devices=frozenset({"cuda"}), dtypes=frozenset({"bfloat16"}), needs=("triton",))
    assert "not on cpu" in objection(support, CPU, nothing)
    assert "not in float32" in objection(support, KernelNeeds(device="cuda", dtype="float32"), nothing)
    assert objection(support, KernelNeeds(device="cuda", dtype="bfloat16"), nothing) == "there is no triton"


def test_a_need_of_one_dtype() -> None:
    """A CPU with AVX2 packs weights of float32 and none of bfloat16."""

    def old(need: str) -> str:
        return "" if need == "packed linears" else nothing(need)

    assert select("linear", CPU, probe=old).name == "cpu"
    choice = select("linear", KernelNeeds(device="cpu", dtype="bfloat16"), probe=old)
    assert choice.name == "ref" and choice.rejected[-1] == ("cpu", "there is no packed bfloat16")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"sse2", "avx2"}, "this CPU has no avx512bw"),
        ({"sse2", "avx512bw", "avx512vl"}, "this CPU has no avx512dq"),
        ({"sse2", *units.X86}, ""),
        ({"sse2", "avx2", "avx_ne_convert"}, ""),
        ({"asimd", "bf16"}, ""),
        ({"asimd"}, "this CPU has no bf16 units"),
    ],
)
def test_which_cpus_pack_bfloat16(flags: set[str], said: str) -> None:
    assert units.missing_bf16(frozenset(flags)) == said


@pytest.mark.skipif("ONEDNN_MAX_CPU_ISA" in os.environ, reason="oneDNN is told to use less than this CPU has")
@pytest.mark.skipif(bool(here("packed linears")), reason=here("packed linears") or "has them")
def test_what_is_known_of_bfloat16_without_pytorch_is_what_it_does() -> None:
    assert (units.missing_bf16() == "") == torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.parametrize("probe", [everything, nothing])
def test_features_that_hang_on_a_need(probe: object) -> None:
    choice = select("linear", KernelNeeds(device="cuda", dtype="bfloat16"), probe=probe)  # type: ignore[arg-type]
    more = ("gated", "norm") if probe is everything else ()
    always, more = {"add", "exact", "out"}, {*more, *(("plain", "rows") if more else ())}
    assert choice.name == "cuda" and set(choice.features) == always | more


def test_wider_heads_than_an_implementation_can() -> None:
    narrow = Support(devices=frozenset({"cpu"}), dtypes=frozenset({"float32"}), max_head_dim=512)
    assert objection(narrow, KernelNeeds(device="cpu", dtype="float32", head_dim=512)) == ""
    said = objection(narrow, KernelNeeds(device="cpu", dtype="float32", head_dim=640))
    assert said == "has heads of at most 512, not of 640"
    choice = choose_kernels("cpu", "float32", head_dim=640)[-1]
    assert choice.name == "cpu" and ("native", said) in choice.rejected
    for name in ("hopper", "triton"):
        assert SUPPORTS["attention"][name].max_head_dim == max(triton.DECODE) == max(triton.PREFILL)
    assert SUPPORTS["attention"]["native"].max_head_dim == native.MAX_DIM


@pytest.mark.parametrize(
    ("dtype", "cache", "names"), [("bfloat16", "", ["hopper", "triton"]), ("float32", "e4m3 cache", ["triton"] * 2)]
)
def test_chosen_rows_of_latents_on_a_gpu(dtype: str, cache: str, names: list[str]) -> None:
    """Not on the reference, which waits for the device."""
    given = {"attention_features": frozenset({"rows"}), "cache_features": frozenset({cache} - {""})}
    found = choose_kernels("cuda", dtype, ops=("latent", "blend"), probe=everything, **given)
    assert [choice.name for choice in found] == names


def test_kernels_of_a_model() -> None:
    kernels = select_kernels("cpu", "float32", forced={"linear": "ref"})
    assert [choice.op for choice in kernels.choices] == list(DENSE)
    assert kernels.linear.__name__.endswith("linear.ref") and kernels.routing is None
    assert kernels.attention is (cpu if here("native") else native)
    assert kernels.features("linear") == ("exact",) and kernels.features("routing") == ()
    with pytest.raises(ConfigError, match="lineer"):
        select_kernels("cpu", "float32", forced={"lineer": "ref"})
    with pytest.raises(ConfigError, match="experts.*in this model"):
        select_kernels("cpu", "float32", forced={"experts": "ref"})


def test_what_is_declared_exists() -> None:
    """Every implementation is a module, every need names a function, and the last implementation needs nothing."""
    for op, supports in SUPPORTS.items():
        for name, support in supports.items():
            importlib.import_module(module_of(op, name))
            assert {*support.needs, *support.extra}.union(*support.typed.values()) <= NEEDS.keys()
            assert support.typed.keys() <= support.dtypes
        last = list(supports.values())[-1]
        assert not last.needs and last.devices == {"cpu", "cuda"}
    assert all(isinstance(here(need), str) for need in NEEDS)


def test_every_kernel_module_can_be_imported_without_triton() -> None:
    program = """
import importlib, importlib.util, pkgutil
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
import quire.kernels
from quire.kernels import triton_runtime
assert triton_runtime.missing() == triton_runtime.missing_hopper() == "Triton is not installed"
for module in pkgutil.walk_packages(quire.kernels.__path__, "quire.kernels."):
    importlib.import_module(module.name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
