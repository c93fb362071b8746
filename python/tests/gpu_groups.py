"""Process groups of torch that are not the world, on four ranks: each is a world of its own, whatever the launcher
counts. On two GPUs groups share them, on four each rank has one, on one all ranks share it; without GPUs in host
memory."""

import contextlib
import os

import torch
import torch.distributed as dist
from gpu_common import (
    Skipped,
    config,
    is_gpu,
    layout_of,
    prepare,
    raised,
    same,
    synchronize,
    times,
)
from oracle import Case

import tokenyard
from tokenyard.deep_ep import Buffer

RANKS = 4
SHAPES = {
    "halves": [[0, 1], [2, 3]],
    "strided_pairs": [[0, 2], [1, 3]],
    "three_of_four": [[0, 1, 2]],
    "one_each": [[0], [1], [2], [3]],
}


@contextlib.contextmanager
def torchrun(world, port):
    """Inside, torch's default group has all ranks, and torchrun's variables describe them."""
    variables = {
        "RANK": world.rank,
        "LOCAL_RANK": world.rank,
        "WORLD_SIZE": world.ranks,
        "LOCAL_WORLD_SIZE": world.ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update({name: str(value) for name, value in variables.items()})
    # NCCL takes no two ranks on one GPU.
    dist.init_process_group("nccl" if torch.cuda.device_count() >= world.ranks else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def select_device(world, members):
    """The GPU of this rank. The members of a group have one each."""
    prepare(world)
    if not is_gpu():
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    place = world.rank if gpus >= world.ranks else members.index(world.rank) % gpus
    torch.cuda.set_device(place)
    return torch.device("cuda", place)


def groups(world, port, shape):
    """All groups of a shape at once."""
    all_members = SHAPES[shape]
    if 1 < torch.cuda.device_count() < max(map(len, all_members)):
        return Skipped("a group has more members than there are GPUs")
    members = next((some for some in all_members if world.rank in some), None)
    device = select_device(world, members or [world.rank])
    with torchrun(world, port):
        # Each rank makes all groups.
        made = [dist.new_group(some) for some in all_members]
        if members is None:
            error = raised(lambda: tokenyard.World.from_torch(made[0]))
            expected = f"expected a group that world rank {world.rank} is a member of"
            assert isinstance(error, tokenyard.errors.InvalidInputError)
            assert expected in str(error), error
        else:
            group = made[all_members.index(members)]
            round_trip(group, members.index(world.rank), len(members), device)
            names(group, members, world.rank, device)
        world.barrier("all groups are done")
    return None


def round_trip(group, me, ranks, device):
    """The drop-in, over a group."""
    case = Case(ranks, experts=12, hidden=256, seed=2)
    buffer = Buffer(group, explicitly_destroy=True)
    assert (buffer.rank, buffer.group_size) == (me, ranks)
    x, idx, weights = (torch.from_numpy(a[me]).to(device) for a in (case.x, case.idx, case.weights))
    x = x.bfloat16()
    options = layout_of(buffer, idx, case.experts)
    recv_x, _, _, _, handle, _ = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **options)
    rows = torch.from_numpy(case.rows(case.sources(me)))
    same(recv_x, rows.to(device).bfloat16())
    combined, _, _ = buffer.combine(recv_x, handle)
    count = torch.from_numpy(times(case, me)).to(device)
    assert torch.equal(combined, (x.float() * count[:, None]).bfloat16())
    buffer.destroy()


def names(group, members, world_rank, device):
    """Members count those on their machine themselves. An error about one says which process it is."""
    me = members.index(world_rank)
    its = config() if is_gpu() else tokenyard.Config.built_in("cpu", deadline_ms=20_000)
    with tokenyard.World.from_torch(group, config=its) as world:
        assert (world.rank, world.ranks, world.local_rank) == (me, len(members), me)
        pids = world.all_gather("pids", str(os.getpid()).encode())
        sizes = {"experts": 12, "topk": 1, "hidden": 64, "max_tokens": 4}
        comm = tokenyard.Communicator(world, its, **sizes)
        if len(members) == 1:
            return
        if me == 1:
            with contextlib.suppress(KeyError), world:
                raise KeyError("it stops here")
            return
        x = torch.ones(4, 64, device=device)
        idx = torch.full((4, 1), 12 // len(members), device=device)
        synchronize()
        error = raised(lambda: comm.dispatch(x, idx))
        process = f"rank 1 of this group is world rank {members[1]}, pid {int(pids[1])} on "
        assert (error.kind, error.rank) == ("peer_lost", 1), error
        assert process in str(error), error
