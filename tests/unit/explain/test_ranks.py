"""A rank does what is said of it: the bytes that its loader reads, its exchanges, the functions it calls."""

import functools
import importlib
import json
import os
import re
import threading
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from torch import Tensor

from quire.assemble.build import build_model
from quire.assemble.engine import plan_ranks, read_files
from quire.assemble.loaded import Parts
from quire.assemble.rank import load_rank
from quire.config.bundled import bundled_model
from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError
from quire.contracts.parallel import Parallel, share
from quire.contracts.request import NewRequest
from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import SAMPLE, StepPlan
from quire.distributed import Group
from quire.distributed.mesh import RankGroups
from quire.engine.replicas import Core
from quire.entry.cli.main import main
from quire.explain.describe import plan_engine
from quire.explain.render_ranks import cut_words
from quire.layers.moe import Experts
from quire.plan.collectives import algorithm, collectives, groups
from quire.plan.meetings import idle_notes, inputs_of, met
from quire.plan.parallel_notes import parallel_notes
from quire.plan.placement import ranks
from quire.reports.engine import PlanReport
from quire.reports.ranks import describe_one, rank_lines, rank_name
from quire.traces.load_trace import rank_slices, ways_to_kernels
from quire.weights.files import read_checkpoint

from ...support import simulated_engine
from ...support.changed_args import without_experts
from ...support.full import full_rows
from ...support.quantized_checkpoints import FORMS, quantize_checkpoint
from ...support.tiny_models import Tiny, random_model

SIZES = {
    "tp2": Parallel(tp=2), "tp2-ep": Parallel(tp=2, experts=True), "pp2": Parallel(pp=2),
    "tp2-pp2": Parallel(tp=2, pp=2), "dp2-ep": Parallel(dp=2, experts=True),
    "tp2-ep-in-turn": Parallel(tp=2, experts=True, round_robin=True),
    "dp2-tp2-ep-in-turn": Parallel(dp=2, tp=2, experts=True, round_robin=True),
    "dp2-tp2-ep": Parallel(dp=2, tp=2, experts=True), "dp2-pp2-ep": Parallel(dp=2, pp=2, experts=True),
    "tp2-dcp2": Parallel(tp=2, dcp=2),
}  # fmt: skip
CASES = [  # every size, and every family with tensors and with stages
    *(("qwen3", size) for size in ("tp2", "tp2-pp2")),
    *(("qwen3_moe", size) for size in ("tp2-ep-in-turn", "dp2-tp2-ep", "dp2-pp2-ep")),
    *(("deepseek_v3", size) for size in ("tp2-ep", "pp2", "dp2-ep", "dp2-tp2-ep-in-turn")),
]
CASES += full_rows(
    (family, size)
    for family in ("qwen3", "qwen3_moe", "deepseek_v3")
    for size in SIZES
    if (family, size) not in CASES and SIZES[size].dcp == 1 and (family != "qwen3" or not SIZES[size].experts)
)
DIVIDED = ("deepseek_v3", "tp2-dcp2")
IN_8_BITS = "qwen3_moe in 8 bits"
TINY = str(bundled_model())
KINDS = {"add": "all-reduce", "post": "send", "gather_rows": "all-gather", "scatter_sum": "reduce-scatter"}
QUESTIONS = (".missing", ".rows_only")  # functions that compute nothing
STRATEGY = {False: "linear", True: "round_robin"}
PAGE = 32  # tokens of a rank's part of a block, which holds its part of these prompts
FOUR = 4  # bytes of a number of these checkpoints
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    @functools.cache
    def made(family: str) -> Path:
        folder: Path = tmp_path_factory.mktemp(family)
        if family == IN_8_BITS:
            quantize_checkpoint(made("qwen3_moe"), folder, FORMS["ct-int8-channel"])
        else:
            random_model(Tiny(family=family, tied=family == "qwen3"), 0).save_pretrained(folder)
        return folder

    return made


