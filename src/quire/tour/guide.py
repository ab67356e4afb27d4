"""A visit: the engine of a tour, its request, and the pages of what was seen."""

import importlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from quire.config.engine import EngineConfig
from quire.entry.llm import LLM
from quire.explain.cost import describe_cost
from quire.explain.describe import plan_engine
from quire.explain.drawings import DRAWINGS
from quire.observe.calls import PACKAGE
from quire.tour.live import Live
from quire.tour.made_up import make_model
from quire.tour.pages import StopPage, filled, pages
from quire.tour.render import write_html
from quire.tour.texts import Tour, read_tour

TOKENS = 2  # of the answer: one by a prefill, one by a decode


class Visit(NamedTuple):
    """A request that ran, with the texts of its tour."""

    live: Live
    text: Tour
    language: str
    facts: dict[str, Any]

    def pages(self, number: int | None = None) -> Iterable[StopPage]:
        """Return all pages, or that of a stop."""
        return pages(self.live, self.text, self.facts, number)


@contextmanager
def guide(name: str, language: str, prompt: str | None, changes: dict[str, Any]) -> Iterator[Visit]:
    """Context manager: run the request of a tour, and yield the visit.

    changes   of the configuration of a model that is made up for the tour
    """
    stops = importlib.import_module(f"quire.tour.{name}")
    with ExitStack() as stack:
        options = dict(stops.OPTIONS)
        if name == "moe":
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-tour-"))) / "small-deepseek"
            make_model(folder, changes)
            options["model"] = str(folder)
        live = Live(stack.enter_context(LLM(**options)), stops.STOPS)
        live.run(prompt or stops.PROMPT, TOKENS)
        yield made_visit(live, name, language, stops.facts(live))


def made_visit(live: Live, name: str, language: str, facts: dict[str, Any]) -> Visit:
    """Return the visit of a request that ran. facts: values of the places {name} in the texts"""
    facts, text = facts | {"package": _near(PACKAGE)}, read_tour(name, language)
    return Visit(live, text._replace(about=filled(text.about, facts)), language, facts)


def _near(path: Path) -> str:
    """Return a path from here, or the whole one if it lies elsewhere."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def write_page(file: Path, visit: Visit, found: Iterable[StopPage]) -> None:
    """Write the pages as HTML, with the drawings of the engine's plan."""
    shown: Sequence[StopPage] = tuple(found)
    config: EngineConfig = visit.live.llm.engine.config
    plan, cost = plan_engine(config).describe(), describe_cost(config, "", 1, None)
    plan["model"]["name"] = Path(plan["model"]["name"]).name  # of a model that is made up: not its temporary folder
    drawn = {page.drawing: DRAWINGS[page.drawing](plan, cost) for page in shown if page.drawing}
    write_html(file, visit.text, shown, visit.language, {name: str(svg) for name, svg in drawn.items() if svg})
