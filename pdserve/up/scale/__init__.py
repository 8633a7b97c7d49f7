"""Other numbers of workers while a cluster runs: the request and its answer in the run directory, and the plan
made again.
"""