def config(folder: Path, parallel: Parallel, **options: Any) -> EngineConfig:
    return EngineConfig.from_flat(
        model=str(folder),
        device="cpu",
        skip_tokenizer_init=True,
        max_num_seqs=2,
        dtype="float32",
        tensor_parallel_size=parallel.tp,
        decode_context_parallel_size=parallel.dcp,
        pipeline_parallel_size=parallel.pp,
        data_parallel_size=parallel.dp,
        enable_expert_parallel=parallel.experts,
        expert_placement_strategy=STRATEGY[parallel.round_robin],
        **options,
    )


# --- slices -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(first byte, end) of every read of weights."""
    found: list[tuple[int, int]] = []
    real = os.preadv

    def preadv(handle: int, buffers: list[memoryview], offset: int) -> int:
        count = real(handle, buffers, offset)
        found.append((offset, offset + count))
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    return found


def test_a_trace_of_a_tensor_has_the_slices_of_every_rank(folders: Folders) -> None:
    """Experts lie on one of the ranks; heads and columns are divided."""
    report = plan_engine(config(folders("deepseek_v3"), SIZES["tp2-ep"]))
    slices = {rank: describe_one(report, rank)["slices"] for rank in (0, 1)}
    for name in read_checkpoint(folders("deepseek_v3")).tensors:
        cuts = [(rank, one) for rank in slices for one in slices[rank] if one["tensor"] == name]
        lines = list(rank_slices(report, [name]))
        assert [line.partition(" reads ")[0] for line in lines] == [f"rank {rank} (tp {rank})" for rank, _ in cuts]
        for line, (_, one) in zip(lines, cuts, strict=True):
            assert f"reads {cut_words(one)}: ".replace("reads whole", "reads it whole") in line
            begin, end = map(int, re.search(r": rows (\d+) to (\d+) of ", line).groups())  # type: ignore[union-attr]
            count = one["end"] - one["start"]
            assert end - begin == (count if one["axis"] == 0 else one["shape"][0])
            assert ("expert " in line) == (".experts." in name), line


def test_a_tied_embedding_has_a_way_for_each_stage_that_reads_it() -> None:
    report = plan_engine(EngineConfig.from_flat(model=str(bundled_model()), pipeline_parallel_size=2, device="cpu"))
    lines = list(ways_to_kernels(report, ["model.embed_tokens.weight"]))
    assert {line.partition(":")[0] for line in lines} == {"embed.weight", "head.weight"}
    assert any(line.startswith("embed.weight: run  torch.nn.functional.embedding") for line in lines)
    assert any(line.startswith("head.weight: pack  quire.kernels.linear.") for line in lines)


def told(folder: Path, slices: list[dict[str, Any]]) -> Iterator[tuple[int, int]]:
    """(first byte, end) of the slices in the file of a checkpoint."""
    stored = read_checkpoint(folder).tensors
    for one in slices:
        tensor = stored[one["tensor"]]
        assert (tensor.shape, tensor.file.name) == (tuple(one["shape"]), one["file"])
        assert one["total"] == tensor.shape[one["axis"]] and 0 <= one["start"] < one["end"] <= one["total"]
        rows, width = tensor.shape[0], tensor.num_bytes // tensor.shape[0]
        first, end = one["start"], one["end"]
        if one["axis"] == 0:
            yield tensor.offset + first * width, tensor.offset + end * width
        else:
            yield from (
                (tensor.offset + row * width + first * FOUR, tensor.offset + row * width + end * FOUR)
                for row in range(rows)
            )


def joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for first, end in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((first, end))
    return found


