"""Random faults under load, and an independent count of what became of every effect: ``make chaos SECONDS=600``.

**What runs.** A Redis that writes every change to disk, two schedulers, nodes on two "machines" (two data roots; the
nodes of one machine share one), and client processes that work in a few conversations. All of them are real processes.

**What is counted.** Each effect has an id. A client writes what it intends and what it was told to a log of its own
that survives its death (`intents`). Inside its sandbox the effect leaves a line or a file with its id; the judge reads
those from the disks of the data roots, not through the product (`evidence`), and compares (`judge`):

- ``twice``: an effect that happened more than once. A command's line has a nonce of that very run, so that a copy of
  the data (a checkpoint that was restored) is not taken for a second run, and a second run not for a copy.
- ``falsely_ok``: a command, session, job or batch answered OK whose line is missing.
- ``acknowledged_missing``: a write, append or replacement answered OK that is not there, or not whole.
- ``falsely_not_started``: answered with "it never began" (`judge.NEVER_BEGAN`), and it happened.
- ``unanswered``: a call of a client that lived which had no answer within its own deadline and 15 s, the grace that the
  client itself grants; `ReplyTimeout` is the client's own resignation and counts, too.
- ``leaked``: what is left after all sandboxes were destroyed and the nodes told to end (`leaks`).

**Faults** (`faults`), one after the other at random, from one seed: nodes, schedulers and clients killed, stopped and
frozen past their lease; Redis stopped, killed, emptied (FLUSHALL) and its connections cut; containers killed from
outside; messages delivered again, soon and an epoch later; all nodes of one machine at once.

**Fault model.** Disks keep what was written and the machines share one kernel. Redis loses nothing but by FLUSHALL.
Both machines are never told to lie down at the same time, a client that was killed is repeated under the same op ids
by its successor only if Redis lost nothing in between: an op id is remembered by Redis, and what forgets ids cannot
recognise one. Conversations do not ask for ``fresh``; those that ask for ``restore`` may lose what was done after their
last checkpoint, which is the promise: such effects are counted apart (``rolled_back``).
"""
