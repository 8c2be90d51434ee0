"""What every test runs under: one thread per process, no network, repeatable examples.

In:  HYPOTHESIS_PROFILE (ci, the default: 100 derandomised examples; deep: 2,000 random ones).
Out: a process where torch uses one thread, no library looks for a hub, and a connection to
     anything but this machine raises at once, so that a test that needs a network cannot pass.
Not here: data, models and builders; each test folder has its own.
"""

from __future__ import annotations

import os

# Before torch is imported: two OpenMP pools that spin on two cores slow each other by up to 150 x.
os.environ.update(
    OMP_NUM_THREADS="1",
    OMP_WAIT_POLICY="PASSIVE",
    MKL_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
)

import ipaddress
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci",
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("deep", max_examples=2000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def is_this_machine(host: object) -> bool:
    """Whether a host, as given to the socket module, can only mean this machine."""
    if host is None:
        return True
    name = host.decode() if isinstance(host, bytes) else str(host)
    if name in ("", "localhost"):
        return True
    try:
        address = ipaddress.ip_address(name.split("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def refuse_outside(host: object) -> None:
    """Raise if a test is about to talk to another machine."""
    if not is_this_machine(host):
        raise RuntimeError(f"a test tried to reach {host!r}; tests may only talk to this machine")


def guarded(name: str) -> Callable[..., Any]:
    """A method of socket.socket that looks at the address, always its last argument, first."""
    original = getattr(socket.socket, name)

    def method(self: socket.socket, *args: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            refuse_outside(args[-1][0])
        return original(self, *args)

    return method


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """Sockets of this process reach loopback and unix addresses only; names are not looked up."""
    look_up = socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_outside(host)
        return look_up(host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex", "sendto"):
            patch.setattr(socket.socket, name, guarded(name))
        patch.setattr(socket, "getaddrinfo", getaddrinfo)
        yield


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Coroutine tests (@pytest.mark.anyio) run on asyncio, which is what uvicorn runs on."""
    return "asyncio"