@pytest.mark.parametrize(("family", "size"), CASES)
def test_a_rank_reads_the_slices_that_are_told(
    folders: Folders, read: list[tuple[int, int]], family: str, size: str
) -> None:
    folder, asked = folders(family), config(folders(family), SIZES[size])
    report, plans = plan_engine(asked), plan_ranks(asked, read_files(asked))
    for plan, own in zip(plans, simulated_engine.make_groups(plans), strict=True):
        read.clear()
        load_rank(plan, own, None, on_loading=lambda done, total: None, end_phase=lambda name: None)
        rank = describe_one(report, plan.mesh.rank.number)
        slices = list(told(folder, rank["slices"]))
        assert joined(read) == joined(slices)
        assert sum(end - first for first, end in read) == sum(end - first for first, end in slices) == rank["bytes"]


@pytest.mark.parametrize("size", [size for size in SIZES if SIZES[size].experts])
def test_a_rank_reads_its_own_experts_alone(folders: Folders, size: str) -> None:
    """The routing table of explain, the loader's slices and the map in the layers agree: in turn, or neighbours."""
    asked, parallel = config(folders("qwen3_moe"), SIZES[size]), SIZES[size]
    report, plans = plan_engine(asked), plan_ranks(asked, read_files(asked))
    for plan, meshed in zip(plans, simulated_engine.make_groups(plans), strict=True):
        rank = describe_one(report, plan.mesh.rank.number)
        table, own = rank["routing_table"], [*plan.mesh.rank.expert_ids]
        read = {int(found[1]) for one in rank["slices"] if (found := re.search(r"experts\.(\d+)\.", one["tensor"]))}
        assert sorted(read) == own == [e for e, (number, _) in enumerate(table) if number == rank["number"]]
        places = [slot if number == rank["number"] else -1 for number, slot in table]
        model = build_model(plan, meshed)
        maps = [
            one.expert_map.tolist()
            for one in model.modules()
            if isinstance(one, Experts) and one.expert_map is not None
        ]
        assert maps and all(one == places for one in maps)
        if parallel.round_robin:
            assert all(
                e % parallel.expert_ranks == own[0] and place == e // parallel.expert_ranks
                for e, place in enumerate(places)
                if place >= 0
            )


# --- steps ------------------------------------------------------------------------------------------------------------


class Watched:
    """A group whose calls are noted as (group, kind, bytes)."""

    def __init__(self, name: str, group: Group, note: Callable[[tuple[str, str, int]], None]) -> None:
        self._name, self._group, self._note = name, group, note
        self.rank, self.size, self.kind = group.rank, group.size, group.kind

    def __getattr__(self, call: str) -> Any:
        kind = KINDS.get(call, call.replace("_", "-"))

        def noted(x: Tensor, *more: Any) -> Any:
            self._note((self._name, kind, x.numel() * x.element_size()))
            return getattr(self._group, call)(x, *more)

        if call == "begin_step":  # it exchanges nothing
            return self._group.begin_step

        return noted


