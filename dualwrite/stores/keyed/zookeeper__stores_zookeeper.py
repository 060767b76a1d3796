"""ZooKeeper as the database: entries as znodes, and the decision in one ``multi``, through kazoo.

What belongs here: paths, requests, the user's operations. May use: ``stores.keyed``, kazoo.
"""

from dualwrite.errors import ConfigurationError

try:
    import kazoo as _kazoo  # noqa: F401 - it comes with an extra
except ImportError as missing:
    raise ConfigurationError("ZooKeeper needs kazoo", next_step="pip install 'dualwrite[zookeeper]'") from missing
