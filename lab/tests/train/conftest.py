"""What every training test gets."""

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True)
def _accelerate_starts_afresh() -> Iterator[None]:
    """Accelerate fixes device and precision once for a process; each of these tests wants its own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
