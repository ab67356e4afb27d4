"""Drawings of a plan as SVG files: `quire explain --svg FOLDER`. They are made from the plan, so none can be stale."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.contracts.errors import ConfigError
from quire.explain.drawings.memory import draw_memory
from quire.explain.drawings.model import draw_attention, draw_experts, draw_model
from quire.explain.drawings.ranks import draw_exchanges, draw_ranks
from quire.explain.drawings.step import draw_step
from quire.explain.drawings.svg import Svg

Plan = dict[str, Any]
DRAWINGS: dict[str, Callable[[Plan, Plan], Svg | None]] = {
    "model": draw_model,
    "attention": draw_attention,
    "experts": draw_experts,
    "ranks": draw_ranks,
    "exchanges": draw_exchanges,
    "memory": draw_memory,
    "step": draw_step,
}


def write_drawings(plan: Plan, cost: Plan, folder: Path) -> list[Path]:
    """Write the drawings that a described plan and its costs have, and return their files.

    plan, cost   of `PlanReport.describe` and `describe_cost`
    Raises ConfigError if the folder cannot be written.
    """
    written = list[Path]()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, draw in DRAWINGS.items():
            made = draw(plan, cost)
            if made is not None:
                written.append(folder / f"{name}.svg")
                written[-1].write_text(str(made))
    except OSError as error:
        raise ConfigError(f"--svg: {folder} cannot be written ({error.strerror}): choose another folder.") from None
    return written
