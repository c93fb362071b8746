"""The drop-in as programs find it."""

import importlib.metadata

import numpy as np
import pytest
from oracle import Case
from test_package import run

import tokenyard
import tokenyard.deep_ep
from tokenyard import errors
from tokenyard.deep_ep import (
    BucketBuffer,
    Buffer,
    ElasticBuffer,
    EngramBuffer,
    EPBuffer,
    HybridEPBuffer,
    PPBuffer,
)
from tokenyard.deep_ep._missing import MISSING
from tokenyard.deep_ep.utils import envs, gate, math, refs, testing

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
        "import deep_ep.utils.math as one, tokenyard.deep_ep.utils.math as two; assert one is two;"
        "assert EventHandle is other is deep_ep.EventHandle;"
        "assert Buffer is deep_ep.Buffer is legacy.Buffer;"
        "assert Buffer.is_sm90_compiled();"
        "from deep_ep.hybrid_ep_buffer import HybridEPBuffer, indices_to_map;"
        "assert deep_ep.HybridEPBuffer is HybridEPBuffer;"
        "print(deep_ep.__version__)",
    )
    assert text.split() == [f"2.1.0+tokenyard.{tokenyard.__version__}"]


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


def test_everything_that_is_missing_is_on_the_list_and_says_so():
    """The whole interface is there: what is not raises NotImplementedError, and is listed."""
    methods = {
        Buffer: "destroy is_sm90_compiled set_num_sms capture get_comm_stream get_local_buffer_tensor "
        "get_dispatch_config get_combine_config get_low_latency_rdma_size_hint get_dispatch_layout dispatch combine "
        "internode_dispatch internode_combine clean_low_latency_buffer low_latency_dispatch low_latency_combine "
        "get_next_low_latency_combine_buffer low_latency_update_mask_buffer low_latency_query_mask_buffer "
        "low_latency_clean_mask_buffer",
        ElasticBuffer: "destroy get_buffer_size_hint get_engram_storage_size_hint get_pp_buffer_size_hint "
        "get_agrs_num_max_session_bytes get_agrs_buffer_size_hint barrier capture get_comm_stream "
        "get_physical_domain_size get_logical_domain_size get_theoretical_num_sms get_theoretical_num_qps dispatch "
        "combine engram_write engram_fetch pp_set_config pp_send pp_recv create_agrs_session destroy_agrs_session "
        "agrs_new_session agrs_set_config agrs_get_inplace_tensor all_gather main_context print_memory_usage",
        EPBuffer: "destroy get_buffer_size_hint barrier capture get_comm_stream get_physical_domain_size "
        "get_logical_domain_size get_theoretical_num_sms get_theoretical_num_qps dispatch combine context main_context "
        "print_memory_usage lb_get_theoretical_num_sms lb_prefetch_weights lb_reduce_grads",
        HybridEPBuffer: "dispatch combine dispatch_with_permute combine_with_unpermute update_template_config",
        PPBuffer: "send recv destroy main_context print_memory_usage get_comm_stream get_physical_domain_size "
        "get_logical_domain_size",
        EngramBuffer: "get_storage_size_hint get_theoretical_config set_config write fetch barrier context destroy "
        "main_context print_memory_usage get_comm_stream get_physical_domain_size get_logical_domain_size",
        BucketBuffer: "session get_context_idx get_theoretical_num_sms all_gather reduce_scatter all_reduce barrier "
        "destroy main_context print_memory_usage get_comm_stream get_physical_domain_size get_logical_domain_size",
    }
    keywords = (
        "use_nvfp4 x_global_scale use_ue8m0_for_sf overlap packed_recv_count comp_signal block_m threshold src_signals "
        "src_signal_expect_value borrow_recv defer_epilogue non_blocking lb_allocation_plan_or_num_bytes"
    )
    # Tests of the code for GPUs hold these.
    on_gpus = {"dispatch_wait_recv_cost_stats", "combine_wait_recv_cost_stats"}
    for kind, names in methods.items():
        there = {name for one in kind.__mro__ for name in vars(one) if not name.startswith("_")}
        there -= {"num_sms", "runtime", "left_out"}
        assert there == set(names.split())
        for name in set(names.split()) & set(MISSING):
            with pytest.raises(NotImplementedError, match=MISSING[name]):
                getattr(kind, name)(None)
    calls = (
        Buffer.__init__,
        ElasticBuffer.__init__,
        Buffer.dispatch,
        Buffer.combine,
        Buffer.low_latency_dispatch,
        Buffer.low_latency_combine,
        ElasticBuffer.dispatch,
        ElasticBuffer.combine,
        EPBuffer.__init__,
        EPBuffer.dispatch,
        EPBuffer.combine,
    )
    assert set(MISSING) - on_gpus == {*keywords.split(), "get_nccl_comm_handle"}
    of_ep_buffer = {"__init__": "lb_allocation_plan_or_num_bytes"}
    for name in keywords.split():
        for call in calls:
            owner, method = call.__qualname__.split(".")
            if owner == "EPBuffer" and name == of_ep_buffer.get(method, "defer_epilogue"):
                continue
            kind = getattr(tokenyard.deep_ep, owner)
            needed = [None] * (call.__code__.co_argcount - len(call.__defaults__ or ()))
            needed[0] = object.__new__(kind)
            with pytest.raises(NotImplementedError, match=MISSING[name]) as caught:
                call(*needed, **{name: 1})
            # Callers catch a TypeError, and try again without the keyword.
            assert isinstance(caught.value, TypeError)
            assert f"found {name};" in str(caught.value)
    # Callers ask for these.
    others = "HybridEPBuffer indices_to_map EngramBuffer PPBuffer BucketBuffer BucketSession BufferAllocator "
    others += "destroy_all_managed_nccl_comm comm"
    for name in others.split():
        assert name in tokenyard.deep_ep.__all__
        assert hasattr(tokenyard.deep_ep, name)


