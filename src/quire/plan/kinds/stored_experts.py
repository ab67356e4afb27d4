"""The matrices and biases of a rank's experts, read from the tensors in which the checkpoint stores them.

The forms are those of `quire.models.names`: a tensor for each expert, or one that stacks all of them.
"""

from collections.abc import Mapping

from quire.args.experts import MoEArgs
from quire.contracts.parallel import Rank, share
from quire.contracts.params import Param, Part
from quire.kernels.activation import UNGATED
from quire.models.names import EACH, STACKED_FORMS, StackedForm
from quire.plan.kinds.interfaces import ParamWriter, StoredRows

AT = "layers.{i}.mlp.experts."


def expert_share(moe: MoEArgs, rank: Rank) -> tuple[int, int]:
    """Return start and count of a rank's slice of the numbers between gate and down of each expert."""
    if rank.whole_experts:
        return 0, moe.expert_size
    unit = 1 if moe.stored == EACH else STACKED_FORMS[moe.stored].unit
    unit = unit if moe.expert_size % unit == 0 else 1  # else the format refuses the matrix
    first, end = share(moe.expert_size // unit, rank.tp, rank.place)
    return first * unit, (end - first) * unit


class StoredExperts:
    """Writes the parameters of the experts of a layer."""

    def __init__(self, write: ParamWriter, moe: MoEArgs, layer: int) -> None:
        self._write, self._moe, self._layer, self._own = write, moe, layer, expert_share(moe, write.rank)

    def gate_up(self, name: str, width: int = 0) -> Param:
        """Make gate and up of each expert, fused. width: inputs; 0: the parameter is their biases."""
        first, count = self._own
        size, form = self._moe.expert_size, self._form
        if form is None:
            sides = ("up",) if self._moe.act in UNGATED else ("gate", "up")
            return self._of_each(name, dict.fromkeys(sides, StoredRows(size, *self._own)), width)
        assert self._moe.act not in UNGATED, "no family stacks experts without gates"
        if form.paired:
            return self._of_stack(name, {"": StoredRows(2 * size, 2 * first, 2 * count)}, width)
        halves = {"gate": StoredRows(2 * size, first, count), "up": StoredRows(2 * size, size + first, count)}
        return self._of_stack(name, halves, width)

    def down(self, name: str, bias: bool = False) -> Param:
        """Make down of each expert, of which the rank has a slice of the columns; or its bias."""
        rows, cut = {"": StoredRows(self._write.hidden)}, None if bias else self._own
        width = 0 if bias else self._moe.expert_size
        return (self._of_each if self._form is None else self._of_stack)(name, rows, width, cut)

    @property
    def _form(self) -> StackedForm | None:
        return None if self._moe.stored == EACH else STACKED_FORMS[self._moe.stored]

    def _of_each(
        self, name: str, rows: Mapping[str, StoredRows], width: int, cut: tuple[int, int] | None = None
    ) -> Param:
        named = {f"{{e}}.{part}": one for part, one in rows.items()}
        return self._write.stacked(self._write.param(AT + name, named, width, columns=cut, layer=self._layer))

    def _of_stack(
        self, name: str, rows: Mapping[str, StoredRows], width: int, cut: tuple[int, int] | None = None
    ) -> Param:
        write, form, num_experts = self._write, self._form, self._moe.routing.num_experts
        assert form is not None, "a tensor for each expert has no form"
        stored = write.stored_name(AT + name, self._moe.stored).replace("{i}", str(self._layer))
        parts = list[Part]()
        for part, one in rows.items():
            matrix = (one.stored, width) if width else (one.stored,)
            start, count = cut or (one.start, one.stored if one.taken < 0 else one.taken)
            parts.append(
                Part(
                    stored,
                    (num_experts, *(matrix[::-1] if form.transposed else matrix)),
                    start,
                    count,
                    axis=0 if cut is None else 1,
                    name=f"{{e}}.{part}",
                    expert=0,
                    transposed=form.transposed and width > 0,
                    paired=form.paired and cut is None and one.taken >= 0,
                )
            )
        shape = (sum(part.rows for part in parts), *((cut[1] if cut else width,) if width else ()))
        return write.stacked(Param(AT.replace("{i}", str(self._layer)) + name, shape, tuple(parts)))
