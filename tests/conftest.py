"""What holds for every test: no network, one thread, reproducible examples."""

import fcntl
import os
import sys
from collections.abc import Iterator

# Before anything imports these libraries, and inherited by the processes that tests start.
# One thread each: pytest-xdist and the ranks of a gloo test already fill the cores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("dev", settings.get_profile("ci"), derandomize=False)
settings.register_profile("thorough", settings.get_profile("dev"), max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

if "torch" in sys.modules:  # a plugin was quicker; otherwise torch reads OMP_NUM_THREADS
    sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_gloo_test_at_a_time(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Tests that start processes fill the cores by themselves: one at a time over all workers.

    A lock, because pytest-xdist 3.8 ignores `xdist_group` under pytest 9.2 (its issue 1386).
    """
    if not request.node.get_closest_marker("gloo"):
        yield
        return
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with (shared / "gloo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released on closing, and when a worker dies
        yield
