"""Names and interfaces: what stops workers from finding each other.

# Note [Whose name]
# On one host lockstep's workers meet on the loopback interface and ask nobody for a name. On several hosts, and in
# process groups that a script opens by itself, Gloo listens on the address that the host's own name resolves to,
# unless GLOO_SOCKET_IFNAME says on which interface.
"""

from ipaddress import ip_address

from lockstep.programs.doctor.facts import Facts
from lockstep.programs.doctor.finding import Finding, not_known, ok, problem, warning

SLOW_S = 0.5
NAME = "host name"
GLOO = "gloo interface"


def loopback(facts: Facts) -> Finding:
    if facts.network.loopback_works is None:
        return not_known("loopback", "whether the loopback interface works")
    if not facts.network.loopback_works:
        return problem(
            "loopback",
            "the loopback interface (127.0.0.1) does not work, over which workers of one host find each other",
            "ip link set lo up",
        )
    return ok("loopback", "127.0.0.1 answers")


def host_name(facts: Facts) -> Finding:
    """See Note [Whose name]."""
    host = facts.host_name
    in_hosts = f"echo '<address of this host> {host.name}' >> /etc/hosts"
    if host.took_s is None:
        sentence = f"the host's name, {host.name}, is not resolved within {host.waited_s:g} s: Gloo would wait as long"
        return warning(NAME, sentence, in_hosts)
    if not host.addresses:
        sentence = f"the host's name, {host.name}, does not resolve: Gloo fails on several hosts"
        return warning(NAME, sentence, in_hosts)
    if host.took_s > SLOW_S:
        sentence = f"resolving the host's name, {host.name}, takes {host.took_s:.1f} s, at every start"
        return warning(NAME, sentence, in_hosts)
    if all(map(_is_loopback, host.addresses)) and not facts.network.gloo_interfaces:
        return ok(
            NAME,
            f"{host.name} is {', '.join(host.addresses)}: right for one host; on several, set GLOO_SOCKET_IFNAME "
            "to the interface that joins them",
        )
    return ok(NAME, f"{host.name} is {', '.join(host.addresses)}")


def gloo_interfaces(facts: Facts) -> Finding:
    named, there = facts.network.gloo_interfaces, facts.network.interfaces
    if not named:
        return ok(GLOO, "GLOO_SOCKET_IFNAME is not set")
    if there is None:
        return not_known(GLOO, f"whether GLOO_SOCKET_IFNAME={','.join(named)} names an interface")
    missing = [name for name in named if name not in there]
    if missing:
        return problem(
            GLOO,
            f"GLOO_SOCKET_IFNAME names {', '.join(missing)}, and this host has {', '.join(there)}",
            "unset GLOO_SOCKET_IFNAME, or export it with one of those",
        )
    return ok(GLOO, f"GLOO_SOCKET_IFNAME={','.join(named)} exists")


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
