"""pytest -p tests.support.every_seventh: runs every seventh of the tests that were chosen.

Seven divides the length of hardly any list of shapes or types, so that each value of a list is met with some others.
"""

import pytest


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep every seventh test."""
    kept = items[::7]
    config.hook.pytest_deselected(items=[item for place, item in enumerate(items) if place % 7])
    items[:] = kept
