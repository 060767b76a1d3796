"""A simulated Kafka broker, pure and deterministic: the rules of transactions without a server.

`broker.handle` takes a request (`requests`) to the next broker and its answer, `environment` holds what else happens to a
broker, `state` makes one; `coordinator` and `partition` hold the rules. It is no stand-in for real servers in your tests:
it is what models and searches of a protocol run on.
"""
