"""URLs of shared stores: what is read from them, what is refused, and no password is ever shown."""

from __future__ import annotations

import traceback
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.errors import ConfigError, InputError
from preheat.store.remote.url import Remote, parse_remote, parse_remotes


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (
            "s3://bucket/kernels/ci?endpoint=http://127.0.0.1:8333&region=eu-west-1",
            Remote(
                service="s3",
                name="s3://bucket/kernels/ci?endpoint=http://127.0.0.1:8333&region=eu-west-1",
                host="bucket",
                path="kernels/ci",
                options=(("endpoint", "http://127.0.0.1:8333"), ("region", "eu-west-1")),
            ),
        ),
        (
            "s3://key:se%2Fcret@My-Bucket",
            Remote(
                service="s3", name="s3://My-Bucket", host="My-Bucket", user="key", password="se/cret"
            ),
        ),
        ("gs://bucket/a/", Remote(service="gcs", name="gs://bucket/a", host="bucket", path="a")),
        (
            "azblob://container?account=me",
            Remote(
                service="azblob",
                name="azblob://container?account=me",
                host="container",
                options=(("account", "me"),),
            ),
        ),
        (
            "redis://:p%40ss@cache:6380/2",
            Remote(
                service="redis",
                name="redis://cache:6380/2",
                host="cache",
                port=6380,
                path="2",
                secure=False,
                password="p@ss",
            ),
        ),
        ("valkeys://cache", Remote(service="redis", name="valkeys://cache", host="cache")),
        (
            "http://[::1]:80/x",
            Remote(
                service="http", name="http://[::1]:80/x", host="::1", port=80, path="x", secure=False
            ),
        ),
        (
            "davs://u:p@host/k",
            Remote(
                service="webdav", name="davs://host/k", host="host", path="k", user="u", password="p"
            ),
        ),
        (
            "file:///mnt/shared%20disk",
            Remote(service="file", name="file:///mnt/shared%20disk", host="", path="/mnt/shared disk"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_url_is_read(url: str, expected: Remote) -> None:
    remote = parse_remote(url)
    assert remote == expected
    assert remote.network == (remote.service != "file")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("bucket/kernels", "does not start with one of s3://"),
        ("ssh://host/x", "ssh:// is not supported"),
        ("s3:///kernels", "names no bucket"),
        ("s3://bucket:9000/x", "give the address of a server as endpoint="),
        ("s3://bucket?endpoint=localhost:9000", "endpoint is not a URL"),
        ("s3://bucket?endpoint=http://u:p@host", "@"),
        ("s3://bucket?anonymous=maybe", "neither 0 nor 1"),
        ("s3://bucket?addressing=both", "neither path nor virtual"),
        ("s3://bucket?zone=1", "one of endpoint, region, anonymous, addressing"),
        ("s3://bucket?region=a&region=b", "an option twice"),
        ("s3://bucket?region=", "has no value"),
        ("s3://bucket/../other", ". or .."),
        ("redis://host:port/0", "host or port is invalid"),
        ("redis://host:99999/0", "host or port is invalid"),
        ("s3://bucket/a,s3://other/b", "separate several URLs by spaces"),
        ("s3://bucket?endpoint=http://host:1,s3://other", "separate several URLs by spaces"),
        ("redis://host/0;redis://other/0", "separate several URLs by spaces"),
        ("redis://host/kernels", "the number of a database"),
        ("http://host/x?y=z", "are: none"),
        ("dav://host/x#y", "@ or # after the address"),
        ("file://kernels", "absolute path"),
        ("file:///mnt/a b", "a space"),
        ("http://hôst/", "outside ASCII"),
    ],
)
def test_an_invalid_url_is_refused_with_the_reason_and_an_example(url: str, why: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_remote(url)
    assert why in str(refused.value)
    assert "for example" in str(refused.value.hint)


@pytest.mark.parametrize(("wrong", "right"), [("webdav", "dav"), ("gcs", "gs"), ("reddis", "redis")])
def test_another_name_of_a_scheme_leads_to_the_right_one(wrong: str, right: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_remote(f"{wrong}://host/x")
    assert right in str(refused.value.hint)


def test_a_variable_has_several_urls_and_is_named_in_errors() -> None:
    assert [r.service for r in parse_remotes("PREHEAT_REMOTE", " redis://a  s3://b ")] == [
        "redis",
        "s3",
    ]
    with pytest.raises(
        ConfigError, match=r"PREHEAT_REMOTE='s3://…' is not .*names no bucket"
    ) as refused:
        parse_remotes("PREHEAT_REMOTE", "s3://")
    assert refused.value.hint is not None


#: Letters that nothing else of the URLs below has, so that a part of a password is found in a text.
SECRET_LETTERS = "XYZQ"
PASSWORDS = st.text(f"{SECRET_LETTERS}/?#@:%&=[]1 \t\\é", min_size=1, max_size=12)
SCHEMES = st.sampled_from(["s3", "gs", "azblob", "redis", "rediss", "http", "davs", "file", "ftp", ""])
RESTS = st.sampled_from(["bucket/kernels", "host:1/0", "host", "bucket?region=here", "", "host:no/x"])


@given(SCHEMES, PASSWORDS, RESTS, st.sampled_from(["user", ""]), st.booleans())
def test_no_part_of_a_password_is_ever_shown(
    scheme: str, password: str, rest: str, user: str, escaped: bool
) -> None:
    """The password may be escaped as it should be, or not."""
    written = quote(password, safe="") if escaped else password
    url = f"{scheme}://{user}:{written}@{rest}"
    try:
        remotes = parse_remotes("PREHEAT_REMOTE", url)
    except ConfigError as refused:
        shown = f"{refused} {refused.hint} {refused.value} {refused!r} {refused.__dict__}"
        shown += "".join(traceback.format_exception(refused, chain=True))
    else:
        shown = "".join(f"{remote.name} {remote!r} {remote}" for remote in remotes)
        assert not escaped or remotes[0].password == password
    assert not set(shown) & set(SECRET_LETTERS)
