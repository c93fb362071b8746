"""The order in which ranks send and receive the parts of experts."""

import itertools
import random

import pytest
from test_replicas import plan_of

from tokenyard._replicas import schedule


def runs(parts_of, transfers, ranks, in_flight):
    """Runs the events of all ranks as pipes do. Returns the parts that each rank received, in order."""
    left = [
        schedule.events(parts_of(ranks.of(me, transfers)), me, ranks, in_flight)
        for me in range(ranks.count)
    ]
    at, flying, found = [0] * ranks.count, {}, [[] for _ in range(ranks.count)]
    moved = True
    while moved:
        moved = False
        for me in range(ranks.count):
            while at[me] < len(left[me]):
                event = left[me][at[me]]
                pair = (me, event.peer) if event.is_send else (event.peer, me)
                queue = flying.setdefault(pair, [])
                if event.is_send:
                    if len(queue) >= in_flight:
                        break
                    queue.append(event.part)
                else:
                    if not queue:
                        break
                    # The sender's order is the receiver's.
                    assert queue.pop(0) == event.part
                    found[me].append(event.part)
                at[me] += 1
                moved = True
    assert at == [len(one) for one in left], "ranks wait for each other"
    assert not any(flying.values())
    return found


def expect_one_room(parts, me, ranks, in_flight):
    """A part that is forwarded leaves right behind its arrival."""
    events = schedule.events(parts, me, ranks, in_flight)
    for event, behind in itertools.zip_longest(events, events[1:]):
        if not event.is_send and event.part.transfer.target != me:
            assert behind.is_send
            assert behind.part == event.part


@pytest.mark.parametrize("domains", [1, 2, 4])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_no_order_of_sends_and_receives_ends_in_a_wait_of_all(domains, in_flight):
    draw = random.Random(domains * 10 + in_flight)
    for seed in range(30):
        count = domains * draw.randint(1, 4)
        local, spare = draw.randint(1, 4), draw.randint(0, 4)
        slots = plan_of(count, local, spare, seed).tolist()
        sizes = [draw.choice((16, 40, 200)) for _ in range(draw.randint(1, 3))]
        ranks = schedule.Ranks(count, domains)
        replicating, reducing = schedule.replicating(slots, local), schedule.reducing(slots, local)

        def spread(transfers, sizes=sizes, count=count):
            return schedule.spread(transfers, sizes, 48, count)

        def in_turn(transfers, sizes=sizes):
            return schedule.in_turn(transfers, sizes, 48)

        for parts_of, transfers in ((spread, replicating), (in_turn, reducing)):
            for me in range(count):
                expect_one_room(parts_of(ranks.of(me, transfers)), me, ranks, in_flight)
            found = runs(parts_of, transfers, ranks, in_flight)
            ends = [[it for it in one if it.transfer.target == me] for me, one in enumerate(found)]
            assert sum(map(len, ends)) == len(parts_of(transfers))
        # Terms of a sum come by rank.
        for one in ends:
            keys = [(it.tensor, it.transfer.target_row, it.begin, it.transfer.source) for it in one]
            assert keys == sorted(keys)
