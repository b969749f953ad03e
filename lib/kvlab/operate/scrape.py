"""Reading a metrics page from a server, once or twice: every wait has a limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvlab.errors import KvlabError, MeasureError, one_line
from kvlab.operate.facts import Facts, facts
from kvlab.operate.prometheus import Page, read_page
from kvlab.timing import Clock

# A page of a busy server is read in milliseconds, and has some 100 kB.
_LIMIT_S = 10.0
_LIMIT_BYTES = 32 * 2**20


def address_of(url: str) -> str:
    """The address of the metrics page: a server's address without a path gets ``/metrics``.

    Args:
        url: as it was given.
    """
    rest = url.partition("://")[2]
    return url.rstrip("/") + "/metrics" if rest and "/" not in rest.rstrip("/") else url


def scrape(url: str, clock: Clock) -> str:
    """The text of a metrics page.

    Args:
        url: of the page.
        clock: that ends the wait after ten seconds, however slowly the page comes.

    Raises:
        MeasureError: the address is wrong, nobody answers in time, or the answer is no page.
        KvlabError: ``httpx`` is not installed.
    """
    try:
        import httpx
    except ImportError:
        raise KvlabError("reading from a server needs the package httpx; run: pip install 'kvlab[serve]'") from None
    end, body = clock.now() + _LIMIT_S, bytearray()
    try:
        with httpx.stream("GET", url, timeout=_LIMIT_S, follow_redirects=True) as answer:
            if answer.status_code != 200:
                raise MeasureError(_refused(url, answer.status_code))
            for part in answer.iter_bytes():
                body += part
                if clock.now() > end or len(body) > _LIMIT_BYTES:
                    raise MeasureError(f"{url} is still sending after {_LIMIT_S:g} s: that is no metrics page")
    except (httpx.HTTPError, httpx.InvalidURL) as failure:
        raise MeasureError(
            f"{url} does not answer ({type(failure).__name__}: {one_line(failure)}); is the server up, and is this its "
            "address? vLLM listens only when the model is loaded"
        ) from None
    return body.decode("utf8", errors="replace")


def _refused(url: str, status: int) -> str:
    hints = {
        401: "it wants a key, which llama.cpp's server does for this page too when it has --api-key",
        404: "the page of a vLLM server is at /metrics; transformers serve has none",
        501: "start llama.cpp's server with --metrics",
    }
    return f"{url} answers {status}: {hints.get(status, 'give the address of a metrics page that anybody may read')}"


def watch(read: Callable[[], str], seconds: float, clock: Clock, tell: Callable[[str], None]) -> Facts:
    """Read a page, wait, read it again, and compute what happened between.

    Ctrl-C during the wait, or a server that has gone, leaves the first read; the facts say so.

    Args:
        read: gives the text of the page.
        seconds: between the reads; 0 reads once.
        clock: to wait with.
        tell: hears how long it will take, once a second.

    Raises:
        MeasureError: ``seconds`` is no waiting time, or the first read is no metrics page.
    """
    if not 0 <= seconds <= 3600:
        raise MeasureError(f"seconds is {seconds}; wait 0 (one read, from the start of the server on) to 3600")
    before = read_page(read())
    if not seconds:
        return facts(None, before)
    start = clock.now()
    try:
        _wait(start + seconds, clock, tell)
        after = read_page(read())
    except KeyboardInterrupt:
        return _alone(before, f"Interrupted after {clock.now() - start:.0f} s")
    except MeasureError as failure:
        return _alone(before, f"The second read failed ({failure})")
    finally:
        tell("")
    return facts(before, after, clock.now() - start)


def _wait(end: float, clock: Clock, tell: Callable[[str], None]) -> None:
    while (left := end - clock.now()) > 0:
        tell(f"reading again in {left:.0f} s")
        clock.wait_until(min(clock.now() + 1.0, end))


def _alone(before: Page, why: str) -> Facts:
    found = facts(None, before)
    note = f"{why}: this is the first read alone, which has everything since the server started."
    return replace(found, notes=(note, *found.notes))