def test_the_helpers_of_scripts_compute_what_they_say():
    x = np.random.default_rng(1).standard_normal((5, 200)).astype(np.float32)
    fp8, scales = math.per_token_cast_to_fp8(x)
    assert (fp8.shape, scales.shape, fp8.dtype.itemsize) == ((5, 200), (5, 2), 1)
    back = math.per_token_cast_back(fp8, scales)
    assert math.calc_diff(back, x) < 1e-3 < math.calc_diff(-back, x)
    assert math.calc_diff(x, x) == 0
    none = math.per_token_cast_to_fp8(x[:0])
    assert [one.shape for one in none] == [(0, 200), (0, 2)]
    assert math.per_token_cast_back(*none).shape == (0, 200)
    powers = np.exp2(np.ceil(np.log2(scales))).astype(np.float32)
    packed = np.zeros((5, 4), np.uint8)
    packed[:, :2] = powers.view(np.uint32) >> 23
    found = math.per_token_cast_back(fp8, packed.view(np.int32))
    np.testing.assert_array_equal(found, math.per_token_cast_back(fp8, powers))
    # DeepEP's low latency test views them with as many columns as there are groups, so with a quarter of the rows.
    fp8, scales = math.per_token_cast_to_fp8(np.resize(x, (8, 512)))
    powers = np.exp2(np.ceil(np.log2(scales))).astype(np.float32)
    packed = (powers.view(np.uint32) >> 23).astype(np.uint8).view(np.int32)
    assert packed.shape == (8, 1)
    found = math.per_token_cast_back(fp8, packed.reshape(-1, 4))
    np.testing.assert_array_equal(found, math.per_token_cast_back(fp8, powers))
    ids = np.array([[3, 1, 3, -1], [-1, -1, -1, -1], [0, 1, 2, 3]])
    math.inplace_unique(ids, 4)
    assert ids.tolist() == [[3, 1, -1, -1], [-1] * 4, [3, 2, 1, 0]]
    read_only = ids.copy()
    read_only.flags.writeable = False
    for array, found in ((ids[:, ::-1], "negative strides"), (read_only, "read-only")):
        with pytest.raises(errors.InvalidInputError, match=found):
            math.inplace_unique(array, 4)
    grouped = math.create_grouped_scores(np.ones((1, 6)), np.array([[2, 0]]), 3)
    assert grouped.tolist() == [[1, 1, 0, 0, 1, 1]]
    one = np.array([1, 2], np.int32)
    assert math.hash_tensors(one, (one, None, [np.array([7], np.int16)])) == 7
    assert math.count_bytes(one, None, (one, [one])) == 24
    assert (math.ceil_div(7, 3), math.align(7, 3), math.safe_div(0, 0)) == (3, 9, 0)
    with pytest.raises(ZeroDivisionError):
        math.safe_div(1, 0)


def test_the_profiler_gives_no_figure_where_there_is_no_kernel(capsys):
    calls = []
    found = testing.bench_kineto(lambda: calls.append(1), ("dispatch", "combine"))
    assert found == [float("inf")] * 2
    assert len(calls) == 1
    printed = capsys.readouterr().out
    assert printed.count("no such kernel") == 2
    found = testing.bench_kineto(lambda: calls.append(1), "notify", num_kernels_per_period=2)
    assert found == [float("inf")] * 2


