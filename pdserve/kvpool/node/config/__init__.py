"""The configuration of a pool node: typed, checked when it is read. May import `namespaces`, `policies` and
`settings`, and of the node only `memory.placement`.
"""
