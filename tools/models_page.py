"""The page of models, docs/models.md, from the families that the reader of config.json knows and the results of tests.

PYTHONPATH=src:. python tools/models_page.py          writes the page
PYTHONPATH=src:. python tools/models_page.py --run    before that compares every family with transformers (20 minutes),
                                                      or those that are named behind --run, and keeps the results in
                                                      docs/models.json
"""

import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.support.foreign_models import MODELS as FOREIGN
from tests.support.tiny_models import FAMILIES as CASES
from tests.support.tiny_models import Tiny, tiny_config

from quire.args.checkpoint import LACKING, ModelArgs, parse_checkpoint_config
from quire.args.delta import DeltaArgs
from quire.args.experts import MoEArgs
from quire.args.families import FAMILIES
from quire.args.latent import LatentArgs
from quire.args.layers import BesideArgs, DenseArgs, GroupedArgs, NoneArgs
from quire.args.mamba import MambaArgs
from quire.args.shortconv import ShortConvArgs
from quire.args.wrappers import WRAPPERS

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "models.md", ROOT / "docs" / "models.json"
INTRODUCTION = """# Models

Made by `PYTHONPATH=src:. python tools/models_page.py` from the families that the reader of config.json knows, and from
the results of `--run`, which compares every family with transformers. Do not edit.

A checkpoint runs when its `model_type` is in the first or second table. "Ways" are the runs of a random tiny model of
the family in float32: 64 greedy tokens of seven prompts must be those of transformers, and the log-probabilities of all
positions must be within 1e-4. A cover of all pairs of these settings is run: heads, tied embeddings, biases, chunks,
block size, prefix cache, depth of the step pipeline, preemption, drafts. Two more runs have tensor and pipeline
parallelism of 2. `quire verify MODEL` makes the comparison step by step for any checkpoint.

## Families
"""
OTHERS = """
## Any other decoder of transformers

A causal decoder that is in none of these tables runs by the code of transformers (`pip install
'quire[transformers]'`), with Quire's scheduler, cache, sampler and server. transformers builds its modules without
weights. Quire traces a layer of each kind to the operations that it runs, and replaces those that equal its own
kernels on random numbers: projections (queries, keys and values as one, gate and up as one, quantized formats too),
norms, the preparation of heads (norm, rotation, write to the cache), attention (scale, window or chunks, cap,
sinks), activations, experts, sums with the residual. What is left stays an operation of PyTorch. `quire explain
MODEL` says which, and why. Layers of which nothing is left run as fast as those of a family in the table; `quire
verify` has nothing to compare.

`--model-impl transformers` runs a family of the table this way, `--model-impl quire` refuses all others. Refused
with the reason: code of a checkpoint (`trust_remote_code` stays off), recurrent layers, cross-attention, encoders,
masks of a model's own, positions derived from the length of a cache (Llama 4), rope types dynamic and longrope,
ways that depend on the number of tokens of a step, weights that more than embedding and head share.
Experts run by Quire's kernels, and the module chooses them. `-tp` needs layers whose heads are prepared by Quire,
with nothing but views between attention and the projection behind it; `-pp` needs nothing. `quire quantize` takes
such models.

Compared like the families above, with random tiny checkpoints: {}.
"""


def attention(args: ModelArgs) -> str:
    """Return the mixers of a model in words."""
    words = list(dict.fromkeys(KDA if getattr(one, "low_rank", 0) else KINDS[type(one)] for one in args.mixers))
    grouped = [one for one in args.mixers if isinstance(one, GroupedArgs)]
    latent = [one for one in args.mixers if isinstance(one, LatentArgs)]
    facts = {
        "windows": any((one.window or 0) > 0 for one in grouped),
        "attention in chunks": any((one.window or 0) < 0 for one in grouped),
        "sinks": any(one.scores.sinks for one in grouped),
        "soft cap": any(one.scores.soft_cap for one in grouped),
        "norm of heads": any(one.qk_norm == "head" for one in grouped),
        "norm of rotated heads": any(one.qk_norm == "plain" for one in grouped),
        "norm over all heads": any(one.qk_norm == "whole" for one in grouped),
        "layers without rotation": any(one.rope.kind == "none" for one in args.attending),
        "part of a head rotated": any(
            one.rotary_dim < one.head_dim or one.rope.kind == "proportional" for one in grouped
        ),
        "several sizes of heads": len({(one.num_kv_heads, one.head_dim) for one in grouped}) > 1,
        "normalized values": any(one.values == "normed" for one in grouped),
        "values from keys": any(one.values == "keys" for one in grouped),
        "both in each layer": any(one.beside is not None for one in args.layers),
        "gated": any(one.gated for one in grouped),
        "tokens chosen by an indexer": any(one.index is not None for one in latent),
        "some layers share it": any(one.index is not None and one.index.shared for one in latent),
        "KV of earlier layers": any(one.kv_from >= 0 for one in grouped),
    }
    return ", ".join([*words, *(name for name, true in facts.items() if true)])


