"""Where things are on servers: the addresses of shared stores, and the names of their objects.

An address is a URL such as `s3://bucket/kernels`.

    s3://[KEY:SECRET@]bucket/folder?endpoint=URL&region=NAME&anonymous=1&addressing=path|virtual
    gs://bucket/folder?endpoint=URL&anonymous=1
    azblob://[ACCOUNT:KEY@]container/folder?account=NAME&endpoint=URL
    redis://[[USER]:PASSWORD@]host:6379/0?prefix=NAME  or valkey://; with TLS rediss:// or valkeys://
    dav://[USER:PASSWORD@]host/folder                  WebDAV; with TLS davs://
    http://[USER:PASSWORD@]host/folder                 for reading only; with TLS https://
    file:///folder                                     a directory that machines share

Credentials that a URL does not have come from the usual environment of the service, such as
`AWS_ACCESS_KEY_ID`.

Objects have these names below the address:

    v1/ab/<digest>         an entry in its envelope (see preheat.store.signing.entries)
    v1/leases/<digest>     who compiles it
    v1/probe/…             what `preheat doctor` and `preheat bundle push` write and remove
    bundles/<digest>       a bundle
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from preheat.errors import ConfigError, InputError, did_you_mean
from preheat.model.setting_values import shown_url
from preheat.store.layer import FORMAT

__all__ = [
    "BUNDLES",
    "LEASES",
    "PROBE",
    "ROOT",
    "Remote",
    "digest_of",
    "entry_name",
    "name_of",
    "parse_remote",
    "parse_remotes",
    "require_writable_kind",
]

ROOT = f"{FORMAT}/"
LEASES = f"{ROOT}leases/"
PROBE = f"{ROOT}probe"
BUNDLES = "bundles/"
_ENTRY = re.compile(f"{ROOT}([0-9a-f]{{2}})/(\\1[0-9a-f]{{62}})")


@dataclass(frozen=True, kw_only=True)
class Remote:
    """One shared store. Neither `name` nor `repr` contains credentials.

    `host` is a bucket of S3 or GCS, a container of Azure, or an address; for a directory it is empty.
    `path` is the folder of all objects, or the number of a database of Redis.
    """

    service: str  # "s3", "gcs", "azblob", "redis", "http", "webdav" or "file"
    name: str  # the URL without credentials, for messages and events
    host: str
    port: int | None = None
    path: str = ""
    secure: bool = True  # whether the connection is encrypted
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    options: tuple[tuple[str, str], ...] = ()

    @property
    def network(self) -> bool:
        """Whether the store is a server on a network, not a directory."""
        return self.service != "file"

    @property
    def read_only(self) -> bool:
        """Whether nobody can write to the store by this URL."""
        return self.service == "http"

    @property
    def can_hold_leases(self) -> bool:
        """Whether servers of this kind can have atomic operations, which leases need."""
        return self.service in ("s3", "redis", "file")

    def option(self, name: str) -> str | None:
        """Return the value of an option of the URL, or None."""
        return dict(self.options).get(name)


@dataclass(frozen=True)
class _Scheme:
    service: str
    example: str
    secure: bool = True
    options: tuple[str, ...] = ()


_S3 = _Scheme(
    "s3",
    "s3://bucket/kernels?endpoint=https://s3.example.com&region=eu-west-1",
    options=("endpoint", "region", "anonymous", "addressing"),
)
_REDIS = _Scheme("redis", "redis://:password@host:6379/0", secure=False, options=("prefix",))
_REDIS_TLS = _Scheme("redis", "rediss://:password@host:6379/0", options=("prefix",))
_SCHEMES = {
    "s3": _S3,
    "gs": _Scheme("gcs", "gs://bucket/kernels", options=("endpoint", "anonymous")),
    "azblob": _Scheme(
        "azblob", "azblob://container/kernels?account=name", options=("endpoint", "account")
    ),
    "redis": _REDIS,
    "valkey": _REDIS,
    "rediss": _REDIS_TLS,
    "valkeys": _REDIS_TLS,
    "http": _Scheme("http", "http://host/kernels", secure=False),
    "https": _Scheme("http", "https://host/kernels"),
    "dav": _Scheme("webdav", "dav://host/kernels", secure=False),
    "davs": _Scheme("webdav", "davs://user:password@host/kernels"),
    "file": _Scheme("file", "file:///mnt/shared/kernels"),
}
#: Other names of a scheme that people may try.
_ALIASES = {"gcs": "gs", "azure": "azblob", "az": "azblob", "webdav": "dav", "webdavs": "davs"}


def parse_remotes(variable: str, text: str) -> tuple[Remote, ...]:
    """Parse URLs with spaces between them. An invalid one is a `ConfigError`."""
    try:
        return tuple(parse_remote(url) for url in text.split())
    except InputError as invalid:
        error = ConfigError(variable, shown_url(text), f"the URL of a shared store: {invalid}")
        error.hint = invalid.hint
        raise error from None


def parse_remote(text: str) -> Remote:
    """Parse one URL. An invalid one is an `InputError`, whose message never contains a password."""
    scheme = _scheme_of(text)
    rules = _SCHEMES[scheme]

    def refuse(why: str) -> NoReturn:
        raise InputError(f"{scheme}://…: {why}", hint=f"for example {rules.example}")

    parts, port = _split(text, refuse)
    options = _options(parts.query, rules, refuse)
    host, path = parts.hostname or "", unquote(parts.path)
    if rules.service in ("s3", "gcs", "azblob", "file"):  # The case of a bucket matters.
        host = parts.netloc.rpartition("@")[2]
    _check_place(rules.service, host, port, path, refuse)
    where = "".join((f"{scheme}://", parts.netloc.rpartition("@")[2], parts.path.rstrip("/")))
    shown = "&".join(f"{name}={value}" for name, value in options)
    return Remote(
        service=rules.service,
        name=f"{where}?{shown}" if shown else where,
        host=host,
        port=port,
        path=path if rules.service == "file" else path.strip("/"),
        secure=rules.secure,
        user=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        options=options,
    )


def require_writable_kind(remote: Remote) -> None:
    """Raise `InputError` for a store that nobody can write, such as a web server."""
    if remote.read_only:
        raise InputError(
            f"{remote.name} is read-only: preheat does not write to a web server",
            hint="use a URL that can be written, such as dav://, s3:// or file://",
        )


def name_of(text: str) -> str:
    """Return a URL without credentials, for messages. Of an invalid one, only the scheme is left."""
    try:
        return parse_remote(text).name
    except InputError:
        return shown_url(text)


def _scheme_of(text: str) -> str:
    scheme, separator, _ = text.partition("://")
    if separator and scheme.lower() in _SCHEMES:
        return scheme.lower()
    known = ", ".join(f"{name}://" for name in _SCHEMES)
    if not separator or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+]{0,11}", scheme):
        raise InputError(
            f"the URL does not start with one of {known}", hint=f"for example {_S3.example}"
        )
    close = _ALIASES.get(scheme.lower())
    hint = f"did you mean {close}://?" if close else did_you_mean(scheme, _SCHEMES)
    raise InputError(
        f"{scheme}:// is not supported; use one of {known}", hint=hint or f"for example {_S3.example}"
    )


def _split(text: str, refuse: Callable[[str], NoReturn]) -> tuple[SplitResult, int | None]:
    """Split a URL. What is outside the credentials must not contain a part of them."""
    if not text.isascii() or not text.isprintable() or " " in text:
        refuse("it has a space or a character outside ASCII; escape it, for example a space as %20")
    address, _, query = text.partition("?")
    if address.count("://") > 1 or query.count("://") > query.count("endpoint="):
        refuse("it has :// twice; separate several URLs by spaces")
    parts, port, valid = None, None, False
    with suppress(ValueError):  # Its message may have a part of the password.
        parts = urlsplit(text)
        port = parts.port
        valid = True
    if parts is None or not valid:
        refuse("its host or port is invalid; write / ? # @ : in a password as %2F %3F %23 %40 %3A")
    # An unescaped / or ? in a password ends the address there, and the rest has the @.
    if "@" in parts.path + parts.query or parts.fragment or "#" in text:
        refuse("it has an @ or # after the address; write / ? # @ in a password as %2F %3F %23 %40")
    return parts, port


def _options(
    query: str, rules: _Scheme, refuse: Callable[[str], NoReturn]
) -> tuple[tuple[str, str], ...]:
    found = parse_qsl(query, keep_blank_values=True)
    for name, value in found:
        if name not in rules.options:
            known = f"one of {', '.join(rules.options)}" if rules.options else "none"
            refuse(f"it has an option that is unknown; the options of this service are: {known}")
        if not value or not value.isascii() or not value.isprintable():
            refuse(f"its option {name} has no value, or a character outside ASCII")
    if len({name for name, _ in found}) < len(found):
        refuse("it has an option twice")
    _check_values(dict(found), refuse)
    return tuple(sorted(found))


def _check_values(options: dict[str, str], refuse: Callable[[str], NoReturn]) -> None:
    endpoint = options.get("endpoint")
    if endpoint is not None and not re.fullmatch(r"https?://[^@?#\s/]+(/[^@?#\s]*)?", endpoint):
        refuse("its endpoint is not a URL such as https://s3.example.com, without credentials")
    if options.get("anonymous", "1") not in ("0", "1"):
        refuse("its option anonymous is neither 0 nor 1")
    if options.get("addressing", "path") not in ("path", "virtual"):
        refuse("its option addressing is neither path nor virtual")


def _check_place(
    service: str, host: str, port: int | None, path: str, refuse: Callable[[str], NoReturn]
) -> None:
    if service == "file":
        if host or not path.startswith("/"):
            refuse("it must be the absolute path of a directory, after three slashes")
    elif not host:
        refuse("it names no bucket, container or host")
    if service in ("s3", "gcs", "azblob") and (port is not None or not re.fullmatch(r"[\w.-]+", host)):
        refuse(
            "a bucket name has only letters, digits, dots and dashes; give the address of a server as "
            "endpoint="
        )
    if service == "redis" and not re.fullmatch(r"/?|/\d{1,6}", path):
        refuse("the path must be the number of a database")
    if any(part in ("..", ".") for part in path.split("/")) or not path.isprintable():
        refuse("its path has . or .. or an unprintable character in it")


# Names of objects


def entry_name(digest: str) -> str:
    """Return the name of the object that has the entry of `digest`."""
    return f"{ROOT}{digest[:2]}/{digest}"


def digest_of(name: str) -> str | None:
    """Return the digest of the entry in the object `name`; None for an object that is not an entry."""
    match = _ENTRY.fullmatch(name)
    return None if match is None else match[2]
