"""A visit: the engine of a tour, its request, and the pages of what was seen."""

import importlib
import os
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from quire.config.engine import EngineConfig
from quire.config.env import locale
from quire.contracts.errors import ConfigError, UserError
from quire.entry.llm import LLM
from quire.explain.cost import describe_cost
from quire.explain.describe import plan_engine
from quire.explain.drawings import DRAWINGS
from quire.observe.calls import PACKAGE
from quire.tour.live import Live, Values
from quire.tour.made_up import make_model
from quire.tour.pages import StopPage, filled, pages
from quire.tour.render import write_html
from quire.tour.texts import LANGUAGES, Tour, language_of, read_tour

TOKENS = 2  # of the answer: one by a prefill, one by a decode


class Visit(NamedTuple):
    """A request that ran, with the texts of its tour."""

    name: str
    live: Live
    text: Tour
    language: str
    facts: dict[str, Any]

    def pages(self, number: int | None = None, own: Set[str] = frozenset()) -> Iterable[StopPage]:
        """Return all pages, or that of a stop.

        own   words of the command line that change the request: a page of one stop has the values of the tour's own
              request, too, and no command if these words are it
        """
        found = pages(self.live, self.text, self.facts, number)
        if number is None or not own:
            return found
        usual = usual_values(self.name, number)
        return [
            page._replace(usual=usual, command="" if own <= set(shlex.split(page.command)) else page.command)
            for page in found
        ]


@contextmanager
def guide(
    name: str, lang: str | None, prompt: str | None, changes: dict[str, Any], keep: Path | None = None
) -> Iterator[Visit]:
    """Context manager: run the request of a tour, and yield the visit.

    lang      language of the texts; None: that of the locale
    changes   of the configuration of a model that is made up for the tour
    keep      folder for this model, which stays; None: a temporary one
    """
    if keep is not None and keep.exists():
        raise ConfigError(f"--keep: {keep} exists: give the name of a new folder.")
    if keep is not None and not keep.absolute().parent.is_dir():
        raise ConfigError(f"--keep: the folder of {keep} does not exist: make it first.")
    stops = importlib.import_module(f"quire.tour.{name}")
    with ExitStack() as stack:
        options = dict(stops.OPTIONS)
        with _named(changes):
            if name == "moe":
                made = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-tour-"))) / "small"
                make_model(made, changes)
                options["model"] = str(made)
            llm = stack.enter_context(LLM(**options))
        live = Live(llm, stops.STOPS)
        live.run(prompt or stops.PROMPT, TOKENS)
        yield made_visit(live, name, lang or language_of(locale()), stops.facts(live))


def made_visit(live: Live, name: str, language: str, facts: dict[str, Any]) -> Visit:
    """Return the visit of a request that ran. facts: values of the places {name} in the texts"""
    facts, text = facts | {"package": _near(PACKAGE)}, read_tour(name, language)
    return Visit(name, live, text._replace(about=filled(text.about, facts)), language, facts)


@contextmanager
def _named(changes: dict[str, Any]) -> Iterator[None]:
    """Context manager: errors of the made-up config.json name the flag that changed it."""
    try:
        yield
    except UserError as error:
        said = str(error).partition("config.json: ")[2].removesuffix(": correct the file.")
        if not changes or not said:
            raise
        raise ConfigError(f"--set makes a model that does not exist: {said}.") from None


def usual_values(name: str, number: int) -> Values:
    """Return the values of a stop of the tour's own request."""
    with guide(name, LANGUAGES[0], None, {}) as visit:
        (page,) = visit.pages(number)
    return page.values


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
