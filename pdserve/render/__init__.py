"""`pdserve render`: a cluster file as files for another engine of processes, which starts and watches them.

May import: the plan of `up`, and nothing that runs processes.
"""
