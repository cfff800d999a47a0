"""Exceptions of opendal as a `RemoteError` of one line, without credentials."""

from __future__ import annotations

import base64
import re
from urllib.parse import quote

from opendal import exceptions

from preheat.store.remote.engine import CERTIFICATES_HINT, ObjectError, RemoteError
from preheat.store.remote.url import Remote

__all__ = ["ERRORS", "NO_CONNECTION", "is_unsupported", "restore_error", "translate_error"]

#: Every exception that opendal raises. They have no common base class.
ERRORS = tuple(
    kind for kind in vars(exceptions).values() if isinstance(kind, type) and issubclass(kind, Exception)
)
#: The message of a stream that could not be opened contains this, and does not contain the reason.
NO_CONNECTION = "source: error sending request"
_NO_CREDENTIALS = "failed to load signing credential"
_CREDENTIALS = {  # where each service finds those that the URL does not have
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or add anonymous=1 to the URL",
    "gcs": "set GOOGLE_APPLICATION_CREDENTIALS, or add anonymous=1 to the URL",
    "azblob": "set AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN",
}
_REFUSED = "it refuses the credentials, or they do not permit the operation"
_TOO_LARGE = "the object is too large"
_MEANINGS: dict[type[Exception], str] = {
    exceptions.PermissionDenied: _REFUSED,
    exceptions.ConfigInvalid: "its settings are invalid",
    exceptions.RateLimited: "it gets too many requests",
    exceptions.Unsupported: "it is read-only, or does not support the operation",
}
_MEANINGS_OF_STATUS = {
    401: _REFUSED,
    403: _REFUSED,
    405: "it is read-only",
    507: "it is full",
}
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}  # After these, another attempt may succeed.
_NOT_IMPLEMENTED = 501
_LONGEST = 300
_BASIC = re.compile(r"(\bBasic\s+)[\w+/=-]{4,}")  # A server may also repeat a part of the header.


def translate_error(error: Exception, remote: Remote) -> RemoteError:
    """Return the `RemoteError` for an exception of opendal."""
    text = str(error)
    reason = _reason(text)
    if reason.endswith("operation timeout reached"):
        return RemoteError(f"{remote.name} did not answer in time")
    status = _status(text)
    too_large = status == 413 or reason.startswith("EntityTooLarge")  # The latter is S3, status 400.
    meaning = _TOO_LARGE if too_large else _MEANINGS_OF_STATUS.get(status) or _MEANINGS.get(type(error))
    if _NO_CREDENTIALS in reason:  # The same text for each operation, so that it is reported once.
        reason = f"no credentials were found: {_CREDENTIALS.get(remote.service, reason)}"
    elif "invalid peer certificate" in reason:
        reason = f"its certificate is not accepted: {reason.rpartition(': ')[2]}; {CERTIFICATES_HINT}"
    shown = _without_credentials(reason, remote)[:_LONGEST]
    message = ": ".join(filter(None, (remote.name, meaning, shown)))
    if too_large:
        return ObjectError(message)
    transient = status in _TRANSIENT if status else "(temporary)" in text.partition("=>")[0]
    return RemoteError(message, retryable=transient)


def _without_credentials(text: str, remote: Remote) -> str:
    """Return `text` without the password, in each form in which a server may repeat it."""
    password = remote.password
    if password is None:
        return text
    basic = base64.b64encode(f"{remote.user or ''}:{password}".encode()).decode()
    for secret in (basic, basic.rstrip("="), quote(password, safe=""), password):
        text = text.replace(secret, "***")
    return _BASIC.sub(r"\1***", text)


def is_unsupported(error: Exception) -> bool:
    """Return whether the server does not implement the request, such as a condition."""
    return isinstance(error, exceptions.Unsupported) or _status(str(error)) == _NOT_IMPLEMENTED


def restore_error(fault: OSError) -> Exception:
    """Return the exception of `Operator.read` for one that a stream raised.

    NotFound (permanent) at read, context: { …, response: Parts { status: 404, … }, … } => the reason
    """
    text = str(fault)
    kind = getattr(exceptions, text.partition(" ")[0], exceptions.Unexpected)
    head, _, rest = text.partition(", context: { ")
    reason = rest.rpartition(" } => ")[2] if " } => " in rest else ""
    status = re.search(r"response: Parts \{ status: \d+", rest)
    error: Exception = kind(
        head + (f" => {reason}" if reason else "") + (f"\n\n   {status[0]}" if status else "")
    )
    return error


def _status(text: str) -> int:
    """Return the status of the HTTP response, or 0 if there was no response."""
    found = re.search(r"^   response: Parts \{ status: (\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0


def _reason(text: str) -> str:
    """Return the reason in a message of opendal, which has many lines, without requests and headers.

    Unexpected (temporary) at read => send http request
    Context: …
    Source: …
       error sending request: client error (Connect): tcp connect error: Connection refused
    """
    if "detect_region" in text:  # It names a function of Rust as the remedy.
        return "its region is missing: add ?region=NAME to the URL, or set AWS_REGION"
    head = text.partition("\n")[0]
    reason = head.partition("=> ")[2] or head
    if s3 := re.match(r'S3Error \{ code: "(.*?)", message: "(.*?)"', reason):
        reason = ": ".join(filter(None, s3.groups()))
    elif source := re.search(r"^Source:\n +(.+)$", text, re.MULTILINE):
        reason = source[1].rpartition("error: ")[2]
    elif status := _status(text):  # A page of HTML is not shown.
        reason = f"HTTP status {status}" + (
            f", {reason}" if "=> " in head and "<" not in reason else ""
        )
    return "".join(letter if letter.isprintable() else " " for letter in reason).strip()
