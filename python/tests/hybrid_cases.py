"""Exchanges of Hybrid-EP: what each rank must get, from a global view of all ranks, and checks of calls against it.

Tensors lie where the buffer's do: in host memory, or on a GPU. No code of the product is in the reference.
"""

import dataclasses

import numpy as np
import pytest
import torch

from tokenyard import errors
from tokenyard.deep_ep.hybrid_ep_buffer import HybridEpConfigInstance

BF16 = torch.bfloat16


@dataclasses.dataclass
class Case:
    """One exchange, of which each rank knows all: maps of experts, their probabilities, and rows."""

    ranks: int
    tokens: tuple
    local: int = 4
    hidden: int = 64
    most: int = 3
    seed: int = 1

    def __post_init__(self):
        draw = torch.Generator().manual_seed(self.seed)
        self.experts = self.local * self.ranks
        self.x, self.maps, self.probs = [], [], []
        for tokens in self.tokens:
            scores = torch.rand(tokens, self.experts, generator=draw)
            places = scores.argsort(1).argsort(1)
            # From none to the most.
            counts = torch.randint(0, self.most + 1, (tokens, 1), generator=draw)
            if tokens:
                counts[0] = self.most
            chosen = places < counts
            self.maps.append(chosen)
            self.probs.append(torch.rand(tokens, self.experts, generator=draw) * chosen)
            # Few values: sums of many are exact, in any order.
            rows = torch.randint(-4, 5, (tokens, self.hidden), generator=draw) / 4
            self.x.append(rows.to(BF16))

    @property
    def device(self):
        return self.x[0].device

    def on(self, device):
        """The same numbers on another device."""
        other = dataclasses.replace(self)
        for name in ("x", "maps", "probs"):
            setattr(other, name, [one.to(device) for one in getattr(self, name)])
        return other

    def own(self, rank):
        return slice(rank * self.local, (rank + 1) * self.local)

    def flat(self, rank):
        """(source, token) of the rows of a rank."""
        found = []
        for source, chosen in enumerate(self.maps):
            here = chosen[:, self.own(rank)].any(1).nonzero()[:, 0]
            found += [(source, int(token)) for token in here]
        return found

    def permuted(self, rank, unit=1):
        """(source, token, expert) of the rows of a rank, or None for padding; and padded counts."""
        rows, counts = [], []
        for expert in range(self.experts)[self.own(rank)]:
            mine = [
                (source, int(token), expert)
                for source, chosen in enumerate(self.maps)
                for token in chosen[:, expert].nonzero()[:, 0]
            ]
            padded = -(-len(mine) // unit) * unit
            rows += mine + [None] * (padded - len(mine))
            counts.append(padded)
        return rows, counts

    def columns(self, rank, width):
        """Ids and weights of the tokens of a rank, ascending, with -1 and other ids that select nothing between."""
        ids = torch.full((self.tokens[rank], width), -1, device=self.device)
        ids[:, -1] = self.experts + 5
        weights = torch.rand(ids.shape, device=self.device)
        for token, chosen in enumerate(self.maps[rank]):
            found = chosen.nonzero()[:, 0]
            ids[token, : len(found)] = found
            weights[token, : len(found)] = self.probs[rank][token, found]
        return ids, weights

    def summed(self, rank, scale):
        """Sums of rows that experts multiply: in the order of the experts and rounded on each rank, then ranks."""
        out = torch.zeros(self.tokens[rank], self.hidden, device=self.device)
        for there in range(self.ranks):
            part = torch.zeros_like(out)
            for expert in range(self.experts)[self.own(there)]:
                copies = scale(self.x[rank].float(), expert).to(BF16).float()
                part += torch.where(self.maps[rank][:, expert, None], copies, 0)
            out += part.to(BF16).float()
        return out.to(BF16)


def scaled(rows, expert):
    """Sums of these rows have bits of their own in nearly each order."""
    return rows * (1 + expert / 7)


def shifted(rows, expert):
    """Sums of these rows are exact."""
    return rows * (1 + expert % 2)


def same(found, expected):
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    as_bytes = [one.contiguous().view(torch.uint8) for one in (found, expected)]
    assert torch.equal(*as_bytes), (found, expected)


def rows_of(case, places, of):
    """The row of each place, and zeros for padding."""
    out = of[0].new_zeros((len(places), *of[0].shape[1:]))
    for row, place in enumerate(places):
        if place is not None:
            out[row] = of[place[0]][place[1]]
    return out


def probs_of(case, places):
    values = [0.0 if it is None else case.probs[it[0]][it[1], it[2]] for it in places]
    return torch.tensor(values, dtype=torch.float32, device=case.device)


def forms(case, me):
    """The routing in each form that a call takes, with probabilities."""
    width = case.most + 2
    ids, weights = case.columns(me, width)
    yield {"routing_map": case.maps[me], "probs": case.probs[me]}
    named = {"topk_idx": ids, "num_of_experts": case.experts}
    yield {**named, "topk_weights": weights}
    yield {**named, "topk_idx": ids.int(), "probs": case.probs[me]}
    # The map and the explicit probabilities win.
    lost = {"topk_idx": torch.zeros_like(ids), "topk_weights": torch.zeros_like(weights)}
    yield {**lost, "routing_map": case.maps[me], "probs": case.probs[me]}


def outputs_of(rows, places, scale):
    """The experts' outputs, and in place of padding what no sum may have."""
    out = torch.full_like(rows, float("nan"))
    for row, place in enumerate(places):
        if place is not None:
            out[row] = scale(rows[row].float(), place[2]).to(rows.dtype)
    return out


def permuted(buffer, case, unit, scale=scaled):
    me, domains = buffer.rank, buffer.num_of_nodes
    places, counts = case.permuted(me, unit)
    x, slots = case.x[me], max(16, -(-case.tokens[me] // 16) * 16)
    for number, form in enumerate(forms(case, me)):
        is_fused = number % 2 == 1
        rows, probs, none, padded, handle = buffer.dispatch_with_permute(
            hidden=x,
            num_of_experts_per_rank=case.local,
            pad_multiple=unit,
            fuse_permute_dispatch=is_fused,
            **form,
        )
        same(rows, rows_of(case, places, case.x))
        same(probs, probs_of(case, places))
        assert none is None
        same(padded, torch.tensor(counts, dtype=torch.int64))
        assert len(handle) == 12
        assert handle[3].tolist() == [len(case.flat(me))]
        assert handle[7].tolist() == [
            sum(it is not None and it[2] == e for it in places)
            for e in range(case.experts)[case.own(me)]
        ]
        assert handle[8] == slots
        assert isinstance(handle[9], HybridEpConfigInstance)
        assert handle[10] == case.tokens[me]
        assert (handle[11].tolist(), handle[11].dtype) == ([0], torch.int32)
        y = outputs_of(rows, places, scale)
        out, back = buffer.combine_with_unpermute(
            hidden=y, probs=probs, handle=handle, fuse_unpermute_combine=is_fused
        )
        expected = case.summed(me, scale)
        if domains == 1:
            same(out, expected)
        torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
        same(back, case.probs[me])
        out, back = buffer.combine_with_unpermute(hidden=y, handle=handle)
        torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
        assert back is None
        # By the handle, as a backward makes it: with P as a number, and as a tensor.
        for rows_wanted in (len(places), torch.tensor(len(places)), None):
            again, none, *_, same_handle = buffer.dispatch_with_permute(
                hidden=-x, handle=handle, num_permuted_tokens=rows_wanted
            )
            same(again, rows_of(case, places, [-one for one in case.x]))
            assert none is None
            assert same_handle is handle
        _, probs, _, none, _ = buffer.dispatch_with_permute(
            hidden=x, probs=2 * case.probs[me], handle=handle
        )
        same(probs, 2 * probs_of(case, places))
        assert none is None


def flat(buffer, case):
    me, domains = buffer.rank, buffer.num_of_nodes
    places, x = case.flat(me), case.x[me]
    size = case.ranks // domains
    first = me % size * case.local
    for form in forms(case, me):
        rows, probs, none, handle = buffer.dispatch(x, **form)
        same(rows, rows_of(case, places, case.x))
        assert none is None
        assert probs.shape == (len(places), size * case.local)
        own = probs[:, first : first + case.local]
        expected = rows_of(case, places, [one[:, case.own(me)] for one in case.probs])
        same(own, expected)
        assert len(handle) == 8
        assert handle[3].tolist() == [len(places)]
        found = handle[4]
        assert found.shape == (handle[5] * case.ranks, case.local)
        same(found[: len(places)], rows_of(case, places, [m[:, case.own(me)] for m in case.maps]))
        assert not found[len(places) :].any()
        assert isinstance(handle[6], HybridEpConfigInstance)
        assert handle[7] == case.tokens[me]
        out, back = buffer.combine(rows, probs, handle)
        reached = case.maps[me].view(len(x), case.ranks, case.local).any(2).sum(1)[:, None]
        expected_out = torch.where(reached > 0, x.float() * reached, 0).to(BF16)
        # A sum of one negative zero has its sign.
        same(out + 0, expected_out + 0)
        same(back, case.probs[me])
        out, back = buffer.combine(rows, handle=handle)
        same(out + 0, expected_out + 0)
        assert back is None
        again, none, _, same_handle = buffer.dispatch(-x, handle=handle)
        same(again, -rows)
        assert none is None
        assert same_handle is handle
        _, probs, _, _ = buffer.dispatch(x, probs=2 * case.probs[me], handle=handle)
        same(probs[:, first : first + case.local], 2 * expected)
    most = case.ranks * max(max(case.tokens), 1) + 3
    rows, probs, _, handle = buffer.dispatch(
        x,
        routing_map=case.maps[me],
        probs=case.probs[me],
        num_dispatched_tokens=most,
        num_of_tokens_per_rank=max(case.tokens),
    )
    assert rows.shape[0] == probs.shape[0] == most
    same(rows[: len(places)], rows_of(case, places, case.x))
    assert handle[3].tolist() == [len(places)]
    assert int(handle[4].sum()) == len(case.permuted(me)[0])
    out, back = buffer.combine(rows, probs, handle)
    same(back, case.probs[me])


def quantised(buffer, case):
    """Rows of 8 bits and their scales pass as they are, and sums are of bfloat16."""
    me = buffer.rank
    draw = torch.Generator().manual_seed(9)
    tokens = case.tokens
    x = [torch.randint(0, 256, (t, case.hidden), generator=draw) for t in tokens]
    x = [one.to(case.device, torch.uint8) for one in x]
    scales = [torch.rand(t, 3, generator=draw).to(case.device) for t in tokens]
    form = {"routing_map": case.maps[me], "probs": case.probs[me]}
    call = {"hidden": x[me], "scaling_factor": scales[me], **form}
    for dtype in (torch.uint8, torch.float8_e4m3fn):
        given = {**call, "hidden": x[me].view(dtype)}
        rows, _, row_scales, _, handle = buffer.dispatch_with_permute(
            **given, pad_multiple=16, use_fp8=True
        )
        places, _ = case.permuted(me, 16)
        same(rows, rows_of(case, places, x).view(dtype))
        same(row_scales, rows_of(case, places, scales))
        y = outputs_of(rows_of(case, places, case.x), places, scaled)
        out, _ = buffer.combine_with_unpermute(hidden=y, handle=handle)
        same(out, case.summed(me, scaled))
        again, _, again_scales, _, _ = buffer.dispatch_with_permute(
            hidden=given["hidden"], scaling_factor=2 * scales[me], handle=handle
        )
        same(again, rows)
        same(again_scales, 2 * row_scales)
        rows, _, row_scales, handle = buffer.dispatch(**given)
        places = case.flat(me)
        same(rows, rows_of(case, places, x).view(dtype))
        same(row_scales, rows_of(case, places, scales))
        out, _ = buffer.combine(rows_of(case, places, case.x), handle=handle)
        assert out.dtype == BF16


def kept_of(case, unit, dropped):
    """Maps without what ranks drop, each its last rows."""
    kept = [one.clone() for one in case.maps]
    for rank in range(case.ranks):
        places, _ = case.permuted(rank, unit)
        for place in places[max(len(places) - dropped, 0) :]:
            if place is not None:
                kept[place[0]][place[1], place[2]] = False
    return kept


def without_waiting(buffer, case):
    """P rows in any case; those beyond are dropped, of the last experts first, and count as zeros."""
    me, unit = buffer.rank, 4
    places, counts = case.permuted(me, unit)
    starts = np.cumsum([0, *counts[:-1]])
    true = np.array([int(sum(m[:, e].sum() for m in case.maps)) for e in range(case.experts)])
    call = {
        "hidden": case.x[me],
        "pad_multiple": unit,
        "non_blocking": True,
        "num_of_tokens_per_rank": max(case.tokens),
    }
    forms_ = list(forms(case, me))
    for number, dropped in enumerate((-8, 0, 8, 400)):
        room = max(len(places) - dropped, 0)
        rows, probs, _, padded, handle = buffer.dispatch_with_permute(
            **call, **forms_[number], num_permuted_tokens=torch.tensor(room)
        )
        assert rows.shape == (room, case.hidden)
        assert probs.shape == (room,)
        # No memory is held of rows that the caller does not get.
        assert rows.untyped_storage().nbytes() == rows.nbytes
        filled = min(room, len(places))
        same(rows[:filled], rows_of(case, places, case.x)[:filled])
        same(probs[:filled], probs_of(case, places)[:filled])
        counted = true[case.own(me)]
        clipped = np.minimum(counted, np.maximum(room - starts, 0))
        assert handle[7].tolist() == clipped.tolist()
        assert padded.tolist() == (-(-clipped // unit) * unit).tolist()
        assert padded.dtype == torch.int64
        assert handle[-1].tolist() == [int(starts[-1] + counted[-1] > room)]
        assert handle[3].tolist() == [len(case.flat(me))]
        y = torch.full_like(rows, float("nan"))
        y[:filled] = outputs_of(rows[:filled], places[:filled], shifted)
        out, back = buffer.combine_with_unpermute(hidden=y, probs=probs, handle=handle)
        kept = kept_of(case, unit, dropped)[me]
        expected = torch.zeros(case.x[me].shape, device=case.device)
        for expert in range(case.experts):
            copies = shifted(case.x[me].float(), expert)
            expected += torch.where(kept[:, expert, None], copies, 0)
        same(out + 0, expected.to(BF16) + 0)
        same(back, torch.where(kept, case.probs[me], 0))
        again, *_ = buffer.dispatch_with_permute(
            hidden=case.x[me], handle=handle, num_permuted_tokens=room
        )
        same(again[:filled], rows[:filled])
    with pytest.raises((errors.InvalidInputError, errors.RefusedError)) as raised:
        buffer.dispatch_with_permute(**call, **forms_[0], num_permuted_tokens=2 + 4 * (me == 1))
    assert "num_permuted_tokens: found" in str(raised.value)
    call["non_blocking"] = False
    room = max(len(places) - 1, 0)
    takes_caps = buffer.last_opened[True][0].takes("max_rows")
    if not takes_caps or not any(chosen.any() for chosen in case.maps):
        _cut(buffer, case, {**call, **forms_[0]}, room)
    else:
        # Too few rows of one rank are an error of all, before a row moves.
        with pytest.raises(errors.FullError, match="rows come"):
            buffer.dispatch_with_permute(**call, **forms_[0], num_permuted_tokens=room)
    _cut(buffer, case, {**call, **forms_[0]}, 0)
    rows, *_ = buffer.dispatch_with_permute(
        **call, **forms_[0], num_permuted_tokens=len(places) + 5
    )
    same(rows[: len(places)], rows_of(case, places, case.x))
    assert len(rows) == len(places) + 5


def _cut(buffer, case, call, room):
    """Fewer rows than came where the host waits: the flag says so, and the others count as zeros."""
    places, counts = case.permuted(buffer.rank, call["pad_multiple"])
    rows, _, _, padded, handle = buffer.dispatch_with_permute(**call, num_permuted_tokens=room)
    same(rows, rows_of(case, places, case.x)[:room])
    assert padded.device.type == "cpu"
    assert handle[7].tolist() == _of_experts(case, buffer.rank, places[:room])
    # As DeepEP counts: where the rows of the last expert end, which may have none.
    end = sum(counts[:-1]) + _of_experts(case, buffer.rank, places)[-1]
    assert handle[-1].tolist() == [int(end > room)]
    out, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)
    assert out.shape == case.x[buffer.rank].shape


def _of_experts(case, rank, places):
    experts = range(case.experts)[case.own(rank)]
    return [sum(it is not None and it[2] == expert for it in places) for expert in experts]


def more_experts_than_before(buffer, case):
    """Where the host does not wait, a token may have more experts than any had before, and none is lost."""
    me = buffer.rank
    room = case.ranks * max(case.tokens) * case.most
    call = {
        "hidden": case.x[me],
        "non_blocking": True,
        "num_permuted_tokens": room,
        "num_of_tokens_per_rank": max(case.tokens),
    }
    chosen = case.maps[me]
    for routing_map in (chosen & (chosen.cumsum(1) <= 1), chosen):
        rows, _, _, _, handle = buffer.dispatch_with_permute(routing_map=routing_map, **call)
        assert rows.shape[0] == room
        assert handle[-1].tolist() == [0]
        out, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)
        counts = routing_map.sum(1)[:, None]
        same(out + 0, (case.x[me].float() * counts).to(out.dtype) + 0)
    assert handle[3].tolist() == [len(case.flat(me))]
