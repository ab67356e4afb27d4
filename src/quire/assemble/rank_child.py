"""The engine of a rank in its process: joins the other ranks, loads the model, runs the steps that the core sends."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch

from quire.assemble.loaded import Loaded, Loading, Outside, Parts
from quire.assemble.rank import load_rank
from quire.contracts.errors import ConfigError
from quire.contracts.step import I32, FileNews, StepPlan, StepResult
from quire.distributed import Group
from quire.distributed.checked_group import CheckedGroup
from quire.distributed.mesh import ALONE, RankGroups
from quire.distributed.process_group import ProcessGroup, join_ranks
from quire.kernels.comm.exchange import Layout
from quire.kvstore.shards import Shard
from quire.plan.collectives import exchange_rows, sum_room
from quire.plan.cuda_memory import DeviceMemory
from quire.plan.drafts import joint_drafts
from quire.plan.engine import EnginePlan
from quire.plan.memory import MemoryPlan
from quire.plan.weight_bytes import ITEM_BYTES
from quire.platforms.cuda import read_cuda_facts
from quire.ranks.server import LoadedRank, RunningRank
from quire.worker.call_trace import StepTrace
from quire.worker.profile import RunnerProfile

M = TypeVar("M", bound=msgspec.Struct)


class RankTask(msgspec.Struct, frozen=True, kw_only=True):
    """Start data of a rank's process.

    meeting   rendezvous of the ranks that exchange tensors; see `join_ranks`
    threads   CPU threads
    gpu       index of its GPU
    hosts     index of the host of each rank that meets; (): one host
    """

    plan: EnginePlan
    meeting: str
    threads: int
    gpu: int = 0
    hosts: tuple[int, ...] = ()

    def apart(self, group: Group | None) -> bool:
        """True when ranks of the group are on several hosts, so that no memory is shared among them."""
        return isinstance(group, ProcessGroup) and len({self.hosts[rank] for rank in group.ranks if self.hosts}) > 1


class RankMeasured(msgspec.Struct, frozen=True, kw_only=True):
    """Message of a rank's process when it has loaded its weights. For the fields see `Loaded`."""

    memory: DeviceMemory | int
    sums: bytes = b""


class RankSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `RankMeasured`: the sizes of the rank's KV cache, and facts about blocks outside of the engine."""

    memory: MemoryPlan
    outside: Outside = Outside()


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Message of a rank's process when it is ready to run steps. For the fields see `Parts` and `RankTiers`."""

    depth: int
    prompt_chunk: int = 0
    plans: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    shards: tuple[Shard, ...] = ()
    files: tuple[FileNews, ...] = ()


def packed(message: msgspec.Struct) -> bytes:
    """Return a message between the engine and a rank's process as bytes.

    They are msgpack. JSON has no infinity, and infinity is the value of a limit that a plan does not set.
    """
    return msgspec.msgpack.encode(message)


def unpacked(data: bytes, kind: type[M]) -> M:
    """Return the message that `packed` has encoded."""
    return msgspec.msgpack.decode(data, type=kind)


def build_rank(start: bytes, on_loading: Loading) -> "ChildRank":
    """Join the other ranks and load the model, in the process of a rank. `start`: an encoded `RankTask`."""
    task = unpacked(start, RankTask)
    torch.set_num_threads(task.threads)
    device, mesh = torch.device(task.plan.machine.device), task.plan.mesh
    gpu = None
    if device.type == "cuda":
        device = torch.device("cuda", task.gpu)
        torch.cuda.set_device(device)
        gpu = read_cuda_facts()
    together, groups, note, shared = mesh.parallel.together, ALONE, "", task.plan.machine.shared
    if together.size > 1:
        groups = join_ranks(task.meeting, mesh.rank.number % together.size, together, device, shared)
    if shared:
        note = "ranks share a GPU, and exchange tensors through host memory: for tests alone."
    elif device.type == "cuda" and not task.plan.config.parallel.disable_custom_all_reduce:
        from quire.distributed.symmetric import with_symmetric_memory  # a slow import, for GPUs alone

        tp, why = (
            (groups.tp, "the ranks are on several hosts")
            if task.apart(groups.tp)
            else with_symmetric_memory(groups.tp, device, largest_message(task.plan))
        )
        groups = replace(groups, tp=tp)
        note = f"sums over ranks go through NCCL: {why}" if why else ""
    experts = task.plan.experts
    if experts is not None and experts.dispatcher == "pull":
        from quire.distributed.symmetric import exchange_memory

        if task.apart(groups.ep):  # Ray tells the hosts late
            raise ConfigError(
                "replicas that share experts are on several hosts, whose GPUs share no memory: add "
                "--all2all-backend allgather_reducescatter, or use one host."
            )
        memory = partial(exchange_memory, groups.ep, device, each=together.tp)
        groups = replace(groups, slots=memory(exchange_layout(task.plan)))
        draft = task.plan.draft
        if draft is not None and joint_drafts(task.plan):
            layout = exchange_layout(draft, task.plan.step_tokens)
            groups = replace(groups, draft_slots=memory(layout))
    if task.plan.config.parallel.check_collectives:
        groups = checked(groups, device)
    loaded = load_rank(task.plan, groups, gpu, on_loading=on_loading, end_phase=lambda name: None)
    return ChildRank(loaded, groups, device, note)


