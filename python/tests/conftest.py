import os

import pool
import pytest

pytest_plugins = ["pytester", "programs"]


def pytest_addoption(parser):
    parser.addoption(
        "--all-installed",
        action="store_true",
        help='a test that is skipped because something "is not installed" fails',
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if (
        report.skipped
        and item.config.getoption("--all-installed")
        and "is not installed" in str(report.longrepr)
    ):
        report.outcome = "failed"
    return report


@pytest.fixture(scope="session")
def reports(tmp_path_factory):
    """Reports of errors that the tests cause go away with the tests."""
    os.environ["TOKENYARD_REPORTS"] = str(tmp_path_factory.mktemp("reports"))


@pytest.fixture(scope="session")
def ranks(reports):
    """`ranks(n, f, *args)` calls `f(world, *args)` on n ranks and returns what they return."""
    workers = pool.Pool(4)
    yield workers.run
    workers.close()
