"""Other numbers of workers while a cluster runs: requests in the run directory, and the plan made again."""