KDA = "recurrent (Kimi delta attention)"
KINDS: Mapping[type, str] = {
    LatentArgs: "latent",
    GroupedArgs: "grouped",
    DeltaArgs: "recurrent (gated delta rule)",
    ShortConvArgs: "recurrent (short convolution)",
    MambaArgs: "recurrent (Mamba 2)",
}


def feed_forward(args: ModelArgs) -> str:
    """Return the feed-forward parts of a model in words."""
    found = []
    for one in dict.fromkeys(one.feed_forward for one in args.layers):
        if isinstance(one, DenseArgs):
            found.append("MLP (relu2)" if one.act == "relu2" else f"gated MLP ({one.act})")
        elif isinstance(one, NoneArgs):
            continue
        elif isinstance(one, MoEArgs):
            shared = ", shared ones" * (one.shared_size > 0)
            found.append(f"experts ({one.act}{', biased' * one.biased}{shared})")
        elif isinstance(one, BesideArgs):
            found.append(f"gated MLP beside experts ({one.dense.act})")
        else:
            found.append(type(one).__name__)
    found += ["embeddings for each layer"] * any(one.inputs for one in args.layers)
    return ", ".join(dict.fromkeys(found))


def norms(args: ModelArgs) -> str:
    """Return the places and the kind of the norms of a model in words."""
    places = {"before": "before each half", "after": "of results", "both": "before each half and of results"}
    words = places.get(args.layers[0].norms, "one for both halves")
    if len({one.norms for one in args.layers}) > 1:
        words = "before each half of recurrent layers, of results in others"
    if any(NoneArgs() in (one.mixer, one.feed_forward) for one in args.layers):
        words = "before the layer, which is a mixer or a feed-forward part alone"
    return words + ", 1 + weight" * args.norm.plus_one + ", layer normalization" * args.norm.centered


def verified(result: Mapping[str, Any] | None) -> str:
    """Return the result of the comparison of a family in words."""
    return f"{result['passed']} of {result['rows']} ({result['date']})" if result else "in CI alone"


def cases_of(family: str) -> list[str]:
    """Return the rows of the tests that describe models of a family."""
    return [row for row, case in CASES.items() if (case.of or row) == family]


def rows(results: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table of families."""
    yield "model_type", "architecture", "attention", "feed-forward", "norms", "ways equal to transformers"
    for name, family in FAMILIES.items():
        each = [parse_checkpoint_config(tiny_config(Tiny(family=one))) for one in cases_of(name)]
        args = replace(each[0], layers=tuple(layer for one in each for layer in one.layers))
        peer = f" (as {CASES[name].peer})" if CASES[name].peer else ""
        yield (
            f"`{name}`",
            f"`{family.architecture}`",
            attention(args),
            feed_forward(args),
            norms(args),
            verified(results.get(name)) + peer,
        )


def page(results: Mapping[str, Any]) -> str:
    """Return the text of the page."""
    around = [("model_type", "architecture", "language model")]
    around += [(f"`{name}`", f"`{one.architecture}`", f"`{one.text}`") for name, one in WRAPPERS.items()]
    lacking: dict[str, list[str]] = {}
    for name, needs in LACKING.items():
        if name not in FAMILIES and name not in WRAPPERS:
            lacking.setdefault(needs, []).append(f"`{name}`")
    missing = [("model_type", "needs"), *((", ".join(names), needs) for needs, names in lacking.items())]
    parts = [
        INTRODUCTION,
        table(list(rows(results))),
        "\n## Language models inside models that read images\n",
        "The language model runs; the weights of the rest are not read. A request with an image gets an error (400).\n",
        table(around),
        OTHERS.format(", ".join(f"`{name}`" for name in FOREIGN if name not in FAMILIES)),
        "\n## Known, and not implemented yet\n",
        table(missing),
        "",
    ]
    return "\n".join(parts)


def table(cells: list[tuple[str, ...]]) -> str:
    """Return a table of Markdown, the first row as its head."""
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "---|" * len(cells[0]), *lines[1:]])


def run(families: Collection[str]) -> dict[str, Any]:
    """Compare families with transformers. Return family -> rows, passed rows and date."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "families.xml"
        tests = ["tests/e2e/test_families.py", "-q", "-n", os.environ.get("PROCESSES", "2"), f"--junitxml={report}"]
        tests += ["-k", " or ".join(f"[{row}-" for name in families for row in cases_of(name))]
        subprocess.run([sys.executable, "-m", "pytest", *tests], cwd=ROOT, env=os.environ | {"QUIRE_FULL": "1"})
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    found: dict[str, Any] = {}
    for case in cases:
        words = re.findall(r"\w+", case.attrib["name"].partition("[")[2])
        family = next(name for name in FAMILIES if set(cases_of(name)) & set(words))
        own = found.setdefault(family, {"rows": 0, "passed": 0, "date": datetime.date.today().isoformat()})
        own["rows"] += 1
        own["passed"] += not len(case)
    return found


if __name__ == "__main__":
    if "--run" in sys.argv:
        named = sys.argv[sys.argv.index("--run") + 1 :]
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps(known | run(named or FAMILIES), indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(json.loads(RESULTS.read_text()) if RESULTS.exists() else {}))