def largest_message(plan: EnginePlan) -> int:
    """Return the bytes of the largest all-reduce that goes through symmetric memory; larger ones go through NCCL."""
    hidden = plan.step_tokens * plan.args.hidden_size * ITEM_BYTES[plan.dtype.dtype]
    return sum_room(plan.mesh.parallel.tp, hidden)


def exchange_layout(plan: EnginePlan, tokens: int = 0) -> Layout:
    """Return the layout of the memory for the exchange of rows between replicas.

    tokens   most tokens of a step of a replica; 0: those of the plan, which for a draft model has no drafts
    """
    parallel, moe = plan.mesh.parallel, plan.args.moe
    assert moe is not None, "a model without experts exchanges no rows"
    return Layout(
        ranks=parallel.expert_ranks,
        rows=exchange_rows(parallel, tokens or plan.step_tokens),
        hidden=plan.args.hidden_size,
        top_k=moe.routing.top_k,
        item_bytes=ITEM_BYTES[plan.dtype.dtype],
        wire=plan.wire,
    )


def checked(groups: RankGroups, device: torch.device) -> RankGroups:
    """Return process groups that compare each collective over the ranks before it runs (--check-collectives)."""
    own = {name: getattr(groups, name) for name in ("tp", "dcp", "pp", "tokens", "ep")}
    return replace(groups, **{name: CheckedGroup(group, device) for name, group in own.items() if group is not None})


@dataclass(frozen=True)
class ChildRank(LoadedRank):
    """A rank in its process, its weights loaded, its KV cache not sized.

    note   line for the user; "" for none
    """

    loaded: Loaded
    groups: RankGroups
    device: torch.device
    note: str = ""

    @property
    def payload(self) -> bytes:
        """The encoded `RankMeasured` of this rank."""
        return packed(RankMeasured(memory=self.loaded.measure(), sums=self.loaded.sums))

    def size(self, payload: bytes) -> "ChildRunner":
        """Make the KV cache and the model runner. `payload`: encoded `RankSizes`."""
        sizes = unpacked(payload, RankSizes)
        parts = self.loaded.finish(sizes.memory, sizes.outside)
        return ChildRunner(parts, self.groups, self.device, self.note)


class ChildRunner(RunningRank):
    """A rank in its process that runs steps."""

    def __init__(self, parts: Parts, groups: RankGroups, device: torch.device, note: str) -> None:
        assert parts.worker is not None
        self._parts, self._runner, self._device, self._note = parts, parts.worker, device, note
        self._trace, self._profile = StepTrace(parts.worker, groups), RunnerProfile(parts.worker, groups)
        self._collecting = False
        self.depth = parts.depth

    @property
    def payload(self) -> bytes:
        """The encoded `RankFacts` of this rank."""
        parts = self._parts
        return packed(
            RankFacts(
                depth=parts.depth,
                prompt_chunk=parts.prompt_chunk,
                notes=tuple(filter(None, (*parts.notes, self._note))),
                plans={name: str(plan) for name, plan in parts.plans.items()},
                shards=parts.tiers.shards,
                files=parts.tiers.files,
            )
        )

    def submit(self, plan: StepPlan) -> None:
        self._runner.submit(plan)

    def release(self, masks: I32) -> None:
        self._runner.release(masks)

    def collect(self) -> StepResult:
        if not self._collecting and self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # belongs to the thread
        self._collecting = True
        return self._runner.collect()

    def control(self, name: str, args: dict[str, Any]) -> object:
        own: dict[str, Callable[..., object]] = {
            "describe": self._runner.describe,
            "trace": self._trace.control,
            "profile": self._profile.control,
            "attach": self._attach,
        }
        controls = own | self._runner.features.controls
        if name not in controls:
            raise ConfigError(f"unknown control {name!r}: use {' or '.join(controls)}.")
        return controls[name](**args)

    def _attach(self, module: str) -> None:
        """Add the step feature that `make(worker, rank)` of a Python module returns, between two steps."""
        make = importlib.import_module(module).make
        self._runner.features.attach(make(self._runner, self._parts.plan.mesh.rank))

    def close(self) -> None:
        """Wait until files are deleted. The end of the process frees its memory."""
        self._parts.tiers.close()