class Engine:
    """An engine of simulated ranks; steps: for each rank, (its plan, its exchanges) of every step."""

    def __init__(self, folder: Path, parallel: Parallel, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        make = simulated_engine.make_groups
        self.steps: list[list[tuple[StepPlan, Counter[tuple[str, str, int]]]]] = [[] for _ in range(parallel.size)]
        self.threads: dict[int, int] = {}  # of a rank

        def watched(plans: Any) -> list[RankGroups]:
            return [
                RankGroups(
                    **{
                        name: Watched(name, group, functools.partial(self._note, number))
                        for name, group in vars(own).items()
                        if group is not None
                    }
                )
                for number, own in enumerate(make(plans))
            ]

        monkeypatch.setattr(simulated_engine, "make_groups", watched)
        self.core: Core
        self.core, parts = simulated_engine.simulated(
            folder,
            tp=parallel.tp,
            pp=parallel.pp,
            dp=parallel.dp,
            experts=parallel.experts,
            decode_context_parallel_size=parallel.dcp,
            expert_placement_strategy=STRATEGY[parallel.round_robin],
            skip_tokenizer_init=True,
            max_num_seqs=2,
            dtype="float32",
            **options,
        )
        for number, part in enumerate(parts):
            self._mark_steps(number, part)

    def _note(self, number: int, call: tuple[str, str, int]) -> None:
        self.steps[number][-1][1][call] += 1

    def _mark_steps(self, number: int, part: Parts) -> None:
        worker = part.worker
        assert worker is not None
        submit = worker.submit

        def marked(plan: StepPlan) -> None:
            self.threads[number] = threading.get_ident()
            self.steps[number].append((plan, Counter()))
            submit(plan)

        worker.submit = marked  # type: ignore[method-assign]

    def answer(self, count: int, max_tokens: int = 2, **sampling: Any) -> None:
        """Run a request with `count` tokens of prompt; forget the steps before it."""
        for steps in self.steps:
            steps.clear()
        prompt = array("I", range(count)).tobytes()
        spec = SamplerSpec(seed=0, num_prompt=count, **({"temperature": 0.0} | sampling))
        self.core.add(NewRequest(handle=count, request_id="r", token_ids=prompt, max_tokens=max_tokens, sampler=spec))
        while self.core.has_work:
            for finish in self.core.step().finished:
                assert finish.error is None


@pytest.fixture
def engine(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Engine]]:
    made: list[Engine] = []

    def make(family: str, size: str) -> Engine:
        made.append(Engine(folders(family), SIZES[size], monkeypatch))
        return made[-1]

    yield make
    for one in made:
        one.core.shutdown()


def sampled(plan: StepPlan) -> int:
    """Rows that are sampled: all of decodes, which verify drafts, and the last one of prompts."""
    decodes = plan.num_decodes
    return int(plan.num_tokens[:decodes].sum()) + int(((plan.outputs[decodes:] & SAMPLE) != 0).sum())


def replica_rows(plan: StepPlan) -> tuple[int, ...]:
    """Tokens of each replica in a step; of one replica without others."""
    return (int(plan.num_tokens.sum()),) if plan.sync is None else plan.sync.rows


def expected(
    rank: dict[str, Any],
    tp: int,
    plan: StepPlan,
    owed: StepPlan | None,
    filtered: bool,
    scored: bool,
) -> Counter[tuple[str, str, int]]:
    """The exchanges that are told of a rank in a step; owed: the step whose tokens the first stage receives in it."""
    found: Counter[tuple[str, str, int]] = Counter()
    happens = {"": True, "no row": not filtered, "a row": filtered, "log-pr": scored, "before": True}
    every = replica_rows(plan)
    own = every[rank["replica"] if plan.sync else 0]
    first, end = share(own, tp, rank["place"])
    for one in (one for one in rank["collectives"] if not one["drafts"]):
        rows = {"token": own, "token of its share": end - first, "token of all replicas": sum(every)}.get(one["per"], 0)
        if one["when"] == "a replica has tokens":  # those without tokens take part
            found[one["group"], one["kind"], rows * one["message_bytes"]] += one["times"]
            continue
        if one["when"].startswith(("up to", "more than")):
            few = own <= float(one["when"].split()[2])
            rows = own * few if one["per"] == "token" else PAGE * (not few)
        elif one["per"] != "token":
            step = owed if one["when"].startswith("before") else plan
            rows = 0 if step is None else sampled(step)
        if rows and next(is_so for words, is_so in reversed(happens.items()) if one["when"].startswith(words)):
            found[one["group"], one["kind"], rows * one["message_bytes"]] += one["times"]
    return found


