"""Each rule turns red on a planted violation and stays quiet beside it."""

import textwrap

import pytest

import rules
from rules import Source

METHODS = "\n".join(f"    def m{i}(self):\n        pass" for i in range(16))


def complaints(rule: rules.Rule, text: str, path: str = "worker/x.py") -> list[str]:
    return list(rule(Source(path, textwrap.dedent(text))))


RED = [
    (rules.line_length, "x = 1  # " + "a" * 120, "worker/x.py"),
    (rules.public_methods, f"class A:\n{METHODS}", "worker/x.py"),
    (rules.positional_parameters, "def f(a, b, c, d, e, f, g): pass", "worker/x.py"),
    (rules.positional_parameters, "class A:\n  def f(self, a, b, c, d, e, f, g): pass", "worker/x.py"),
    (rules.no_mixins, "class LoadMixin: pass", "worker/x.py"),
    (rules.no_global, "def f():\n  global x\n  x = 1", "worker/x.py"),
    (rules.no_bare_except, "try:\n  f()\nexcept:\n  pass", "worker/x.py"),
    (rules.environment, "import os\nx = os.environ['A']", "config/x.py"),
    (rules.environment, "import os\ndef f(): return os.getenv('A')", "worker/x.py"),
    (rules.environment, "from os import environ", "worker/x.py"),
    (rules.triton_home, "import triton\n@triton.jit\ndef f(): pass", "worker/x.py"),
    (rules.triton_home, "def f():\n  from triton import jit", "worker/x.py"),
    (rules.no_unfinished, "x = 1  # TODO later", "worker/x.py"),
    (rules.module_names, "", "worker/utils.py"),
    (rules.module_names, "", "common/x.py"),
    (rules.module_state, "cache = {}", "worker/x.py"),
    (rules.module_state, "if True:\n  seen: set[int] = set()", "worker/x.py"),
    (rules.module_state, "import collections\nqueue = collections.deque()", "worker/x.py"),
    (rules.module_state, "TABLE = {}\ndef f(): TABLE['a'] = 1", "worker/x.py"),
    (rules.module_state, "TABLE = []\ndef f(): TABLE.append(1)", "worker/x.py"),
    (rules.module_state, "from quire.plan.kv_geometry import TABLE\nTABLE['a'] = 1", "worker/x.py"),
    (rules.module_state, "from quire.models import registry\nregistry.TABLE['a'] = 1", "worker/x.py"),
    (rules.module_state, "COUNT = 0\ndef f():\n  COUNT += 1", "worker/x.py"),
    (rules.module_state, "class A:\n  items = []", "worker/x.py"),
    (rules.module_state, "GRAPH_HANDLES = {}\ndef f(): GRAPH_HANDLES['a'] = 1", "worker/x.py"),
    (rules.docstrings, "x = 1", "worker/x.py"),
    (rules.docstrings, '"""Doc."""\ndef f(): pass', "worker/x.py"),
    (rules.docstrings, '"""Doc."""\nclass A: pass', "worker/x.py"),
    (rules.docstrings, '"""Doc."""\nclass A:\n  """Doc."""\n  def f(self): pass', "worker/x.py"),
    (rules.docstring_beginnings, '"""What the room knows."""', "worker/x.py"),
    (rules.docstring_beginnings, '"""Doc."""\nclass A:\n  """One: the row."""', "worker/x.py"),
    (rules.docstring_beginnings, '"""Doc."""\nclass A:\n  def _f(self):\n    """Whether it fits."""', "worker/x.py"),
    (rules.import_directions, "from quire.kv.pool import BlockPool", "worker/x.py"),
    (rules.import_directions, "def f():\n  import quire.engine.core", "worker/x.py"),
    (rules.import_directions, "if TYPE_CHECKING:\n  from quire.entry.llm import LLM", "engine/x.py"),
    (rules.import_directions, "import_module('quire.worker.runner')", "engine/x.py"),
    (rules.import_directions, "from ..entry import llm", "engine/x.py"),
    (rules.import_directions, "from quire import LLM", "entry/x.py"),
    (rules.import_directions, "from quire import bench", "entry/llm.py"),
    (rules.import_directions, "x = 1", "newroom/x.py"),
]

