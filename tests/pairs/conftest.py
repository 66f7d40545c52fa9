"""Both dtypes for every test that asks, and one thread: these models are too small for two."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other cost more than these sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The default dtype of the test; `clean_state` resets it."""
    torch.set_default_dtype(request.param)
    return request.param
