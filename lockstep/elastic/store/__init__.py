"""The small store at which workers meet: keys and values behind a port, for those who know the run's secret.

`session` is the protocol on a connection, without any socket; `values` what is kept; `server` and `stores` the two
sides. torch's own TCPStore tells everything to everyone who connects, and its connections have no limit of time.
"""

from lockstep.elastic.store.server import StoreServer
from lockstep.elastic.store.session import Secret
from lockstep.elastic.store.stores import LocalStore, NotOfThisRun, RemoteStore

__all__ = ["LocalStore", "NotOfThisRun", "RemoteStore", "Secret", "StoreServer"]
