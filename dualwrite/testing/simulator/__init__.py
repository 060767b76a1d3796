"""A simulated Kafka broker, pure and deterministic: the rules of transactions without a server.

`broker.handle` maps a broker and a request (`requests`) to the next broker and the answer, `environment` holds all
other events of a broker, `state` makes one; `coordinator` and `partition` hold the rules. It does not replace real
servers in your tests: models and searches of a protocol run on it.
"""
