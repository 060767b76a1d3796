"""Kafka adapters: the transactional producer (confluent-kafka) and coordinator access (kafka-python)."""
