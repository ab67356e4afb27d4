"""The tour of two ranks on CPUs: who holds which part of the model, and what they send each other."""

from collections.abc import Callable, Sequence
from typing import Any

from quire.args.layers import GroupedArgs
from quire.explain.describe import plan_engine
from quire.observe.calls import Span
from quire.reports.engine import PlanReport
from quire.reports.ranks import describe_one
from quire.tour.live import BEFORE, Live, SeenCall, TourStop, Values
from quire.tour.token import OPTIONS as ONE
from quire.tour.token import PROMPT as PROMPT

OPTIONS: dict[str, Any] = ONE | {"tensor_parallel_size": 2, "max_num_seqs": 4}
RANKS = range(OPTIONS["tensor_parallel_size"])


def _plan(live: Live) -> PlanReport:
    if "plan" not in live.notes:
        live.notes["plan"] = plan_engine(live.llm.engine.config)
    report: PlanReport = live.notes["plan"]
    return report


def _holdings(live: Live) -> Values:
    found = Values()
    for one in _plan(live).describe()["ranks"]:
        heads = f"query heads {_range(one['heads'])}, KV head {_range(one['kv_heads'])}"
        words = f"layers {_range(one['layers'])}, {heads}, {one['bytes'] / 2**20:.1f} MiB of weights"
        found.append((f"rank {one['number']}", words))
    return found


def _range(bounds: list[int]) -> str:
    return str(bounds[0]) if bounds[1] - bounds[0] == 1 else f"{bounds[0]}-{bounds[1] - 1}"


def _shown(tensors: Sequence[str], *names: str) -> Callable[[Live], Values]:
    """Return a function that shows slices of stored tensors and calls of the first step, of every rank."""

    def shown(live: Live) -> Values:
        found = Values()
        for rank in RANKS:
            held = {one["tensor"]: one for one in describe_one(_plan(live), rank)["slices"]}
            for tensor in tensors:
                axis = ("rows", "columns")[held[tensor]["axis"]]
                bounds = f"{axis} {held[tensor]['start']}-{held[tensor]['end'] - 1} of {held[tensor]['total']}"
                found.append((f"rank {rank} holds", f"{tensor}: {bounds}"))
            for name in names:
                call = live.calls(name, 0, rank)[0]
                found.append((f"rank {rank} computes", f"{name}: {call.takes.partition(', Step')[0]} -> {call.gives}"))
        return found

    return shown


def _sent(live: Live, call: SeenCall) -> Values:
    plan = call.given["plan"]
    (new,) = plan.admitted
    return [
        ("ranks", f"{len(RANKS)} processes, the same plan for each"),
        ("slots, and tokens of each", f"{plan.slots.tolist()}, {plan.num_tokens.tolist()}"),
        ("new request", f"token ids {new.token_ids.tolist()}, blocks {new.block_ids[0].tolist()}"),
    ]


def _sums(live: Live) -> Values:
    found = Values()
    for rank in RANKS:
        calls = live.calls("tp.all_reduce", 0, rank)
        spent = sum(call.seconds for call in calls)
        words = f"{len(calls)} all-reduces of {calls[0].takes}, {_bytes(calls[0]):,} bytes each"
        found.append((f"rank {rank}, a step", f"{words}, {1e3 * spent:.2f} ms in all"))
    return found


def _bytes(call: Span) -> int:
    """Return the bytes of the float32 array that a call takes, such as f32[3,256]."""
    total = 4
    for size in call.takes.removeprefix("f32[").rstrip("]").split(","):
        total *= int(size)
    return total


def _answer(live: Live) -> Values:
    return [*_shown((), "head", "tp.all_gather")(live), ("text", repr(live.output.outputs[0].text))]


LAYER = "model.layers.0."
STOPS = (
    TourStop(
        r"LLM\.generate",
        BEFORE,
        ("replica, rest = divmod(", "stage, place = divmod(", "place=place"),
        later=_holdings,
        formula="quire.plan.placement:ranks",
        tie="start",
        drawing="ranks",
    ),
    TourStop(r"RanksExecutor\.submit", 0, ("self._processes.send(",), _sent),
    TourStop(
        "embed", 0, ("self.slice.group.all_reduce(",), later=_shown(["model.embed_tokens.weight"], "embed"), rank=1
    ),
    TourStop(
        r"layers\.0\.attention\.qkv",
        0,
        ('"q": rows(', '"k": rows(', '"v": rows(', '"qkv.weight"'),
        later=_shown([f"{LAYER}self_attn.{one}_proj.weight" for one in "qkv"], "layers.0.attention.qkv"),
        formula="quire.plan.kinds.grouped:GroupedKind.params",
        tie="start",
        rank=1,
    ),
    TourStop(
        r"layers\.0\.attention\.output\.add",
        0,
        ("self.tp.add(self(x",),
        later=_shown([f"{LAYER}self_attn.o_proj.weight"], "layers.0.attention.output.add"),
        rank=1,
    ),
    TourStop(r"tp\.all_reduce", 0, ("dist.all_reduce(",), later=_sums, rank=1, drawing="exchanges"),
    TourStop(
        r"layers\.0\.mlp",
        0,
        ("branch.add(self.down",),
        later=_shown(
            [f"{LAYER}mlp.{one}_proj.weight" for one in ("gate", "up", "down")],
            "layers.0.mlp.gate_up",
            "layers.0.mlp.down.add",
        ),
        rank=1,
    ),
    TourStop(r"SlicedSampling\.sample", 0, ("keys = self._whole.keys(", "all_gather(keys)"), later=_answer, rank=1),
)


def facts(live: Live) -> dict[str, Any]:
    """Return the values that the texts name."""
    args = live.llm.engine.args
    mixer = args.layers[0].mixer
    assert isinstance(mixer, GroupedArgs)
    return {
        "layers": args.num_layers,
        "heads": mixer.num_heads,
        "kv_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "vocab": f"{args.vocab_size:,}",
        "hidden": args.hidden_size,
        "sums": len(live.calls("tp.all_reduce", 0, 0)),
        "rows": f"{args.vocab_size // len(RANKS):,}",
    }
