"""Who runs the processes of a cluster: this host, hosts by ssh, a job of Slurm, or Ray. One module for
each; `base` is their contract and their table.

May import: the plan and the console of `up`, and nothing of its supervisor.
"""
