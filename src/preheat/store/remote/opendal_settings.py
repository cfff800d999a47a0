"""The settings of opendal for a shared store, from its URL and the environment."""

from __future__ import annotations

from preheat.config import environ
from preheat.store.remote.url import Remote

__all__ = ["settings_of"]


def settings_of(remote: Remote) -> tuple[str, dict[str, str]]:
    """Return the service of opendal and its settings.

    Credentials that the URL does not have come from the usual variables and files of the service, such
    as `AWS_ACCESS_KEY_ID` and `~/.aws`: opendal reads them itself.
    """
    settings = {
        "s3": _s3,
        "gcs": _gcs,
        "azblob": _azblob,
        "http": _web,
        "webdav": _web,
    }[remote.service](remote)
    given = {name: value for name, value in settings.items() if value}
    return remote.service, {"root": f"/{remote.path}", **given}


def _s3(remote: Remote) -> dict[str, str | None]:
    env = environ()
    endpoint = remote.option("endpoint")
    region = remote.option("region") or env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION")
    return {
        "bucket": remote.host,
        "endpoint": endpoint,
        # Servers other than Amazon's seldom have regions, and every request names one.
        "region": region or ("us-east-1" if endpoint else None),
        "access_key_id": remote.user,
        "secret_access_key": remote.password,
        "disable_ec2_metadata": _switch(remote.user is not None),
        "skip_signature": _switch(remote.option("anonymous") == "1"),
        "enable_virtual_host_style": _switch(remote.option("addressing") == "virtual"),
    }


def _gcs(remote: Remote) -> dict[str, str | None]:
    return {
        "bucket": remote.host,
        "endpoint": remote.option("endpoint"),
        "skip_signature": _switch(remote.option("anonymous") == "1"),
    }


def _azblob(remote: Remote) -> dict[str, str | None]:
    env = environ()
    account = remote.option("account") or remote.user or env.get("AZURE_STORAGE_ACCOUNT")
    return {
        "container": remote.host,
        "endpoint": remote.option("endpoint")
        or (f"https://{account}.blob.core.windows.net" if account else None),
        "account_name": account,
        "account_key": remote.password or env.get("AZURE_STORAGE_KEY"),
        "sas_token": env.get("AZURE_STORAGE_SAS_TOKEN"),
    }


def _web(remote: Remote) -> dict[str, str | None]:
    scheme, host = "https" if remote.secure else "http", remote.host
    host = f"[{host}]" if ":" in host else host
    return {
        "endpoint": f"{scheme}://{host}" + (f":{remote.port}" if remote.port else ""),
        "username": remote.user,
        "password": remote.password,
    }


def _switch(on: bool) -> str | None:
    return "true" if on else None
