"""All attention types that are trained from the start, and devices that are forgotten from one test to the next."""

import pytest
import transformers

from tiny_model import KINDS, kinds

transformers.utils.logging.disable_progress_bar()

kind = kinds(KINDS)


@pytest.fixture(autouse=True)
def _forget_the_device(accelerate_afresh: None) -> None:
    """For every test of another project's trainer."""
