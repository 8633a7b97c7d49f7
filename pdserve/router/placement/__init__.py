"""Which worker gets a request: facts of the request, beliefs about caches, costs, policies, the plan.

Pure: no input or output, no clock. May import: fleet, sessions, metrics, api, config.
"""