GREEN = [
    (rules.positional_parameters, "class A:\n  def f(self, a, b, c, d, e, f, *, g): pass", "worker/x.py"),
    (rules.positional_parameters, "def f(a, b, c, d, e, f, g): pass", "kernels/x.py"),
    (rules.environment, "import os\nx = os.environ['A']", "config/env.py"),
    (rules.triton_home, "import triton\n@triton.jit\ndef f(): pass", "kernels/norm/triton.py"),
    (rules.module_state, "TABLE = {'a': 1}\ndef f():\n  seen = set()\n  seen.add(TABLE['a'])", "worker/x.py"),
    (rules.module_state, "GRAPH_HANDLES = {}\ndef f(): GRAPH_HANDLES['a'] = 1", "kernels/x.py"),
    (rules.module_state, "class A:\n  items: list[int] = field(default_factory=list)", "worker/x.py"),
    (rules.docstrings, '"""Doc."""\ndef _f(): pass\nclass _A:\n  def f(self): pass', "worker/x.py"),
    (rules.docstrings, '"""Doc."""\nclass A(Base):\n  """Doc."""\n  def f(self): pass', "worker/x.py"),
    (rules.docstring_beginnings, '"""Whatever it is."""\ndef f(): pass\n', "worker/x.py"),
    (rules.import_directions, "from quire.kernels.norm import rms_norm", "layers/x.py"),
    (rules.import_directions, "from quire.bench.workload import load_workloads", "entry/cli/bench.py"),
    (rules.import_directions, "from quire import __version__", "entry/x.py"),
]


def label(value: object) -> str:
    return getattr(value, "__name__", None) or str(value).replace("\n", "; ")[:40]


@pytest.mark.parametrize(("rule", "text", "path"), RED, ids=label)
def test_planted_violation_is_seen(rule: rules.Rule, text: str, path: str) -> None:
    assert complaints(rule, text, path)


@pytest.mark.parametrize(("rule", "text", "path"), GREEN, ids=label)
def test_what_is_allowed_stays_quiet(rule: rules.Rule, text: str, path: str) -> None:
    assert complaints(rule, text, path) == []


def test_every_rule_has_a_planted_violation() -> None:
    assert {rule for rule, _, _ in RED} == set(rules.FILE_RULES)


def test_a_class_name_may_stand_in_two_modules_of_one_room_only() -> None:
    one_room = [Source("kv/a.py", "class Block: pass"), Source("kv/b.py", "class Block: pass")]
    nested = Source("worker/x.py", "class Slot:\n  class Block: pass")
    assert rules.repeated_classes([*one_room, nested]) == []
    (found,) = rules.repeated_classes([*one_room, Source("worker/y.py", "class Block: pass")])
    assert "class Block stands in kv/a.py, kv/b.py, worker/y.py" in found


def test_two_rooms_of_one_level_may_not_import_each_other() -> None:
    one_way = [Source("kv/a.py", "from quire.text import b")]
    assert rules.room_cycles(one_way) == []
    assert rules.room_cycles([*one_way, Source("text/b.py", "from quire.kv import a")])


def test_modules_may_not_import_each_other_in_a_circle() -> None:
    first = Source("kv/a.py", "def f():\n  from quire.kv.b import g")
    second = Source("kv/b.py", "from quire.kv import c")
    assert rules.module_cycles([first, second, Source("kv/c.py", "from quire import __version__")]) == []
    (found,) = rules.module_cycles([first, second, Source("kv/c.py", "import quire.kv.a"), Source("kv/d.py", "")])
    assert found == "imports go round in quire.kv.a, quire.kv.b, quire.kv.c"


def test_torch_is_found_through_other_modules() -> None:
    files = [
        Source("engine/core.py", "from quire.config import load"),
        Source("config/load.py", "def f():\n  import safetensors.torch"),
        Source("worker/run.py", "import torch"),
    ]
    found = rules.brings_torch(files, rules.TORCH_FREE_ROOMS)
    assert [complaint.split(":")[0] for complaint in found] == ["engine/core.py", "config/load.py"]


@pytest.mark.parametrize("folder", ["work", "root", "home/me"])
def test_machine_paths_are_found(folder: str) -> None:
    assert list(rules.foreign_text("a.md", f"see /{folder}/x/y"))


@pytest.mark.parametrize("folder", ["work", "root"])
@pytest.mark.parametrize("before", ["https://a.org", "docs", "the", "src"])
def test_folders_of_these_names_elsewhere_are_not(before: str, folder: str) -> None:
    line = f"{before}/{folder}/x"
    assert list(rules.foreign_text("a.md", line)) == []
