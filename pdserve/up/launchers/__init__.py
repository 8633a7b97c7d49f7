"""Who runs the processes of a cluster: this host, hosts by ssh, a job of Slurm, or Ray.

Everywhere agent.py is started on the process's host, and runs the process. running.py is the supervisor's end
of that; launcher.py says on which host a process runs, and what starts an agent there.

May import: the plan and the console of `up`, and nothing of its supervisor.
"""
