import os

import pool
import pytest


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """`ranks(n, f, *args)` calls `f(world, *args)` on n ranks and returns what they return."""
    # Reports of errors that the tests cause go away with the tests.
    os.environ["TOKENYARD_REPORTS"] = str(tmp_path_factory.mktemp("reports"))
    workers = pool.Pool(4)
    yield workers.run
    workers.close()
