"""The page mover: a process beside each SGLang scheduler that copies and hashes its pages.

SGLang's storage threads live in the scheduler's process. There each step of Python waits for the interpreter
lock, up to 5 ms beside a busy scheduler, and takes it from the scheduler. So one page at a time crawls, and
tokens come late. Here a storage thread sends one message for a whole batch and waits for one answer.

    scheduler                                  page mover
    client.py  -- keys, numbers of host pages --> process.py: a `PoolClient` of its own,
               <-- which pages were moved     --  and SGLang's host pool, mapped by its descriptor

The mover may die, hang or be killed. Then a batch is missed, never wrong, and a new mover starts
(supervisor.py). Before a call returns without an answer, the mover is dead, so nothing writes into the host
pool any more.

May import the client, the protocol and the transports. Imports nothing of SGLang or torch.
"""
