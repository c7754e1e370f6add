"""All attention types that are trained from the start, and devices that are forgotten from one test to the next."""

from collections.abc import Iterator

import pytest
import transformers
from accelerate.state import AcceleratorState

from tiny_model import KINDS, kinds

transformers.utils.logging.disable_progress_bar()

kind = kinds(KINDS)


@pytest.fixture(autouse=True)
def _forget_the_device() -> Iterator[None]:
    """accelerate keeps what it set up for the whole process; the next test may want another precision."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
