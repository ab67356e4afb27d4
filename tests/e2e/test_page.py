"""The page of the live view in a browser: a key, a chat, and many streams. tools/page_tour.py uses all of the page."""

import pytest

import page_tour
from chromium import find_chromium, opened_tab

from .serving import running_server


def test_the_page_in_a_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("there is no Chromium on this machine")
    monkeypatch.setattr(page_tour, "LOOK", 1.0)
    with running_server(*page_tour.MOCK, "--api-key", page_tour.KEY) as server, opened_tab(chromium) as tab:
        page_tour.tour_of_mock(tab, f"{server.url}/", "")
