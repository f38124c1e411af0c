"""The packet filter of a home's router, as lines of `iptables-save`. The rules contain no address that may change."""

from __future__ import annotations

from tests.homes.home import PORT, Home

KNOWN = "-m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT"


def rules_ipv4(home: Home, first_machine: str) -> list[str]:
    """Rules for NAT at the outer interface `wan` and for inbound traffic that is allowed."""
    return [
        "*nat",
        *_forwarded_port(home, first_machine),
        f"-A POSTROUTING -s {home.private_network} -o wan -j MASQUERADE"
        + (" --random-fully" if home.kind == "symmetric" else ""),
        "COMMIT",
        "*filter",
        f"-A INPUT -i wan {KNOWN}",
        # A server refuses connections to closed ports. A home router drops them, so simultaneous opens can succeed.
        f"-A INPUT -i wan -j {'ACCEPT' if home.kind == 'published' else 'DROP'}",
        "-A FORWARD -i wan -m conntrack --ctstate ESTABLISHED,RELATED,DNAT -j ACCEPT",
        "-A FORWARD -i wan -j DROP",
        "COMMIT",
    ]


def _forwarded_port(home: Home, machine: str) -> list[str]:
    """Rules that forward a port as Docker does: one chain for all addresses of the host, and masquerading for hairpins.

    Docker uses a proxy process on the host for hairpins by default. In both cases the machine sees the address of the
    bridge as the source.
    """
    if home.kind not in ("published", "forwarded"):
        return []
    local, network = "-m addrtype --dst-type LOCAL", home.private_network
    only = "" if home.hairpin else "-i wan "
    # A home router does not forward packets to its inner address. Docker publishes on all addresses of the host.
    outer = "" if home.kind == "published" else f"! -d {network} "
    to = f"--dport {PORT} -j DNAT --to-destination {machine}:{PORT}"
    return [
        ":FORWARDED - [0:0]",
        f"-A PREROUTING {only}{outer}{local} -j FORWARDED",
        f"-A OUTPUT ! -d 127.0.0.0/8 {local} -j FORWARDED",
        f"-A FORWARDED -p tcp {to}",
        f"-A FORWARDED -p udp {to}",
        f"-A POSTROUTING -s {network} -d {machine} -o {home.bridge} -j MASQUERADE",
    ]


def rules_ipv6(home: Home, first_machine: str) -> list[str]:
    """Rules for a firewall without NAT. The lower half of `first_machine` stays the same when the prefix changes."""
    # The rule compares only the lower half of the address, because the provider's prefix may change.
    machine = f"-d ::{first_machine.rsplit('::', 1)[1]}/::ffff:ffff:ffff:ffff"
    opened = [f"-A FORWARD -i wan {machine} -p {p} --dport {PORT} -j ACCEPT" for p in ("tcp", "udp")]
    return [
        "*filter",
        f"-A INPUT -i wan {KNOWN}",
        "-A INPUT -i wan -p ipv6-icmp -j ACCEPT",
        f"-A INPUT -i wan -j {'ACCEPT' if home.kind == 'published' else 'DROP'}",
        f"-A FORWARD -i wan {KNOWN}",
        *(opened if home.inbound_ipv6 else []),
        "-A FORWARD -i wan -j DROP",
        "COMMIT",
    ]
