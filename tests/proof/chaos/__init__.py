"""The kill -9 run: processes die at every fail point and at random, servers die under them, and a checker compares."""
