"""A simulated Kafka broker, pure and deterministic: the rules of transactions without a server.

`broker.handle` maps a broker and a request (`requests`) to the next broker and the answer, `environment` holds all
other events of a broker, `state` creates one; `coordinator` and `partition` hold the rules. The simulator does not
replace real servers: the model and the search of the protocol run on it.

What belongs here: the simulated broker, database and clients, and the scheduler of their processes. May use: the
protocol, the ports, and the adapters whose servers it replaces; of these the broker itself only the protocol's values.
"""
