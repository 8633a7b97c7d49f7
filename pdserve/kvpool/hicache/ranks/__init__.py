"""The ranks of a worker on one host, where all ranks hold the same bytes (latent attention).

Each page would come over the network once for each rank, and all ranks read the same pages at the same time.
So one rank leads, and the others copy from its host pool what it has read:

    leader      the rank that has the group's socket. It says which pages it begins to read, and then where
                they lie, and what the checksum of each is. It waits for nobody
    follower    waits while the leader reads a page it wants, copies it, and checks the copy (follower.py)

    the leader                     the follower
    does not begin to read         waits `PATIENCE_S`, then reads itself
    is slow                        waits for half of its time, then reads itself
    has not got the page           is told so, and reads itself
    ends                           its socket closes: reads itself at once; another rank leads from then on
    gave the page's place away     finds another checksum in its copy, and reads itself

A follower that takes no messages is dropped. So a copy is as right as a page from the pool, and nobody waits
longer than for the pool. Pages of a node on this host are read by each rank: that is a copy too.

May import what hicache may, but SGLang.
"""
