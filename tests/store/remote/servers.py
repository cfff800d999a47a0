"""Real servers for tests: Redis, S3 (SeaweedFS) and WebDAV (nginx).

`tests/store/remote/conftest.py` makes fixtures of them. Each server listens on free ports of 127.0.0.1
and ends with the process that started it.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from preheat.store.remote.engine import RemoteError, open_engine
from preheat.store.remote.url import parse_remote
from tests.processes import TIMEOUT_SECONDS, wait_for

__all__ = [
    "ESCAPED_PASSWORD",
    "PASSWORD",
    "Server",
    "certificate",
    "free_ports",
    "redis_server",
    "s3_server",
    "webdav_server",
]

PASSWORD = "open-sesame/1"
ESCAPED_PASSWORD = "open-sesame%2F1"
BUCKET = "kernels"
_MODULES = Path("/usr/lib/nginx/modules/ngx_http_dav_ext_module.so")


@dataclass(frozen=True)
class Server:
    """A running server, whose stores are called by a name each."""

    port: int
    _url: Callable[[int, str], str]
    process: subprocess.Popen[bytes]
    folder: Path

    def url(self, store: str, *, port: int | None = None) -> str:
        """Return the URL of a store, where wanted with the port of a proxy."""
        return self._url(port or self.port, store)


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on. All are reserved together, so that they differ."""
    with ExitStack() as reserved:
        sockets = [reserved.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate for 127.0.0.1, signed by itself, and return its file and that of its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "certificate.pem").write_bytes(made.public_bytes(pem))
    (folder / "key.pem").write_bytes(secret)
    return folder / "certificate.pem", folder / "key.pem"


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[Server]:
    """Run Redis with a password and without files."""
    program = _program("redis-server")
    (port,) = free_ports(1)
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    command += ["--dir", str(folder), "--requirepass", PASSWORD, *options]
    with _running(command, port, folder) as process:
        yield Server(port, _redis_url, process, folder)


def _redis_url(port: int, store: str) -> str:
    return f"redis://:{ESCAPED_PASSWORD}@127.0.0.1:{port}/0?prefix={store}"


@contextmanager
def s3_server(folder: Path) -> Iterator[Server]:
    """Run SeaweedFS with one bucket."""
    program = _program("weed")
    names = ("s3", "master", "filer", "volume")
    ports = free_ports(2 * len(names))
    administration = _administration_port()
    command = [program, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += ["-master.telemetry=false", "-admin.ui=false", "-webdav=false", f"-bucket={BUCKET}"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", f"-admin.port={administration}"]
    command += [f"-{name}.port={port}" for name, port in zip(names, ports[::2], strict=True)]
    command += [f"-{name}.port.grpc={port}" for name, port in zip(names, ports[1::2], strict=True)]
    keys = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": PASSWORD}
    with _running(command, ports[0], folder, env=keys) as process:
        server = Server(ports[0], _s3_url, process, folder)
        _wait_until_written(server)
        yield server


def _administration_port() -> int:
    """Return a free port P for which P + 10000 is free: parts of SeaweedFS expect another one there."""
    while True:
        (higher,) = free_ports(1)
        with suppress(OSError), socket.socket() as lower:
            lower.bind(("127.0.0.1", higher - 10_000))
            return higher - 10_000


def _s3_url(port: int, store: str) -> str:
    place = f"s3://tester:{ESCAPED_PASSWORD}@{BUCKET}/{store}"
    return f"{place}?endpoint=http://127.0.0.1:{port}&region=us-east-1"


@contextmanager
def webdav_server(folder: Path) -> Iterator[Server]:
    """Run nginx with WebDAV and a password. Its files are plain HTTP, too, under `/plain`.

    Under `/undeletable`, files are read and written, and not deleted. Under `/readable`, they are
    only read.
    """
    program = _program("nginx", "/usr/sbin")
    if not _MODULES.exists():
        pytest.skip("nginx has no module dav-ext; Debian has it in libnginx-mod-http-dav-ext")
    (port,) = free_ports(1)
    for name in ("stores", "bodies"):
        (folder / name).mkdir()
    folder.chmod(0o755)
    (folder / "nginx.conf").write_text(_NGINX.format(folder=folder, port=port, modules=_MODULES))
    (folder / "users").write_text(f"tester:{{PLAIN}}{PASSWORD}\n")

    command = [program, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]
    with _running(command, port, folder) as process:
        yield Server(port, _webdav_url, process, folder)


def _webdav_url(port: int, store: str) -> str:
    return f"dav://tester:{ESCAPED_PASSWORD}@127.0.0.1:{port}/stores/{store}"


_NGINX = """
load_module {modules};
daemon off;
master_process off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {folder}/bodies;
    proxy_temp_path {folder}/bodies/proxy;
    fastcgi_temp_path {folder}/bodies/fastcgi;
    uwsgi_temp_path {folder}/bodies/uwsgi;
    scgi_temp_path {folder}/bodies/scgi;
    client_max_body_size 8m;
    server {{
        listen 127.0.0.1:{port};
        root {folder};
        location /stores {{
            auth_basic stores;
            auth_basic_user_file {folder}/users;
            dav_methods PUT DELETE MKCOL COPY MOVE;
            dav_ext_methods PROPFIND OPTIONS;
            create_full_put_path on;
        }}
        location /undeletable {{
            root {folder}/stores;
            auth_basic stores;
            auth_basic_user_file {folder}/users;
            dav_methods PUT MKCOL;
            dav_ext_methods PROPFIND OPTIONS;
            create_full_put_path on;
        }}
        location /readable {{
            root {folder}/stores;
            auth_basic stores;
            auth_basic_user_file {folder}/users;
            dav_ext_methods PROPFIND OPTIONS;
        }}
        location /plain/ {{ alias {folder}/stores/; }}
    }}
}}
"""


def _wait_until_written(server: Server) -> None:
    """Wait until the server stores objects: it listens a moment earlier."""
    engine = open_engine(parse_remote(server.url("first")), timeout=10)

    def written() -> bool:
        with suppress(RemoteError):
            engine.put("first", b"")
            engine.remove("first")
            return True
        return False

    wait_for(written)


def _program(name: str, *places: str) -> str:
    """Return the path of a program; skip the test where it is missing."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", ""), *places])
    found = shutil.which(name, path=path)
    if found is None:
        pytest.skip(f"the program {name} is not installed")
    return found


@contextmanager
def _running(
    command: list[str], port: int, folder: Path, *, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the block ends. It has started when its port accepts connections."""
    log = folder.parent / f"{folder.name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _DIES_WITH_PARENT, *command],
            cwd=folder,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_for(lambda: _listens(port), process, log)
        yield process
    finally:
        process.kill()
        process.wait()


#: Starts a program that the kernel kills when the process that started it ends, even if it is killed.
_DIES_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.execv(sys.argv[1], sys.argv[1:])
"""


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
        return True
    return False


def _wait_for(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"{process.args!r} did not start:\n{log.read_text()[-4000:]}")
        time.sleep(0.02)
