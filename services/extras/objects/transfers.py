"""Patience with a store that does not answer, and the progress of a transfer."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Literal, TypeVar

from services.common.errors import UnavailableError
from services.common.stores import Report, size_text

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")

PATIENCE_S: Final = 600.0
"""Seconds without a successful request after which a download fails."""
_TOLD_AFTER_S: Final = 10.0
"""Seconds of failure after which an event reports it; shorter ones only show in metrics."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 15.0
_REPORT_EVERY_S, _LOG_EVERY_S = 1.0, 10.0


class Outage:
    """Decides when a failure is long enough for an event, and when its end is one."""

    def __init__(self) -> None:
        self._is_reported = False

    def changed(self, failing_s: float) -> Literal["failing", "resumed"] | None:
        """Returns what is to be reported of a store that has failed for ``failing_s``; 0 if it works."""
        if failing_s >= _TOLD_AFTER_S and not self._is_reported:
            self._is_reported = True
            return "failing"
        if failing_s == 0 and self._is_reported:
            self._is_reported = False
            return "resumed"
        return None


class TransferCancelledError(Exception):
    """The process ends, or what is uploaded is outdated."""


class Patience:
    """Repeats requests that may succeed later, and remembers since when and why they fail.

    Args:
        url: URL for the messages.
        limit_s: Seconds without any success after which a request raises its error; None for ever.
        report: Receives a line with the first cause while requests fail.
    """

    def __init__(
        self, url: str, *, limit_s: float | None = PATIENCE_S, report: Report | None = None
    ) -> None:
        self._url = url
        self._limit_s = limit_s
        self._report = report
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._since: float | None = None
        self.cause = ""
        """First cause of the present failure; empty if the last request succeeded."""

    @property
    def failing_s(self) -> float:
        """Seconds since a request first failed; 0 if the last one succeeded."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def cancel(self) -> None:
        """Ends all requests that are repeated with a TransferCancelledError."""
        self._cancelled.set()

    def check(self) -> None:
        """Raises TransferCancelledError after :meth:`cancel`."""
        if self._cancelled.is_set():
            raise TransferCancelledError

    def pause(self, seconds: float) -> None:
        self._cancelled.wait(seconds)
        self.check()

    def __call__(self, request: Callable[[], _Result]) -> _Result:
        """Returns the result of a request, repeated until it does not raise UnavailableError.

        Raises:
            UnavailableError: If no request succeeded for the limit; the message has the first cause.
            TransferCancelledError: After :meth:`cancel`.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            self.check()
            try:
                result = request()
            except UnavailableError as error:
                self._failed(error)
            else:
                self._succeeded()
                return result
            self.pause(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _failed(self, error: UnavailableError) -> None:
        with self._lock:
            if self._since is None:
                self._since, self.cause = time.monotonic(), error.message
                logger.warning("object store failed", extra={"cause": error.message})
            if self._limit_s is not None and self.failing_s > self._limit_s:
                raise UnavailableError(
                    f"{self._url} cannot be used for {self._limit_s:.0f} s; first cause: {self.cause}",
                    url=self._url,
                ) from error
            if self._report is not None:
                self._report(f"{self._url} cannot be used for {self.failing_s:.0f} s: {self.cause}")

    def _succeeded(self) -> None:
        with self._lock:
            if self._since is not None:
                outage_s = round(self.failing_s, 1)
                logger.info("object store answers again", extra={"outage_s": outage_s})
            self._since, self.cause = None, ""


class TransferProgress:
    """Counts the bytes of a transfer; reports and logs them from time to time.

    Args:
        what: Begin of the line, for example ``downloading s3://bucket/model``.
        report: Receives the line; None only logs it.
    """

    def __init__(self, subject: str, total_bytes: int, report: Report | None = None) -> None:
        self._what = subject
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self._report = report
        self._lock = threading.Lock()
        self._started = self._reported_at = self._logged_at = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Counts further bytes; a transfer that is repeated may count some twice."""
        with self._lock:
            self.done_bytes = min(self.done_bytes + num_bytes, self.total_bytes)
            now = time.monotonic()
            line = f"{self._what}: {size_text(self.done_bytes)} of {size_text(self.total_bytes)}"
            if self._report is not None and now - self._reported_at >= _REPORT_EVERY_S:
                self._reported_at = now
                self._report(line)
            if now - self._logged_at >= _LOG_EVERY_S:
                self._logged_at = now
                rate = self.done_bytes / max(now - self._started, 1e-9)
                logger.info("%s", line, extra={"bytes_per_s": round(rate)})
