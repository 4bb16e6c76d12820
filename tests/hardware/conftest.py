"""The fixture of the stories of tests/hardware."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.fake_nvml.reader import Reader
from tests.hardware.stories import Story, Tell


@pytest.fixture
def tell(nvml: Reader, tmp_path: Path) -> Tell:
    """Begin a story."""

    def begin(scenario: Mapping[str, Any], deadline_s: float = 5.0, **more: Any) -> Story:
        nvml.begin(scenario, tmp_path, deadline_s)
        return Story(nvml, **more)

    return begin
