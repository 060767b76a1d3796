"""Kafka adapters: the transactional producer (confluent-kafka) and coordinator access (kafka-python)."""

import warnings

with warnings.catch_warnings():
    # kafka-python reads its schemas by a function that Python 3.11 and 3.12 call deprecated, while it is imported. That is no
    # matter of the users', whose tests may take warnings for errors. What is imported below is not read again.
    warnings.filterwarnings("ignore", r"(read|open)_text is deprecated", DeprecationWarning)
    import kafka.net.manager
    import kafka.protocol.admin.configs
    import kafka.protocol.admin.transactions
    import kafka.protocol.consumer.fetch
    import kafka.protocol.consumer.offsets
    import kafka.protocol.metadata
    import kafka.protocol.producer.transaction  # noqa: F401 - for the warnings' sake, as all of them
