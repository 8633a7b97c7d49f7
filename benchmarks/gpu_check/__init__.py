"""The check of a machine with one GPU, in one command and a quarter of an hour: launch/gpu_check.sh.

    run.py      each group of checks in a process of its own, with a deadline; the report
    group.py    that process: one line of JSON for each check
    checks.py   which checks there are (pure)
    report.py   what came of them, for people (pure)
    machine.py  transports.py  tensors.py  serving.py    the checks, by group

May import: engine, and what the other benchmarks may.
"""