@pytest.mark.parametrize(
    ("family", "size"), [*CASES, DIVIDED, *full_rows([(IN_8_BITS, "dp2-ep")]), (IN_8_BITS, "dp2-tp2-ep")]
)
def test_ranks_exchange_what_is_told(folders: Folders, engine: Any, family: str, size: str) -> None:
    report, made = plan_engine(config(folders(family), SIZES[size])), engine(family, size)
    owed: list[StepPlan | None] = [None] * SIZES[size].size  # the last step of each rank that sampled
    for count, sampling in (
        (20, {}),
        (21, {"temperature": 1.0}),
        (22, {"temperature": 1.0, "top_p": 0.9}),
        (23, {"num_logprobs": 2}),
        (24, {"repetition_penalty": 1.2}),
        (40, {}),
    ):
        made.answer(count, 3, **sampling)
        filtered, scored = bool(sampling.keys() & {"top_p", "repetition_penalty"}), "num_logprobs" in sampling
        for number, last in enumerate(owed):
            rank, steps = (
                describe_one(report, number),
                [(plan, calls) for plan, calls in made.steps[number] if any(replica_rows(plan))],
            )
            assert [sum(replica_rows(plan)) for plan, _ in steps] == [count, 1, 1]
            for plan, calls in steps:
                settled = len(plan.slots) or len(plan.released)
                told_of = expected(rank, SIZES[size].tp, plan, last if settled else None, filtered, scored)
                assert calls == told_of, (number, plan.step, sampling)
                last = plan if sampled(plan) else None if settled else last
            owed[number] = last


@pytest.mark.parametrize(("family", "size"), [*CASES, *full_rows([DIVIDED])])
def test_ranks_call_the_functions_that_are_named(
    folders: Folders, engine: Any, family: str, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_engine(config(folders(family), SIZES[size])).describe()
    counts: dict[int, Counter[str]] = defaultdict(Counter)
    count_calls(monkeypatch, plan, counts)
    made = engine(family, size)
    for rows in (20, 40):  # few and many for a latent
        counts.clear()
        made.answer(rows, 1)
        for rank in plan["ranks"]:
            own = [
                layer
                for layer in plan["layers"]
                if layer["layer"].isdecimal() and rank["layers"][0] <= int(layer["layer"]) < rank["layers"][1]
            ]
            own += plan["layers"][:1] * rank["first"] + plan["layers"][-1:] * rank["last"]
            named = [call for layer in own for call in layer["calls"]]
            if plan["latent"]:
                few = rows <= plan["latent"]["break_even"]
                named = [
                    call
                    for call in named
                    if not call["when"].startswith(("up to", "more than")) or call["when"].startswith("up to") == few
                ]
            (step, exchanged), *_ = made.steps[rank["number"]]
            if step.sync is not None and not step.sync.rows[rank["replica"]]:  # it runs its experts for the others
                named = [
                    call
                    for call in named
                    if call["function"].startswith(("quire.kernels.experts.", "ep."))
                    or call["function"] == "tp.all_gather"
                    and not call["when"]
                ]
            found = counts[made.threads[rank["number"]]]
            assert found == Counter(call["function"] for call in named if call["function"].startswith("quire."))
            seen = Counter[str]()
            for (group, kind, _), count in exchanged.items():
                seen[f"{group}.{kind.replace('-', '_')}"] += count * (group in ("tp", "dcp", "ep"))
            assert +seen == Counter(
                call["function"] for call in named if call["function"].startswith(("tp.", "dcp.", "ep."))
            )


def count_calls(monkeypatch: pytest.MonkeyPatch, plan: dict[str, Any], counts: dict[int, Counter[str]]) -> None:
    """Count the calls of the public functions of the modules that were chosen, by thread; not those inside others."""
    inside: dict[int, int] = defaultdict(int)

    def counting(function: Any, name: str) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            thread = threading.get_ident()
            if not inside[thread] and not name.endswith(QUESTIONS):
                counts[thread][name] += 1
            inside[thread] += 1
            try:
                return function(*args, **kwargs)
            finally:
                inside[thread] -= 1

        return functools.wraps(function)(counted)

    chosen = {f"{choice['op']}.{choice['name']}" for choice in plan["kernels"]}
    chosen |= {f"experts.{one['experts']}" for one in plan["moe"].values()}
    for kernel in chosen | {"linear.ref"}:  # of routers whose scores are exact
        module = importlib.import_module(f"quire.kernels.{kernel}")
        for name, function in vars(module).copy().items():
            if isinstance(function, FunctionType) and function.__module__.startswith("quire.") and name[0] != "_":
                monkeypatch.setattr(module, name, counting(function, f"{module.__name__}.{name}"))


# --- words ------------------------------------------------------------------------------------------------------------


def test_groups_have_members_by_global_number() -> None:
    def members(parallel: Parallel) -> dict[str, Any]:
        return {one["name"]: one["members"] for one in groups(parallel)}

    assert members(Parallel()) == members(Parallel(dp=2)) == {}
    across = [[0, 2], [1, 3]]
    assert members(Parallel(tp=2, pp=2)) == {"tp": [[0, 1], [2, 3]], "pp": across, "tokens": across}
    assert members(Parallel(tp=2, experts=True)) == {"tp": [[0, 1]]}
    both = members(Parallel(tp=2, pp=2, dp=2, experts=True))
    assert both.keys() == {"tp", "pp", "tokens", "ep"} and both["ep"] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert both.keys() - members(Parallel(tp=2, pp=2, dp=2)).keys() == {"ep"}, "independent replicas share nothing"


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "nccl")])
def test_algorithms_are_those_of_the_groups(device: str, backend: str) -> None:
    for kind in ("all-reduce", "all-gather", "send", "receive"):
        name, why = algorithm(kind, device)
        assert backend in name.lower() and why


