"""Exceptions of opendal as a `RemoteError` of one line, without credentials."""

from __future__ import annotations

import re
from urllib.parse import quote

from opendal import exceptions

from preheat.cache.remote.engine import RemoteError
from preheat.cache.remote.url import Remote

__all__ = ["ERRORS", "NO_CONNECTION", "error_of_stream", "is_unsupported", "translated"]

#: Every exception that opendal raises. They have no class in common.
ERRORS = tuple(
    kind for kind in vars(exceptions).values() if isinstance(kind, type) and issubclass(kind, Exception)
)
#: In the message of a stream that could not be opened. The reason itself is not in it.
NO_CONNECTION = "source: error sending request"
_REFUSED = "it refuses the credentials, or the operation to them"
_FULL = "it is full, or the object is too large"
_MEANINGS: dict[type[Exception], str] = {
    exceptions.PermissionDenied: _REFUSED,
    exceptions.ConfigInvalid: "its settings are invalid",
    exceptions.RateLimited: "it gets too many requests",
    exceptions.Unsupported: "it is read-only, or does not support the operation",
}
_MEANINGS_OF_STATUS = {401: _REFUSED, 403: _REFUSED, 405: "it is read-only", 413: _FULL, 507: _FULL}
_PASSING = {408, 425, 429, 500, 502, 503, 504}  # After these, another attempt may succeed.
_NOT_IMPLEMENTED = 501
_LONGEST = 300


def translated(error: Exception, remote: Remote) -> RemoteError:
    """Return the `RemoteError` for an exception of opendal."""
    text = str(error)
    said = _said(text)
    if said.endswith("operation timeout reached"):
        return RemoteError(f"{remote.name} did not answer in time")
    status = _status(text)
    meaning = _MEANINGS_OF_STATUS.get(status) or _MEANINGS.get(type(error))
    for secret in filter(None, (remote.password, quote(remote.password or "", safe=""))):
        said = said.replace(secret, "***")
    message = ": ".join(filter(None, (remote.name, meaning, said[:_LONGEST])))
    passing = status in _PASSING if status else "(temporary)" in text.partition("=>")[0]
    return RemoteError(message, retryable=passing)


def is_unsupported(error: Exception) -> bool:
    """Return whether the server does not implement what was asked for, such as a condition."""
    return isinstance(error, exceptions.Unsupported) or _status(str(error)) == _NOT_IMPLEMENTED


def error_of_stream(fault: OSError) -> Exception:
    """Return the exception of `Operator.read` for one that a stream raised.

    NotFound (permanent) at read, context: { …, response: Parts { status: 404, … }, … } => the reason
    """
    text = str(fault)
    kind = getattr(exceptions, text.partition(" ")[0], exceptions.Unexpected)
    head, _, rest = text.partition(", context: { ")
    said = rest.rpartition(" } => ")[2] if " } => " in rest else ""
    status = re.search(r"response: Parts \{ status: \d+", rest)
    error: Exception = kind(
        head + (f" => {said}" if said else "") + (f"\n\n   {status[0]}" if status else "")
    )
    return error


def _status(text: str) -> int:
    """Return the status of the HTTP response, or 0 when there was none."""
    found = re.search(r"^   response: Parts \{ status: (\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0


def _said(text: str) -> str:
    """Return the reason in a message of opendal, which has many lines, without requests and headers.

    Unexpected (temporary) at read => send http request
    Context: …
    Source: …
       error sending request: client error (Connect): tcp connect error: Connection refused
    """
    if "detect_region" in text:  # It names a function of Rust as the remedy.
        return "its region is missing: add ?region=NAME to the URL, or set AWS_REGION"
    head = text.partition("\n")[0]
    said = head.partition("=> ")[2] or head
    if s3 := re.match(r'S3Error \{ code: "(.*?)", message: "(.*?)"', said):
        said = ": ".join(filter(None, s3.groups()))
    elif source := re.search(r"^Source:\n +(.+)$", text, re.MULTILINE):
        said = source[1].rpartition("error: ")[2]
    elif status := _status(text):  # A page of HTML is no reason.
        said = f"HTTP status {status}" + (f", {said}" if "=> " in head and "<" not in said else "")
    return "".join(letter if letter.isprintable() else " " for letter in said).strip()
