"""The permissions of a writer on each kind of shared store, for the hints of `preheat doctor`."""

from __future__ import annotations

from typing import NamedTuple

from preheat.store.remote.url import Remote

__all__ = ["Permissions", "permissions_of"]

_LEASES = "without deletes, hosts cannot release leases, so that each host compiles for itself"
_NOT_NEEDED = "entries are stored without deletes, and only the object of this check stays"
_CONTRIBUTOR = "assign the role Storage Blob Data Contributor"


class Permissions(NamedTuple):
    """What permits each operation, as the words after "to permit it,".

    `without_delete` says what does not work where objects cannot be deleted. `condition` is empty where
    conditional writes need no permission of their own.
    """

    write: str
    delete: str
    without_delete: str
    condition: str = ""


_PERMISSIONS = {
    "s3": Permissions(
        "allow s3:PutObject in the policy of the user or of the bucket",
        "allow s3:DeleteObject in the policy of the user or of the bucket",
        _LEASES,
    ),
    "gcs": Permissions(
        "grant storage.objects.create and storage.objects.delete, for example by the role "
        "roles/storage.objectUser",
        "grant storage.objects.delete, for example by the role roles/storage.objectUser",
        "without deletes, Google Cloud Storage replaces no object, so that lists of header states stay "
        "as they are",
    ),
    "azblob": Permissions(
        f"{_CONTRIBUTOR}, or use a SAS token with the permissions c and w",
        f"{_CONTRIBUTOR}, or use a SAS token with the permission d",
        _NOT_NEEDED,
    ),
    "webdav": Permissions(
        "let the server accept PUT and MKCOL from this user (nginx: dav_methods)",
        "let the server accept DELETE from this user (nginx: dav_methods)",
        _NOT_NEEDED,
    ),
    "redis": Permissions(
        "let the user run SET on the keys of the store (ACL SETUSER NAME +set)",
        "let the user run DEL on the keys of the store (ACL SETUSER NAME +del)",
        _LEASES,
        "let the user run EVAL (ACL SETUSER NAME +eval)",
    ),
    "file": Permissions(
        "let this user write to the directory and its folders",
        "let this user remove files from the directory and its folders",
        _LEASES,
        "let this user link and rename files in the directory and its folders",
    ),
}


def permissions_of(remote: Remote) -> Permissions | None:
    """Return the permissions for `remote`; None for a kind that nobody can write."""
    return _PERMISSIONS.get(remote.service)
