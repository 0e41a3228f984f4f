"""The test of the largest preset comes last: a fault of a small one is seen before minutes of building."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves it behind all others, whatever is collected."""
    items.sort(key=lambda item: item.nodeid.endswith("test_wide"))
