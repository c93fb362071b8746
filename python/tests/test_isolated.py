"""Ranks of one host that do not share its namespaces, as in containers: each kind alone, and all together."""

import namespaces
import pytest

EXCHANGES = """
for kind in ("pid", "ipc", "mnt", "uts", "user"):
    say(os.readlink(f"/proc/self/ns/{kind}"))
received, handle = comm.dispatch(x, idx)
out, _ = comm.combine(handle, received.x)
say((np.asarray(out) == 2).all(), len(received.x))
comm.close()
"""


@pytest.mark.parametrize("form", namespaces.FORMS)
def test_ranks_in_namespaces_of_their_own_exchange_rows(programs, form):
    kinds = namespaces.FORMS[form]
    namespaces.check_permitted(kinds)
    ended = programs(EXCHANGES, EXCHANGES, within=kinds)
    for out, error, code in ended:
        assert (out[-2:], code) == (["True", "6"], 0), error
    first, second = (out for out, _, _ in ended)
    for kind, one, other in zip(namespaces.KINDS, first, second, strict=False):
        assert (one != other) == (kind in namespaces.apart(kinds)), (kind, one, other)


def test_a_rank_that_is_lost_in_namespaces_of_its_own_is_named_on_the_others(programs):
    waits = """
    try:
        comm.dispatch(x, idx)
    except tokenyard.errors.PeerLostError as error:
        say(error.rank)
    """
    kinds = namespaces.FORMS["all"]
    namespaces.check_permitted(kinds)
    (out, error, code), _ = programs(waits, "os._exit(3)", within=kinds)
    assert (out, code) == (["1"], 0), error


MEETS = """
import tokenyard
config = tokenyard.Config.parse({config!r}.replace("60000", "2000"), "test.toml")
try:
    tokenyard.World.from_env(config)
except tokenyard.errors.DeadlineError as error:
    print(error, flush=True)
"""


def test_ranks_of_one_host_in_networks_of_their_own_cannot_meet_and_each_names_the_other(programs):
    """Its loopback addresses are what they meet at. Ranks in networks of their own are ranks of several hosts."""
    namespaces.check_permitted(("net",))
    (first, _, _), (second, _, _) = programs("", "", head=MEETS, deadline_ms=1000, within=("net",))
    assert "rank 1 did not join within 2.0 s" in " ".join(first), first
    assert "cannot reach rank 0 within 2.0 s" in " ".join(second), second
