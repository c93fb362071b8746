"""The exceptions that tokenyard raises.

Every exception is an `Error`, and also what Python calls it: a `ValueError`, a `TimeoutError`, ... Branch on the class
or on `kind`; people read the message.
"""


class Error(RuntimeError):
    """Base of all of them.

    - `kind`: a short stable name, for example `"invalid_input"`; equal to that of the command's JSON.
    - `rank`: the world rank that the error is about (the lost, late or refusing one), or None.
    - `operation`: what failed.
    - `fix`: what to do, or None.
    """

    kind: str
    rank: int | None
    operation: str
    fix: str | None

    def __init__(
        self,
        message: str,
        *,
        kind: str = "internal",
        rank: int | None = None,
        operation: str = "",
        fix: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.rank = rank
        self.operation = operation
        self.fix = fix

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross processes: a pool of workers pickles them.
        return (type(self), self.args, self.__dict__)


class ConfigError(Error, ValueError):
    """The config is wrong."""


class InvalidInputError(Error, ValueError):
    """An argument of this rank is wrong, or the call cannot be now.

    Nothing was moved, and the communicator is usable, unless it was closed.
    """


class RefusedError(Error):
    """Another rank refused its input: nothing was moved, and the communicator is usable."""


class MismatchError(Error, ValueError):
    """Ranks disagree on what must be equal."""


class PluginError(Error, OSError):
    """A plugin file is not one, or is of another version."""


class UnavailableError(Error, OSError):
    """A component cannot run here: a library, a device or a right is missing."""


class UnsupportedError(Error, NotImplementedError):
    """The chosen component does not support it."""


class FullError(Error, MemoryError):
    """The arena, or the room for handles, is full: nothing was moved, and the communicator is usable."""


class DeadlineError(Error, TimeoutError):
    """A wait ran out of time. The communicator, pipe or gather is closed."""


class PeerLostError(Error, ConnectionError):
    """A rank was killed, was silent for too long, or left. The communicator, pipe or gather is closed."""


class TransportError(Error, ConnectionError):
    """A transport failed. The communicator, pipe or gather is closed."""


class ProtocolError(Error, ConnectionError):
    """Bytes of a peer failed a check."""


class SystemCallError(Error, OSError):
    """The operating system refused a call."""


class InternalError(Error):
    """A bug of a component."""
