"""Skips that the suite takes for failures."""

from pathlib import Path

import pytest

SKIPS = """
import pytest

@pytest.mark.skip(reason="torch is not installed: it did not run")
def test_with_a_package():
    pass

@pytest.mark.skip(reason="no device")
def test_with_a_device():
    pass
"""


@pytest.mark.parametrize(
    ("options", "failed"), [((), 0), (("--all-installed",), 1)], ids=["as is", "all installed"]
)
def test_a_package_that_is_not_there_fails_where_all_are_installed(pytester, options, failed):
    own = (Path(__file__).parent / "conftest.py").read_text().replace("import pool\n", "")
    pytester.makeconftest(own)
    pytester.makepyfile(SKIPS)
    result = pytester.runpytest_inprocess(*options)
    # The skip of a mark is of the setup.
    result.assert_outcomes(skipped=2 - failed, errors=failed)
