"""Namespaces of their own for ranks of one host, as its containers have them: `unshare` before their programs."""

import os
import subprocess

# A rank has its own one of each kind, and what it needs there.
OPTIONS = {
    # CUDA, like much else, looks for its own process below /proc.
    "pid": ["--pid", "--fork", "--kill-child", "--mount-proc"],
    "ipc": ["--ipc"],
    "mnt": ["--mount"],
    "uts": ["--uts"],
    "user": ["--map-root-user"],
    "net": ["--net"],
}
# The kinds that ranks of one host need not share. They meet by its network.
KINDS = ("pid", "ipc", "mnt", "uts", "user")
FORMS = {**{kind: (kind,) for kind in KINDS}, "all": KINDS}


def apart(kinds):
    """The kinds of which a rank behind `kinds` has a namespace of its own: its own `/proc` needs mounts of its own."""
    return {*kinds, "mnt"} if "pid" in kinds else set(kinds)


def behind(kinds, rank, words):
    """The command that runs `words` in own namespaces of these kinds."""
    options = [option for kind in kinds for option in OPTIONS[kind]]
    if os.geteuid() != 0 and "user" not in kinds:
        # Anyone else may make the other kinds in a user namespace only.
        options += OPTIONS["user"]
    steps = []
    if "mnt" in kinds:
        # A `/dev/shm` with no room to speak of.
        steps.append("mount -t tmpfs -o size=64k tmpfs /dev/shm")
    if "uts" in kinds:
        steps.append(f"hostname rank-{rank}")
    inside = " && ".join([*steps, 'exec "$@"'])
    return ["unshare", *options, "sh", "-c", inside, "sh", *words]


def check_permitted(kinds):
    """An error with the fix, where this machine lets its user make no such namespaces."""
    words = behind(kinds, 0, ["true"])
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (
        f"found that namespaces of the kinds {', '.join(kinds)} cannot be made: {done.stderr.strip()}; "
        "expected the right to, which the tests of several hosts need as well. Fix: run as root with CAP_SYS_ADMIN, "
        "or let users make namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone)"
    )
