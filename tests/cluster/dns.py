"""Minimal cluster DNS: addresses of services, headless services and pods of stateful sets."""

from collections.abc import Iterator
from contextlib import contextmanager

from dnslib import QTYPE, RCODE, RR, A, DNSRecord
from dnslib.server import BaseResolver, DNSLogger, DNSServer
from kubernetes.client import ApiException, CoreV1Api

_SUFFIX = ["svc", "cluster", "local"]


class _Resolver(BaseResolver):
    def __init__(self, core: CoreV1Api) -> None:
        self._core = core

    def resolve(self, request: DNSRecord, handler: object) -> DNSRecord:
        reply = request.reply()
        labels = str(request.q.qname).rstrip(".").split(".")
        addresses = self._addresses(labels[:-3]) if labels[-3:] == _SUFFIX else []
        if not addresses:
            reply.header.rcode = RCODE.NXDOMAIN
        elif request.q.qtype == QTYPE.A:
            for address in addresses:
                reply.add_answer(RR(request.q.qname, QTYPE.A, rdata=A(address), ttl=1))
        return reply

    def _addresses(self, labels: list[str]) -> list[str]:
        try:
            if len(labels) == 2:
                service = self._core.read_namespaced_service(*labels)
                if service.spec.cluster_ip != "None":
                    return [service.spec.cluster_ip]
            if len(labels) in (2, 3):
                return self._endpoints(labels)
        except ApiException:
            pass
        return []

    def _endpoints(self, labels: list[str]) -> list[str]:
        """Returns addresses of a headless service's ready pods, or of one pod by host name, ready or not."""
        name, namespace = labels[-2:]
        subsets = self._core.read_namespaced_endpoints(name, namespace).subsets or []
        if len(labels) == 2:
            return [address.ip for subset in subsets for address in subset.addresses or []]
        return [
            address.ip
            for subset in subsets
            for address in [*(subset.addresses or []), *(subset.not_ready_addresses or [])]
            if address.hostname == labels[0]
        ]


@contextmanager
def serve_dns(core: CoreV1Api, address: str) -> Iterator[None]:
    """Answers DNS queries on port 53 until the block ends."""
    servers = [
        DNSServer(_Resolver(core), address=address, port=53, tcp=tcp, logger=DNSLogger("error"))
        for tcp in (False, True)
    ]
    for server in servers:
        server.start_thread()
    try:
        yield
    finally:
        for server in servers:
            server.stop()
