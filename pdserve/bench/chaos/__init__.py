"""`pdserve bench chaos`: a pool under faults, with a model of what it must answer beside it.

    dice.py      random numbers that are a function of a seed alone          pure
    plan.py      which faults when: a function of (seed, minutes, kinds)     pure
    pages.py     a page's bytes are a function of its number                 pure
    records.py   what workers and faults write down                          pure
    kept.py      when nothing was disturbed, and what had to be there then   pure
    judge.py     from those records to the figures R1 to R14                 pure
    worker.py    a client process that reads and writes pages
    proxy.py     the way from clients to a node, which can be cut
    disk.py      a place for a node's SSD tier that can be full
    asking.py    asking one node past relays and rings
    timing.py    how long faults last, and what is waited for
    faults.py    doing to the pool what the plan says
    damage.py    the same: memory and disks
    tenants.py   the same: quotas, tokens, namespaces
    starving.py  whether the machine gives the nodes a processor
    hot.py       pages with copies, and what is left of them
    run.py       nodes, workers, faults, in time; then the judge
    report.py    a table for people, JSON for programs

Faults come from the plan alone, so a run replays from its seed; what the workers ask is drawn from the seed
too, but how operations and faults interleave is up to the machine.
"""
