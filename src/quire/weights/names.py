"""Name maps, both ways: checkpoint tensor to (parameter, part) and back. Dotted components, never substrings."""

from dataclasses import dataclass

from quire.layers.stack import NameMap


@dataclass(frozen=True)
class Target:
    """Where a checkpoint tensor goes: a parameter of the model and one of its parts ("" when it has only one)."""

    parameter: str
    part: str


class NameIndex:
    """A name map made searchable: one dictionary lookup per name, either way."""

    def __init__(self, rows: NameMap) -> None:
        self._forward = {stored: Target(parameter, part) for stored, parameter, part in rows}
        self._backward = {Target(parameter, part): stored for stored, parameter, part in rows}

    def target(self, stored: str) -> Target | None:
        """Where the checkpoint tensor `stored` goes; None when the map does not know it."""
        pattern, layer = _generalize(stored)
        found = self._forward.get(pattern)
        return None if found is None else Target(found.parameter.replace("{i}", layer), found.part)

    def stored(self, target: Target) -> str:
        """The checkpoint's name of a target; KeyError when the map has no row for it (a mistake in a model file)."""
        pattern, layer = _generalize(target.parameter)
        return self._backward[Target(pattern, target.part)].replace("{i}", layer)


def _generalize(name: str) -> tuple[str, str]:
    """The name with its first numeric component as {i}, and that component ("" without one)."""
    components = name.split(".")
    for place, component in enumerate(components):
        if component.isdecimal():
            return ".".join([*components[:place], "{i}", *components[place + 1 :]]), component
    return name, ""
