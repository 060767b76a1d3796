"""The long run of the comparison of the simulated broker with a real one: ``python -m harness.compare_brokers --help``."""

from __future__ import annotations

import argparse
import time
from contextlib import closing

from dualwrite.testing import EmbeddedKafka
from harness.both_brokers import Both
from harness.broker_steps import (
    ALPHABETS,
    ALPHABETS_V2,
    EVERYBODY,
    EVERYBODY_V2,
    EVERYTHING_V2,
    last_epochs,
    random_sequences,
    transition_cover,
)
from harness.raw_broker import LIBRDKAFKA, NEWEST

KAFKA = ("4.3.1", "4.4.0")
AT_ONCE = 2000  # sequences whose beginnings are remembered


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=5, help="steps, in every state that fewer steps reach")
    parser.add_argument("--random", type=int, default=2000, help="random sequences")
    parser.add_argument("--length", type=int, default=40, help="steps of a random sequence")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--version", type=int, choices=(1, 2), help="of transactions; both, if not given")
    parser.add_argument(
        "--kafka", nargs="*", default=KAFKA, help="the versions of the real broker, one after the other"
    )
    arguments = parser.parse_args()
    for kafka_version in arguments.kafka:
        print(f"Apache Kafka {kafka_version}")
        with EmbeddedKafka(version=kafka_version) as kafka:
            if arguments.version != 2:
                version_1(kafka, arguments)
            if arguments.version != 1:
                version_2(kafka, arguments)


def version_1(kafka, arguments):
    for name, (clients, steps) in ALPHABETS.items():
        run(kafka, f"{name}, depth {arguments.depth}", clients, transition_cover(steps, clients, arguments.depth))
    for name, versions in (("newest", NEWEST), ("librdkafka", LIBRDKAFKA)):
        sequences = random_sequences(arguments.random, arguments.length, arguments.seed)
        run(kafka, f"random, versions of {name}, seed {arguments.seed}", EVERYBODY, sequences, versions)


def version_2(kafka, arguments):
    depth = arguments.depth - 1  # a transaction takes fewer steps than one of version 1
    for name, (clients, steps) in ALPHABETS_V2.items():
        run(kafka, f"version 2, {name}, depth {depth}", clients, transition_cover(steps, clients, depth))
    sequences = random_sequences(arguments.random, arguments.length, arguments.seed, EVERYTHING_V2)
    run(kafka, f"version 2, random, seed {arguments.seed}", EVERYBODY_V2, sequences)
    clients, _ = ALPHABETS_V2["two producers of one id"]
    run(kafka, f"version 2, last epochs, seed {arguments.seed}", clients, last_epochs(24, arguments.seed), shrink=False)


def run(kafka, what, clients, sequences, versions=NEWEST, *, shrink=True):
    began = time.monotonic()
    with closing(Both(kafka, versions=versions)) as both:
        for start in range(0, len(sequences), AT_ONCE):
            play = both.play_and_shrink if shrink else both.play
            play(clients, sequences[start : start + AT_ONCE])
        seconds = time.monotonic() - began
        print(f"{what}: {len(sequences)} sequences, {both.steps} steps, {both.looks} looks, all equal, {seconds:.0f} s")


if __name__ == "__main__":
    main()