def test_sends_and_receives_of_all_ranks_pair(folders: Folders) -> None:
    args = plan_engine(config(folders("qwen3"), Parallel())).plan.args
    found = list(collectives(args, Parallel(tp=2, pp=2), item_bytes=2, device="cpu"))
    assert [one.group for one in found if one.kind == "send"] == ["pp", "tokens"]
    assert all(one.algorithm and one.why for one in found)
    told = list(collectives(args, Parallel(tp=2, pp=2), item_bytes=2, device="cpu", drafts=()))
    assert [one for one in found if one.group != "tokens"] == told


def test_a_rank_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["explain", TINY, *"--device cpu --dtype float32 -tp 2 -pp 2 --num-threads 2 --rank".split()]
    assert main([*asked, "3"]) == 0
    out = capsys.readouterr().out
    assert "rank 3 of 4 (-tp 2 -pp 2): stage 1, place 1 of its tp group; layers 4-7, query heads 2-3, KV head 1," in out
    for line in (
        "group tp (share every layer of a stage): ranks 2, 3",
        "group pp (stages in order: hidden states go",
        "receive over pp, hidden states of the stage before: 1.0 KiB per token; gloo point to point",
        "all-reduce over tp, attention output: 1.0 KiB per token x 4 = 4.0 KiB; gloo ring",
        "layers 4-7, each",
        "model.layers.{i}.self_attn.o_proj.weight: columns 128-255 of 256",
        "model.embed_tokens.weight: rows 4096-8191 of 8192",
    ):
        assert line in out
    assert main([*asked, "3", "--json"]) == 0
    rank = json.loads(capsys.readouterr().out)
    (one,) = (one for one in rank["slices"] if one["tensor"] == "model.layers.7.self_attn.o_proj.weight")
    assert (one["axis"], one["start"], one["end"], one["total"]) == (1, 128, 256, 256)
    assert (one["parameter"], one["file"][-12:]) == ("layers.7.attention.output.weight", ".safetensors")
    assert main([*asked, "4"]) == 3
    assert "--rank 4 does not exist: this plan has the ranks 0 to 3." in capsys.readouterr().err
    assert main([*asked, "1", "--layer", "2"]) == 2


