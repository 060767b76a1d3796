"""Kafka adapters: connections, the transactional producer (librdkafka or the native engine), and access to coordinators.

What belongs here: code that talks to brokers, and the configuration of every client. May use: the interfaces and the protocol.
"""

import warnings

with warnings.catch_warnings():
    # On import, kafka-python reads its schemas with a function that Python 3.11 and 3.12 deprecate. Users' tests may
    # turn warnings into errors, so import every module that warns here, with the warning silenced.
    warnings.filterwarnings("ignore", r"(read|open)_text is deprecated", DeprecationWarning)
    import kafka.net.sasl
    import kafka.protocol.admin.configs
    import kafka.protocol.admin.transactions
    import kafka.protocol.consumer.fetch
    import kafka.protocol.consumer.offsets
    import kafka.protocol.metadata
    import kafka.protocol.producer.transaction  # noqa: F401 - imported to silence their warnings
