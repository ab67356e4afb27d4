"""Every private name of another library that the package uses is listed here, exists, and has an upper bound.

A new version of a library may drop such a name without notice. Then this test names it, before a user meets it.
"""

import ast
import importlib
import inspect
import re
import tomllib
from functools import reduce

import pytest
import torch

import rules

# library -> objects whose names are used: "module:attribute path", and the names
PRIVATE: dict[str, dict[str, str]] = {
    "uvicorn": {
        "uvicorn.server:Server": "capture_signals server_state should_exit force_exit",
        "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol":
            "_start_asgi_task _unset_keepalive_if_required app connections cycle flow headers loop parser scope "
            "transport url client on_message_begin on_url on_header on_headers_complete on_body on_message_complete",
        "uvicorn.protocols.http.httptools_impl:RequestResponseCycle":
            "chunked_encoding disconnected expected_content_length flow keep_alive message_event response_complete "
            "response_started scope transport",
    },
    "jinja2": {"jinja2:Environment": "_generate", "jinja2.utils:Namespace": "__setitem__"},
    "torch": {
        "torch.utils._python_dispatch:TorchDispatchMode": "__torch_dispatch__",
        "torch._ops:OpOverload": "_schema",
        "torch.distributed._symmetric_memory:empty": "__call__",
        "torch.distributed._symmetric_memory:rendezvous": "__call__",
        "torch:ops.aten": "_scaled_dot_product_flash_attention_for_cpu _to_copy _unsafe_view",
        "torch._subclasses.fake_tensor:FakeTensorMode": "from_tensor",
        "torch:ops.mkldnn": "_linear_pointwise _reorder_linear_weight",
    },
    "transformers": {"transformers.models.olmoe.modeling_olmoe:OlmoeExperts": "_apply_gate"},
    "triton": {"triton.experimental.gluon.language._core:shared_memory_descriptor": "_reinterpret"},
    "python": {
        "argparse:ArgumentParser": "_actions _action_groups _option_string_actions",
        "argparse:_ArgumentGroup": "_group_actions",
        "argparse:_SubParsersAction": "_choices_actions",
    },
}  # fmt: skip
UNBOUND = {"python", "triton"}  # PyTorch chooses Triton's version
DOCUMENTED = {"_asdict", "_replace", "_exit", "_current_frames"}  # private by spelling only
USES = [(library, place, name) for library, uses in PRIVATE.items() for place in uses for name in uses[place].split()]


@pytest.mark.parametrize(("library", "place", "name"), USES, ids=lambda value: str(value).rpartition(":")[2])
def test_the_private_name_exists(library: str, place: str, name: str) -> None:
    module, _, path = place.partition(":")
    if library == "triton":
        pytest.importorskip(library)
    if path == "ops.mkldnn" and not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no oneDNN")
    try:
        owner = reduce(getattr, path.split("."), importlib.import_module(module))
        # An attribute of instances is found where a method of the class assigns it.
        found = hasattr(owner, name) or bool(re.search(rf"self\.{name}\b", inspect.getsource(owner)))
    except (ImportError, AttributeError):
        found = False
    assert found, f"{place} has no {name} in this version of {library}: repair its use, or lower the bound in pyproject"


@pytest.mark.parametrize("library", sorted(PRIVATE.keys() - UNBOUND))
def test_the_library_has_an_upper_bound(library: str) -> None:
    project = tomllib.loads((rules.ROOT / "pyproject.toml").read_text())["project"]
    requirements = [
        *project["dependencies"],
        *(text for extra in project["optional-dependencies"].values() for text in extra),
    ]
    found = [text for text in requirements if re.split(r"[<>=!~;]", text)[0] == library]
    assert found and all("<" in text for text in found), f"{found} has no upper bound, and private names of it are used"


def test_every_private_name_in_use_is_listed() -> None:
    """A name with an underscore is another library's if the package never defines it."""
    own, used = set(DOCUMENTED), {}
    for source in rules.package_sources():
        for node in source.nodes:
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    own.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                    own.add(name)
                case ast.Attribute(attr=name) if re.match("_[^_]", name):
                    used[name] = source.path
                case ast.ImportFrom(module=module) if module and not module.startswith("quire"):
                    used |= {part: source.path for part in module.split(".") if re.match("_[^_]", part)}
                case ast.Import(names=names):
                    parts = [part for one in names for part in one.name.split(".")]
                    used |= {part: source.path for part in parts if re.match("_[^_]", part)}
    listed = {part for _, place, name in USES for part in (name, *re.split("[.:]", place))}
    assert {name: path for name, path in used.items() if name not in own | listed} == {}