def test_buffers_are_in_the_memory_of_a_cpu(folders: Folders) -> None:
    """The cache takes a quarter of what weights and buffers leave; the first stage joins no logits."""

    def report(**sizes: int) -> PlanReport:
        return plan_engine(EngineConfig.from_flat(model=TINY, device="cpu", dtype="float32", **sizes))

    assert report().describe()["memory"]["buffers"] == 0
    cut = report(tensor_parallel_size=2, pipeline_parallel_size=2)
    hidden, logits = 2048 * 256 * 4, 256 * 2 * 8192 * 4
    assert [rank["buffers"] for rank in cut.describe()["ranks"]] == [2 * hidden] * 2 + [hidden + logits] * 2
    assert cut.fullest == 2, "the last stage has larger buffers and equal pages"
    with pytest.raises(ConfigError, match="--rank -1 does not exist"):
        describe_one(cut, -1)


def test_a_rank_is_named_by_its_replica() -> None:
    def names(parallel: Parallel) -> list[str]:
        args = plan_engine(EngineConfig.from_flat(model=TINY, device="cpu")).plan.args
        return [rank_name(rank, parallel) for rank in ranks(args, parallel)]

    assert names(Parallel()) == ["rank 0"]
    assert names(Parallel(dp=2)) == ["rank 0 (replica 0)", "rank 1 (replica 1)"]
    assert names(Parallel(dp=2, tp=2, pp=2))[7] == "rank 7 (replica 1, tp 1, stage 1)"


def test_replicas_are_told(folders: Folders) -> None:
    folder = folders("qwen3_moe")
    for parallel, words in (
        (Parallel(dp=2, tp=2, experts=True), "2 replicas in lock-step, which share experts, tp 2,"),
        (Parallel(dp=2, tp=2), "2 replicas which share nothing, tp 2, gloo"),
    ):
        assert words in rank_lines(plan_engine(config(folder, parallel)))["ranks"]


def test_experts_in_turn_are_told(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--device cpu --dtype float32 --skip-tokenizer-init -tp 2 -dp 2 -ep --expert-placement-strategy round_robin"
    asked = ["explain", str(folders("qwen3_moe")), *flags.split()]
    assert main(asked) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in (
        "2 replicas in lock-step, which share experts: replica 0: ranks 0-1; replica 1: ranks 2-3",
        "round_robin: experts go to 4 ranks in turn, where vLLM is linear, because the router chooses among",
        "experts 0, 4 on rank 0; experts 1, 5 on rank 1; experts 2, 6 on rank 2; experts 3, 7 on rank 3",
    ):
        assert words in out
    assert main([*asked, "--rank", "3"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in (
        "replica 1 of 2, stage 0, place 1 of its tp group",
        "mlp.experts.{3, 7}.gate_proj.weight: whole",
        "expert map: experts 3, 7 to slots 0-1; the 6 others to -1, because they are on other ranks",
        "routing table: experts 0, 4 on rank 0; experts 1, 5 on rank 1;",
    ):
        assert words in out


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({}, "a single rank has all experts"),
        ({"tensor_parallel_size": 2}, "every rank has a slice of each expert"),
        ({"enable_expert_parallel": True}, "a single rank has all experts"),
    ],
)
def test_an_order_of_experts_that_changes_nothing_is_noted(folders: Folders, flags: Any, why: str) -> None:
    asked = EngineConfig.from_flat(model=str(folders("qwen3_moe")), expert_placement_strategy="round_robin", **flags)
    report = plan_engine(asked)
    args, said = report.plan.args, f"--expert-placement-strategy round_robin changes nothing: {why}"
    order = "--expert-placement-strategy"  # -ep on one rank has a note of its own
    assert [note for note in idle_notes(report.plan.meetings) if note.startswith(order)] == [f"{said}."]
    assert said in report.describe()["model"]["notes"] and parallel_notes(args, asked.parallel) == ()
    (note,) = (one for one in idle_notes(met(inputs_of(asked, without_experts(args), "cuda"))) if one.startswith(order))
    assert note.endswith("the model has no experts.")
    assert not any(note.startswith(order) for note in idle_notes(met(inputs_of(EngineConfig.from_flat(**flags), args))))
