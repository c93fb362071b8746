"""The thread of a call."""

import threading
from collections.abc import Callable


class Worker:
    """A thread that waits for its work. It starts before ranks agree, so that a thread that the system refuses is a
    refused call, and no other rank waits for its bytes."""

    def __init__(self) -> None:
        self._begins = threading.Event()
        self._work: Callable[[], None] | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tokenyard replicas", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # The caller begins or cancels it in any case.
        self._begins.wait()
        work, self._work = self._work, None
        try:
            if work is not None:
                work()
        except BaseException as error:
            # Its frames hold the tensors of the call.
            self.error = error.with_traceback(None)

    def begin(self, work: Callable[[], None]) -> None:
        """Does it on the thread."""
        self._work = work
        self._begins.set()

    def cancel(self) -> None:
        """Ends the thread, which has no work."""
        self._begins.set()

    def join(self) -> None:
        """Waits for its end."""
        self._thread.join()