def test_the_figure_of_a_name_is_that_of_all_kernels_of_a_call_that_do_its_work():
    runs = [
        ("ty_dispatch_decode", -9.0, 900.0),
        ("ty_merge_bf16", -8.0, 900.0),
        ("ty_combine_bf16", -7.0, 900.0),
        ("elementwise", -6.0, 900.0),
        ("ty_dispatch_decode", 0.0, 3.0),
        ("ty_merge_bf16", 2.0, 1.0),
        ("ty_combine_bf16", 4.0, 5.0),
        ("elementwise", 9.0, 7.0),
        ("ty_dispatch_decode_cast", 10.0, 4.0),
        ("ty_merge_bf16", 12.0, 1.0),
        ("ty_combine_bf16", 14.0, 7.0),
        ("elementwise", 15.0, 9.0),
    ]
    kernels = [testing.Kernel(*run) for run in runs]
    figure = testing._figure
    assert figure(kernels, "dispatch_impl", 2, 1) == 3.5
    assert figure(kernels, "combine", 2, 1) == 7.0
    assert figure(kernels, "combine", 2, 2) == [1.0, 6.0]
    assert figure(kernels, "elementwise", 2, 1) == 8.0
    # A combine need not have a kernel that merges.
    unmerged = [kernel for kernel in kernels if "merge" not in kernel.name]
    assert figure(unmerged, "combine", 2, 1) == 6.0
    assert figure(kernels, "notify", 2, 1) == float("inf")
    # A call may be a loop of operations: the figure is that of one.
    loops = [testing.Kernel("ty_dispatch", at, 2.0) for at in range(9)]
    assert figure(loops, "barrier", 2, 1) == 2.0
    # Kernels that are fewer than the calls have no turns, and none of them is the first call's.
    assert figure(kernels[4:8], "ty_dispatch", 2, 2) == [float("inf")] * 2


def test_the_clock_of_the_host_times_calls():
    calls = []
    mean, least, most = testing.bench(lambda: calls.append(2), 3, 5)
    assert len(calls) == 8
    assert 0 <= least <= mean <= most


def test_seeds_are_those_that_were_set():
    envs.init_seed(5)
    first = np.random.rand()
    envs.init_seed(5)
    assert (np.random.rand(), envs.get_global_seed()) == (first, 5)


@pytest.mark.parametrize("precise", [True, False], ids=["precise", "random"])
@pytest.mark.parametrize(("ranks", "topk"), [(2, 1), (4, 3), (8, 8)])
@pytest.mark.parametrize("ratio", [1.0, 2.0, 4.0])
def test_scores_send_more_to_the_first_rank(ranks, topk, ratio, precise):
    envs.init_seed(3)
    tokens, experts = 2048, 4 * ranks
    scores = np.asarray(
        gate.get_unbalanced_scores(tokens, experts, ranks, topk, ratio, precise), np.float32
    )
    assert scores.shape == (tokens, experts)
    best = np.argsort(-scores, axis=1)[:, :topk] // 4
    reached = np.array([(best == rank).any(axis=1).sum() for rank in range(ranks)])
    found = reached[0] / reached[1:].mean()
    # No more than all tokens can go to the first rank.
    if reached[0] < tokens:
        assert abs(found / ratio - 1) < (0.01 if precise else 0.1), reached
    else:
        assert found <= ratio * 1.1
    if precise:
        assert np.ptp(reached[1:]) <= 1


def test_references_of_scripts_are_what_the_interface_says():
    case = Case(4, seed=5, hidden=16, topk=4)
    inputs = [[case.x[r], case.idx[r], case.weights[r]] for r in range(4)]
    for me in range(4):
        x, ids, weights, sources, counts = refs.arrivals(inputs, me, case.max_tokens, case.experts)
        np.testing.assert_array_equal(x, case.rows(case.sources(me)))
        np.testing.assert_array_equal(ids, case.flat(me)[0])
        np.testing.assert_array_equal(np.where(ids >= 0, weights, 0), case.flat(me)[1])
        assert sources.tolist() == [s * case.max_tokens + t for s, t in case.sources(me)]
        assert counts.tolist() == case.source_counts(me)
    all_data = refs.generate_pre_combine_data(np.arange(48), 12, 4, 16)
    assert all_data.shape == (48, 4, 16)
    assert len(np.unique(all_data.astype(np.float32).reshape(-1, 16), axis=0)) == 48 * 4
    some = refs.generate_pre_combine_data(np.array([5, 40]), 12, 4, 16)
    np.testing.assert_array_equal(some, all_data[[5, 40]])
    two = np.array([[[1.0], [2.0**-9], [2.0**-9]]], refs.BF16)
    assert float(refs.ordered_accumulate(two)[0, 0]) == 1
    assert float(refs.ordered_accumulate(two, np.ones((1, 1), refs.BF16))[0, 0]) == 2
    # Two of one rank, which are rounded first if asked for; the third alone.
    y = np.array([[[1.0], [2.0**-8], [2.0**-8]]], refs.BF16)
    idx = np.array([[0, 1, 2]])
    assert float(refs.combine(y, idx, 1, 2, 4, None, False, False)[0, 0]) == 1 + 2**-7
    assert float(refs.combine(y, idx, 1, 2, 4, None, True, False)[0, 0]) == 1
