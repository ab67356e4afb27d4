"""Parameters, bytes and pages of KV cache that the ranks of a planned engine hold. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from msgspec import structs

from quire.contracts.blocks import KVGeometry
from quire.contracts.errors import WeightsError
from quire.contracts.parallel import Rank
from quire.contracts.params import Param
from quire.plan.drafts import rank_joined
from quire.plan.engine import EnginePlan, keep_stored, state_types
from quire.plan.host_layers import HostLayers, choose_host_layers
from quire.plan.kv_geometry import rank_geometry
from quire.plan.layout import alone, layout
from quire.plan.placement import held_of, ranks
from quire.quantization.assigned import with_formats
from quire.reports.packed_bytes import headers_of, kept_of
from quire.weights.files import Checkpoint, StoredTensor, stored_in


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """The parts of a model that the ranks of a planned engine hold.

    plan         plan of any rank: the parameters of all ranks follow from its mesh
    checkpoint   headers of the weights, if the folder lacks the weights; else None

    A large model has 45,000 parts, nearly all of them of experts. Only `layout` and `params_of` list all parts. Sizes
    are computed with one expert of each layer.
    """

    plan: EnginePlan
    checkpoint: Checkpoint | None = None

    @cached_property
    def layout(self) -> tuple[Param, ...]:
        """The parameters of the whole model, not of a rank; their schemes are those that the ranks pack."""
        same = self.plan.mesh.rank == alone(self.plan.args)
        return self.as_packed(self.plan.params if same else self.params_of())

    def params_of(self, rank: Rank | None = None, experts: Sequence[int] | None = None) -> tuple[Param, ...]:
        """Return the parameters of a rank. rank, experts: as of `layout`."""
        plan = self.plan
        made = with_formats(layout(plan.args, rank, experts), plan.quantization)
        return keep_stored(made, plan.dtype, plan.kernels, plan.moe)

    def with_one_expert(self, rank: Rank) -> tuple[Param, ...]:
        """Return the parameters of a rank as if it had only the first of its experts."""
        return self.params_of(rank, rank.expert_ids[:1])

    def as_packed(self, params: tuple[Param, ...]) -> tuple[Param, ...]:
        """Return whole parameters with the schemes of their slices: a slice may cut the blocks of the whole matrix."""
        packed = {param.name: param.scheme for _, own in self._by_kind.values() for param in own}
        return tuple(structs.replace(one, scheme=packed.get(one.name, one.scheme)) for one in params)

    @cached_property
    def _by_kind(self) -> dict[tuple[object, ...], tuple[Rank, tuple[Param, ...]]]:
        """Kind of ranks -> a rank of this kind and its parameters, with one of its experts."""
        kinds = {held_of(self.plan.args, rank): rank for rank in ranks(self.plan.args, self.plan.mesh.parallel)}
        return {kind: (rank, self.with_one_expert(rank)) for kind, rank in kinds.items()}

    @cached_property
    def held(self) -> list[tuple[Rank, int]]:
        """List of (rank, number of bytes of its parameters). Raises ConfigError if a slice cuts a quantized group."""
        drafts = self.plan.draft.weight_bytes if self.plan.draft is not None else 0
        held = {
            kind: drafts * rank.last + sum(self.num_bytes(one, len(rank.expert_ids)) for one in own)
            for kind, (rank, own) in self._by_kind.items()
        }
        return [(rank, held[held_of(self.plan.args, rank)]) for rank in ranks(self.plan.args, self.plan.mesh.parallel)]

    def host_layers(self, rank: Rank) -> HostLayers:
        """Return the layers of a rank whose weights lie in host memory."""
        gib, experts = self.plan.config.load.cpu_offload_gb, len(rank.expert_ids)
        sizes = ((one, self.num_bytes(one, experts)) for one in (self.with_one_expert(rank) if gib else ()))
        return choose_host_layers(sizes, range(*rank.layers), gib)

    def num_bytes(self, param: Param, experts: int = 1) -> int:
        """Return the bytes of a parameter, with scales, as it is packed as far as that is known.

        experts   number of such parameters that are stacked, if `param` is of experts
        """
        packed = self.plan.machine.device == "cpu" and param.scheme is not None  # others do not need the headers
        return kept_of(self.plan, param, self.headers if packed else {}, experts)

    def page(self, rank: Rank) -> KVGeometry:
        """Return the layout of a page of a rank's KV cache."""
        own = rank_geometry(
            self.plan.args,
            rank,
            dtype=self.plan.cache.dtype,
            states=state_types(self.plan),
            device=self.plan.machine.device,
            block_size=None,
            sizes=self.plan.geometry.block_sizes,
        )
        return own if self.plan.draft is None else rank_joined(own, self.plan.draft.geometry, self.plan.args, rank)

    @cached_property
    def headers(self) -> Mapping[str, StoredTensor]:
        """Stored tensor -> its header; {} where there are no safetensors files that can be read."""
        return self.checkpoint.tensors if self.checkpoint is not None else headers_of(self.plan)

    @cached_property
    def files(self) -> Mapping[str, str]:
        """Stored tensor -> its file; {} where the files cannot be read (`load_error` of the report tells why)."""
        if self.checkpoint is not None:
            return {name: tensor.file.name for name, tensor in self.checkpoint.tensors.items()}
        try:
            return {} if self.plan.config.load.load_format == "dummy" else stored_in(Path(self.plan.folder))
        except WeightsError:
            return {}
