from pathlib import Path

import fetch
import pool
import pytest
import table


def pytest_addoption(parser):
    parser.addoption("--clients", type=Path, help="the folder that fetch.py has filled")
    parser.addoption(
        "--table",
        choices=("check", "write"),
        help="compare the table of docs/deep_ep.md with what has run, or write it",
    )


def pytest_configure(config):
    config.stash[OUTCOMES] = table.Outcomes()


OUTCOMES = pytest.StashKey()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    checked = dict(item.user_properties).get("check")
    if call.when == "call" and checked is not None and not report.skipped:
        item.config.stash[OUTCOMES].add(*checked, report.passed)
    return report


def pytest_sessionfinish(session, exitstatus):
    choice = session.config.getoption("--table")
    if choice is None:
        return
    excused = fetch.excused(session.config.getoption("--clients"))
    for client, reason in excused.items():
        print(f"\n{client}: not run: {reason}")
    outcomes = session.config.stash[OUTCOMES]
    if table.differs(outcomes, writes=choice == "write", excused=excused):
        print("\ndocs/deep_ep.md: its table differs from what has run: run this with --table write")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def four():
    """Four ranks that stay, and the port where torch meets."""
    workers = pool.Pool(4)
    yield workers, pool.free_port()
    workers.close()


@pytest.fixture
def check(four, request, record_property):
    """`check(f, client, size)` calls `f(world, port, size, folder)` on four ranks, in groups of `size`. The table of
    the page has it, where it is `listed`."""
    workers, port = four

    def run(function, client, size, listed=True):
        clients = request.config.getoption("--clients")
        folder = fetch.folder_of(clients, client)
        if not folder.exists():
            reason = fetch.excused(clients).get(client)
            # A client that may not be missing fails here, too, where nothing was fetched.
            assert reason is not None, f"{client} was not fetched; run fetch.py first"
            pytest.skip(f"{client}: not run: {reason}")
        if listed:
            record_property("check", (client, function.__name__))
        return workers.run(4, function, port, size, folder)

    return run
