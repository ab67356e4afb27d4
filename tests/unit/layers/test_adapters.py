"""The order in which a linear layer launches its product and those of adapters."""

from types import SimpleNamespace

import pytest
import torch

from quire.layers import adapters


@pytest.mark.parametrize(
    ("captured", "rows", "behind"),
    [(True, 16, False), (True, 17, True), (True, 128, True), (True, 129, False), (False, 64, False)],
)
def test_some_rows_of_a_captured_step_shrink_behind_the_product(
    captured: bool, rows: int, behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    kernel = SimpleNamespace(
        prepare=lambda weights: None,
        shrink=lambda *given: launched.append("shrink"),
        expand=lambda *given: launched.append("expand"),
    )
    monkeypatch.setattr(adapters, "_captured", lambda x: captured)
    monkeypatch.setattr(adapters, "side_stream", lambda device: None)

    def product() -> torch.Tensor:
        launched.append("product")
        return torch.zeros(rows, 2)

    adapters.AdaptedProduct(kernel, None).around(product, torch.zeros(rows, 2), None)  # type: ignore[arg-type]
    assert launched == [*(("product", "shrink") if behind else ("shrink", "product")), "expand"]
