"""The fixtures of all tests: one Ray for the session, and small real datasets."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.1"  # read by Ray Train when it is imported
# On a loaded machine workers take long to import their framework, and a start that times out is a failure of the run.
os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "240")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# No cloud announces that it takes this machine away: one process less to start for each run of Ray Train.
os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
# Each start of a Ray would start a process for each of its CPUs, used or not: a second of computing each.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
# Ray gives its workers the least share of a CPU (niceness 15): what computes beside them here would stop them nearly.
os.environ.setdefault("RAY_worker_niceness", "0")
# Ray Train asks the Ray that it finds on this machine whether its controller lives; where that is another Ray, which
# has never heard of it, it ends the run. Nobody answers here, so that two can be tested side by side.
os.environ["RAY_API_SERVER_ADDRESS"] = "http://127.0.0.1:9"

import hypothesis
import numpy as np
import pyarrow as pa
import pytest

# What modules make while tests are collected stays to the end: the garbage collector would go through all of it, again
# and again, in a fifth of the time that collecting takes.
gc.disable()

# No test is timed: drawing an example takes long on a loaded machine, too.
UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("raylance", max_examples=12, derandomize=True, **UNTIMED)
# Others each time: bash tests/run --hypothesis-profile=thorough
hypothesis.settings.register_profile("thorough", max_examples=500, **UNTIMED)
# For many runs that mostly fail: few examples, none made smaller.
hypothesis.settings.register_profile(
    "mutants",
    max_examples=6,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    **UNTIMED,
)
hypothesis.settings.load_profile("raylance")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts so what it runs in the background, and what tests start and interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A Ray that was killed leaves its address on the machine. A process that asks for any Ray would wait for that one.
os.environ.setdefault("RAY_ADDRESS", "local")


LONG = ("faults", "jobs", "release")  # folders of tests that start Ray and Ray Train's workers, some of them twice


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs no Ray comes first: where one runs, loaders work by it. Tests that start more have more time before
    they count as hung.
    """
    items.sort(key=_needs_ray)
    for item in items:
        if item.path.relative_to(Path(__file__).parent).parts[0] in LONG and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))


def _needs_ray(item: pytest.Item) -> bool:
    return "ray_session" in getattr(item, "fixturenames", ())


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a module of tests has loaded stays, too: the collector need not go through it for the next ones."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray, which promises more CPUs than a small machine has."""
    import ray

    from tests.helpers.cluster import start_ray

    start_ray()
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """Where an S3 API listens on this machine; each module has a bucket of its own."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture(scope="session")
def images_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """1,003 JPEGs of 32x24, in fragments of 150 rows, some rows deleted: 953 live ones."""
    import lance

    from tests.helpers.images import make_images

    uri = str(tmp_path_factory.mktemp("images") / "images.lance")
    rows = 1003
    table = pa.table(
        {
            "image": pa.array(make_images(rows), pa.binary()),
            "label": pa.array(np.arange(rows) % 7, pa.int64()),
            "id": pa.array(np.arange(rows), pa.int64()),
        }
    )
    lance.write_dataset(table, uri, max_rows_per_file=150)
    lance.dataset(uri).delete("id >= 200 and id < 250")
    return uri


@pytest.fixture(scope="session")
def write_dataset(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Writes tables, one fragment each, to a new dataset."""
    import lance

    def write(*tables: pa.Table, **options: object) -> str:
        uri = str(Path(tmp_path_factory.mktemp("data")) / "data.lance")
        for table in tables:
            lance.write_dataset(table, uri, mode="append" if os.path.exists(uri) else "create", **options)
        return uri

    return write
