"""docs/models.md is what the families of the package and the stored results say."""

import json

from models_page import PAGE, RESULTS, page
from quire.args.families import FAMILIES


def test_the_page_of_models_is_current() -> None:
    results = json.loads(RESULTS.read_text())
    assert PAGE.read_text() == page(results), "PYTHONPATH=src:. python tools/models_page.py"
    assert results.keys() <= FAMILIES.keys()
    assert all(one["passed"] == one["rows"] > 0 for one in results.values())
