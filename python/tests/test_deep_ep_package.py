"""The drop-in as programs find it."""

import importlib.metadata

import pytest
from test_package import run

import tokenyard
import tokenyard.deep_ep

NAMES = ("Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t", "__version__")

# By the distribution, and without it.
WAYS = {
    "installed": "",
    "aliased": "import sys, tokenyard; tokenyard.alias_deep_ep(); assert sys.modules['deep_ep'] is tokenyard.deep_ep;",
}


@pytest.mark.parametrize("way", WAYS)
def test_programs_find_the_modules_that_they_look_for(way):
    text = run(
        "-c",
        WAYS[way] + "import importlib.util; assert importlib.util.find_spec('deep_ep');"
        "import deep_ep; from deep_ep_cpp import EventHandle; from deep_ep.utils import EventOverlap;"
        "from deep_ep.utils.event import EventHandle as other; from deep_ep.buffers.legacy import Buffer;"
        "import deep_ep.legacy as legacy;"
        "assert EventHandle is other is deep_ep.EventHandle;"
        "assert Buffer is deep_ep.Buffer is legacy.Buffer;"
        "assert Buffer.is_sm90_compiled();"
        "print(deep_ep.__version__, hasattr(deep_ep, 'HybridEPBuffer'))",
    )
    assert text.split() == [f"2.1.0+tokenyard.{tokenyard.__version__}", "False"]


def test_the_distribution_has_the_version_of_the_package():
    version = importlib.metadata.version("tokenyard-deep-ep")
    assert version == tokenyard.deep_ep.__version__
    requires = importlib.metadata.requires("tokenyard-deep-ep")
    assert requires == [f"tokenyard[deep-ep]=={tokenyard.__version__}"]


def test_another_deep_ep_that_is_imported_stays():
    text = run(
        "-c",
        "import sys, types, tokenyard; sys.modules['deep_ep'] = other = types.ModuleType('deep_ep')\n"
        "try: tokenyard.alias_deep_ep()\n"
        "except ImportError as error: print(error)\n"
        "assert sys.modules['deep_ep'] is other",
    )
    assert "imported already" in text


def test_size_hints_are_those_of_deep_ep():
    # The example of its documentation: 128 tokens, 7168 channels, 288 experts.
    found = tokenyard.deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 288)
    assert found == 2 * (2 * 288 * 128 * 14560 + 1152) + 128
    config = tokenyard.deep_ep.Buffer.get_dispatch_config(8)
    row = 256 * (7168 * 2 + 8 + 128 * 16)
    assert config.get_nvl_buffer_size_hint(7168 * 2, 8) == 10 * 8 * (5 * 4 + row) + 64  # to 128
    assert config.get_rdma_buffer_size_hint(7168 * 2, 8) == 0
    assert tokenyard.deep_ep.Buffer.get_combine_config(5).num_max_nvl_chunked_send_tokens == 4
    with pytest.raises(ValueError, match="expected below"):
        tokenyard.deep_ep.Config(20, 256, 256)
