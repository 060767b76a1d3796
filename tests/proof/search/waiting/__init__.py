"""Messages that wait in the database while Kafka is away: once, all of them, in order. Every interleaving within bounds.

What this search has found in rules that looked right, each a planted mistake in `mistakes` with its shortest way:

- The last send must read the rows in a snapshot that begins after it has locked the mode. At REPEATABLE READ, whose snapshot the
  first statement takes, it misses what was committed while it waited for the lock, and calls the mode direct.
- A floor below which the sender does not look must be proved. "Above the highest number sent" leaves out a row whose number was
  drawn before and committed after, until a block that began later has overtaken it. So does a read in pages, each of which
  begins behind the page before. The product's own floor is searched, with its proof.
- A sender reads before its lane is ready. If the COMMIT of its last send was not answered, the database may carry it out after
  that: then the count of the rows that are deleted is all that keeps it from sending them once more.
- A last send that finds nothing must be fenced like any other. A writer of *always* takes no share of the lock: under a zombie's
  empty last send it decides rows, and is left with the mode direct. For the same reason nobody but the writer's
  owner may claim the sender's id anew.
- A writer of *never* must look at the mode once its claim is committed, not before and not within: a former owner's
  last block turns the mode while the claim waits for its lane.
- An owner that asks what became of its COMMIT must not believe a count that others may have raised. That may be another owner's,
  or its own next block's, where the database could not be asked at once and the lane has kept its claim.

Not a fault, and so left open: a direct block that meets silence may lock the mode alone although it is *later* by then. A share
is enough, and waits for nobody.
"""
