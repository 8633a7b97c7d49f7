"""The choice of workers for a request: its facts, estimates of caches, costs, policies, and the plan.

Pure: no input or output, no clock. The package may import: fleet, sessions, metrics, api, config.
"""
