"""Addresses: names of this machine, and what clients are told to ask."""

from __future__ import annotations

import socket

import pytest

from specrun.bindings.errors import OptionError
from specrun.cli.serve.settings import bound_socket, host_name, is_loopback, url_of


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("localhost:8080", "localhost"),
        ("LOCALHOST", "localhost"),
        ("[::1]:80", "::1"),
        ("http://127.0.0.1:5", "127.0.0.1"),
        ("user@127.0.0.1", "user@127.0.0.1"),
        ("", ""),
    ],
)
def test_hosts_are_read_without_their_ports(value: str, name: str) -> None:
    assert host_name(value) == name


def test_loopback_is_this_machine_alone() -> None:
    assert all(map(is_loopback, ("localhost", "a.localhost", "127.0.0.1", "127.9.9.9", "::1")))
    others = ("", "0.0.0.0", "::", "192.168.0.1", "localhost.example", "user@127.0.0.1", "127.1")
    assert not any(map(is_loopback, others))


@pytest.mark.parametrize(
    ("host", "wanted"),
    [("127.0.0.1", "http://127.0.0.1:"), ("0.0.0.0", "http://127.0.0.1:")],
)
def test_clients_of_this_machine_are_told_an_address_that_answers(host: str, wanted: str) -> None:
    with bound_socket(host, 0) as listener:
        port = listener.getsockname()[1]
        assert url_of(host, listener) == f"{wanted}{port}"


def test_addresses_of_the_sixth_version_stand_in_brackets() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        with bound_socket("::1", 0) as listener:
            assert url_of("::1", listener) == f"http://[::1]:{listener.getsockname()[1]}"
    except OptionError:
        pytest.skip("no IPv6 here")
