"""OpenTelemetry behind the observer port: spans, metrics, and the trace context in the headers of messages.

What belongs here: the names, and what is recorded when. May use: the interfaces, the protocol and
``opentelemetry``'s API, never its SDK.
"""
